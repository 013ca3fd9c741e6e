"""Running on XLA: what is compiled before the clock, kept, told of, and survived."""

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torch_xla", reason="torch_xla is not installed; .ci/xla runs these tests")

from train_case import config, make_trainer
from xla_case import make_short_place

from qat.backend.base import GIB
from qat.backend.device import select
from qat.errors import ConfigError
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.run import run_bench
from qat.extensions.xla.backend import XlaBackend
from qat.generate.text import generate_text, open_generator
from qat.train.step import TrainingStep

pytestmark = [
    pytest.mark.xla,
    pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32"),
]
XLA = select("xla")
SHORT = {"device": "xla", "dtype": "fp32", "seq_len": 16, "top_k": 5, "steps": 2, "warmup": 1}
FULL = "Bad StatusOr access: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm"
KEEPS = """
from pathlib import Path
import torch
from qat.backend.device import select
from qat.extensions.xla.backend import XlaBackend
XlaBackend.is_host = lambda _: False  # as on a TPU: the CPU client writes, though it cannot read
xla, kept = select("xla"), Path("kept")
with xla.session(kept), xla.session(kept):
    torch.ones(3, device=xla.device).sin().cpu()
try:
    xla.session(Path("other")).__enter__()
except Exception as error:
    print(len(list(kept.iterdir())), error)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_short_place(tmp_path)


def test_a_search_survives_what_does_not_fit(place: Path, tmp_path: Path, monkeypatch) -> None:
    """A TPU of two sequences, on the CPU client."""
    real_take, real_end, sizes = TrainingStep.__call__, XlaBackend.step_end, [0]

    def take(self: TrainingStep, batches: list, *rest: object) -> object:
        sizes.append(len(batches[0].mask))
        return real_take(self, batches, *rest)

    def end(self: XlaBackend) -> None:
        if sizes[-1] > 2:
            sizes.append(0)
            raise RuntimeError(FULL)
        real_end(self)

    told = {"bytes_used": GIB, "peak_bytes_used": GIB, "bytes_limit": 16 * GIB}
    monkeypatch.setattr(TrainingStep, "__call__", take)
    monkeypatch.setattr(XlaBackend, "step_end", end)
    monkeypatch.setattr(XlaBackend, "is_host", lambda _: False)
    monkeypatch.setattr(XlaBackend, "memory_counters", lambda _: told)
    wished = BenchConfig(**SHORT, find_max_batch=True)
    *trials, largest = run_bench(wished, str(place / "student"), tmp_path / "out").rows
    tried = {row["batch_size"]: row["status"] for row in trials if row["kind"] == "trial"}
    found = {size: tried[size] for size in (1, 2, 3, 4)}
    assert found == {1: "OK", 2: "OK", 3: "OOM", 4: "OOM"}
    # its trial compiled what the timed steps run
    assert (largest["batch_size"], largest["graphs"], largest["recompiles"]) == (2, 0, 0)
    assert largest["host_fallbacks"] == {} and largest["fallbacks"] == []
    assert largest["step_compile_s"] == 0 < largest["warmup_s"]
    assert min(largest["samples"]) > 0 and largest["peak_gib"] is None
    monkeypatch.undo()
    (again,) = run_bench(
        BenchConfig(**SHORT, batch_size=2), str(place / "student"), tmp_path / "again"
    ).rows
    assert largest["loss_nats"] == again["loss_nats"]


def test_no_step_of_a_long_run_compiles_behind_the_warm_up(place: Path, tmp_path: Path) -> None:
    """Rates or corrections that become zero or one compile no new graph either."""
    course = {"max_steps": 400, "warmup_steps": 50, "min_lr_ratio": 0.0, "beta2": 0.95}
    trainer = make_trainer(
        config(place, device="xla", **course), place / "student", tmp_path / "out"
    )
    batches = [trainer.cache.batch(np.arange(4))]
    trainer.take_step.warm_up(batches, 0)
    before = XLA.tracing.counts().compiles
    (adamw,) = trainer.optimizer._adamw
    for step in (0, 1, 2, 50, 330, 399):
        adamw.count_from(step)
        trainer.take_step(batches, step)
    assert XLA.tracing.counts().compiles == before


def test_a_search_of_what_the_compiler_would_crash_at_is_refused(
    place: Path, tmp_path: Path
) -> None:
    wished = BenchConfig(**SHORT, find_max_batch=True)
    with pytest.raises(ConfigError, match="no limit can be set on xla cpu.* --plan"):
        run_bench(wished, str(place / "student"), tmp_path / "out")


def test_graphs_are_kept_in_one_directory(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", KEEPS], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    number, words = told.stdout.split(maxsplit=1)
    assert int(number) > 0 and "compiled already and keeps it elsewhere" in words


def test_the_end_tells_of_graphs_and_names_what_the_host_computed(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.INFO), XLA.session(tmp_path / "kept"):
        x = torch.ones(3).to(XLA.device)
        torch.bucketize(x, x)
        XLA.step_end()
    assert not (tmp_path / "kept").exists()
    assert "the CPU client cannot read back what it compiled" in caplog.messages[0]
    assert "graphs compiled in" in caplog.messages[-2]
    assert "XLA lacks aten::bucketize.Tensor (" in caplog.messages[-1]


def test_each_bucket_of_lengths_is_one_graph_more() -> None:
    generator, tokenizer = open_generator("checkpoints/tiny-qwen3", device="xla", dtype="fp32")
    graphs = {}
    for words in (5, 9, 20, 18):
        before = XLA.tracing.counts().compiles
        said = generate_text(
            generator,
            tokenizer,
            "the value of the " * words,
            max_new_tokens=4,
            temperature=0.0,
            raw=True,
        )
        assert said.text
        graphs[words] = XLA.tracing.counts().compiles - before
    assert graphs == {5: 1, 9: 0, 20: 1, 18: 0}
