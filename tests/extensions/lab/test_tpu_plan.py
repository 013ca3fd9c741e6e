"""The planner of TPUs where none of its libraries is needed: names, the search, graphs, errors."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qat.errors import ConfigError
from qat.extensions.bench.config import TPUS, BenchConfig, split_names
from qat.extensions.bench.verb import bench
from qat.extensions.lab.tpu_plan import pieces, run
from qat.extensions.lab.tpu_plan import run as compiling
from qat.extensions.lab.tpu_plan.pieces import (
    Compiled,
    check_alike,
    end_of_forward,
    split,
    trace,
    used_gib,
)
from qat.extensions.lab.tpu_plan.run import MARGIN, memory_for, plan_tpu, sizes
from qat.extensions.lab.tpu_plan.topologies import TOPOLOGIES
from qat.logs import read_json_lines

V6E = TOPOLOGIES["v6e"]


class Line:
    """A planner whose steps take 4 GiB and a fixed part of one for each sequence."""

    dtype = "bf16"

    def __init__(
        self, config: BenchConfig, source: str, topology: object, memory_gib: float
    ) -> None:
        self.per_sequence_gib = 0.01 if config.gradient_checkpointing else 0.05
        self.memory_gib = memory_gib

    def compile(self, batch_size: int) -> Compiled:
        gib = 4 + self.per_sequence_gib * batch_size
        return Compiled(gib if gib <= self.memory_gib else None, gib, 0.0)


def test_tpus_are_told_from_devices() -> None:
    assert split_names(("T4", " v6e", "V5P", "h300")) == (("T4", "h300"), ("v6e", "v5p"))
    assert BenchConfig(plan="v4,v5e").planned is None
    assert BenchConfig(plan="v4,T4").planned == ("T4",)
    assert BenchConfig(plan=True).planned == () and BenchConfig(plan=True).tpus == ()


def test_every_tpu_that_the_verb_names_has_a_topology() -> None:
    assert tuple(TOPOLOGIES) == TPUS


def test_the_search_names_a_size_that_was_compiled_and_leaves_the_margin(monkeypatch) -> None:
    monkeypatch.setattr(compiling, "Planner", Line)
    config = BenchConfig(find_max_batch=True, gradient_checkpointing=True)
    found = plan_tpu(config, "tiny", V6E)
    limit = 32 * (1 - MARGIN)
    assert found.max_batch == max(size for size in sizes() if 4 + 0.01 * size <= limit)
    assert found.best.peak_gib <= limit == found.memory_gib
    tried = [trial.batch_size for trial in found.trials]
    assert found.max_batch in tried and min(s for s in sizes() if s > found.max_batch) in tried
    assert len(tried) < 20


def test_a_smaller_chip_is_emulated() -> None:
    assert memory_for(V6E, BenchConfig(memory_limit="16GiB")) == pytest.approx(16 * (1 - MARGIN))
    with pytest.raises(ConfigError, match="memory_limit=64GiB, but a v6e chip has 32 GiB; lower"):
        memory_for(V6E, BenchConfig(memory_limit="64GiB"))


def test_the_verb_shows_both_ways_and_ends_with_them(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(compiling, "Planner", Line)
    monkeypatch.setattr(run, "check_installed", lambda: None)
    config = BenchConfig(plan="v6e", find_max_batch=True)
    last = bench("tiny", config=config, out=tmp_path / "out")
    printed = capsys.readouterr().out
    assert "compiled" in printed and "TPU-v6e" in printed and "PREDICTED" in printed
    plain, recomputing = last["planned"]
    assert not plain["gradient_checkpointing"] and recomputing["gradient_checkpointing"]
    assert plain["max_batch"] < recomputing["max_batch"]
    rows = read_json_lines(tmp_path / "out" / "results.jsonl")
    assert {row["kind"] for row in rows} == {"planned"} and rows[0]["on"] == "TPU-v6e"
    assert {row["status"] for row in rows} == {"COMPILED", "OOM"}


@pytest.mark.parametrize("plan", ["v6e", "T4,v6e"])
def test_one_line_says_that_the_extra_is_absent(plan, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pieces, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"jax, torchax, libtpu not .*; run: .*\[tpu-plan\]"):
        bench("tiny", config=BenchConfig(plan=plan), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"plan": "v9x"}, "plan=v9x is no device of the table; choose .* or compile for v4, v5e"),
        ({"plan": "v6e", "dtype": "fp16"}, "dtype=fp16, but a TPU computes in bf16 or fp32"),
        ({"plan": "v6e", "optimizer": "adamw8bit"}, "optimizer=adamw8bit, but steps are planned"),
    ],
)
def test_what_cannot_be_planned(values: dict, message: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "check_installed", lambda: None)
    with pytest.raises(ConfigError, match=message):
        bench("tiny", config=BenchConfig(**values), out=tmp_path / "out")


def test_what_the_compiler_says_of_memory() -> None:
    assert used_gib("Ran out of memory. Used 48.66G of 15.75G hbm.") == pytest.approx(48.66)
    assert used_gib("Used 512.0M of 15.75G hbm") == pytest.approx(0.5)
    total = "total memory required for HLO temporaries (16.34G) exceeds available HBM (14.40G)"
    assert used_gib(total) == pytest.approx(16.34)
    assert used_gib("something else") is None


def test_a_step_cut_in_two_is_the_step() -> None:
    fake = FakeTensorMode()
    with fake:
        x, W, g = (torch.empty(4, 4) for _ in range(3))
        x.requires_grad_(), W.requires_grad_()

    def both() -> list[torch.Tensor]:
        out = (x.t() @ W).sigmoid() * x
        return [end_of_forward(out.detach()), *torch.autograd.grad(out, [x, W], g)]

    joint = trace(both, [x, W, g], fake)
    forward, backward = split(joint)
    inputs = torch.randn(3, 4, 4).unbind()
    out, *saved = forward(*inputs)
    whole = joint(*inputs)
    assert torch.equal(out, whole[0])
    for found, expected in zip(backward(*inputs, *saved), whole[1:], strict=True):
        assert torch.equal(found, expected)
    assert all(any(tensor is value for value in saved) is False for tensor in inputs)


def test_layers_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer 1 differs from layer 0"):
        check_alike([torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)])
