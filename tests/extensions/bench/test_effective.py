"""The report of what really ran: dtypes, attention, recomputed layers, kernels and graphs."""

import pytest
import torch
from torch.nn import functional as F

from qat.backend.device import profile_operators, select
from qat.errors import TrainingError
from qat.extensions.bench import effective
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.effective import (
    check_strictly,
    fallbacks,
    operator_facts,
    requested_settings,
)
from qat.extensions.bench.run import run_bench
from qat.kernels.dispatch import use_triton, ways_taken
from qat.logs import read_json_lines

CPU = select("cpu")


def facts(**values: object) -> dict[str, object]:
    plain = {
        "matmul_dtypes": {"fp32": 1.0},
        "attention": [],
        "operators": {},
        "kernels": {"head/pytorch/cpu": 2},
        "graph_breaks": 0,
        "recomputed_layers": 0,
        "compiled": False,
        "graphs": 0,
        "fallback": None,
    }
    return {**plain, **values}


def wished(**values: object) -> dict[str, object]:
    return requested_settings(BenchConfig(**{"dtype": "fp32", "device": "cpu", **values}), "sdpa")


def test_flops_by_dtype_and_the_attention_that_ran() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 16)
    query = torch.randn(1, 2, 16, 32)
    with profile_operators() as profile:
        a @ b
        a.bfloat16() @ b.bfloat16()
        torch.bmm(a.expand(2, 4, 8).double(), b.expand(2, 8, 16).double())
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    found = operator_facts(profile.profiler.kineto_results.events())
    assert found["matmul_dtypes"] == {"fp64": 0.5, "fp32": 0.25, "bf16": 0.25}
    assert found["attention"] == ["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert found["operators"] == {}


def test_what_is_only_compiled_is_no_product() -> None:
    double = torch.compile(lambda a, b: a @ b, backend="aot_eager", dynamic=True)
    a, b = torch.randn(4, 8), torch.randn(8, 16)
    with profile_operators() as profile:
        double(a, b)
    events = profile.profiler.kineto_results.events()
    assert any(event.name() == "aten::mm" and not event.shapes()[0] for event in events)
    assert operator_facts(events)["matmul_dtypes"] == {"fp32": 1.0}
    torch.compiler.reset()


def test_every_bench_row_says_what_ran(tmp_path) -> None:
    quick = {"device": "cpu", "steps": 1, "warmup": 2, "batch_size": 2, "seq_len": 8}
    config = BenchConfig(**quick, gradient_checkpointing=True)
    (row,) = run_bench(config, "tiny", tmp_path / "out").rows
    found = row["effective"]
    assert found["matmul_dtypes"] == {"fp32": 1.0}
    assert found["recomputed_layers"] == 2 * 3  # layers x steps
    assert found["kernels"]["head/pytorch/cpu"] > 0 and not found["compiled"]
    assert len(found["attention"]) == 1 and found["graph_breaks"] == 0
    assert row["requested"]["gradient_checkpointing"] and row["fallbacks"] == []
    assert "route" not in found
    sparse = config.model_copy(update={"attention": "nsa", "gradient_checkpointing": False})
    (row,) = run_bench(sparse, "tiny", tmp_path / "sparse").rows
    assert row["effective"]["route"] == "reference" and row["requested"]["attention"] == "nsa"


def test_strict_fails_a_bench_in_which_something_else_ran(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(effective, "recomputed_layers", lambda: 0)
    quick = {"device": "cpu", "steps": 1, "warmup": 1, "batch_size": 2, "seq_len": 8}
    config = BenchConfig(**quick, gradient_checkpointing=True, strict=True)
    with pytest.raises(TrainingError, match="gradient_checkpointing recomputed no layer"):
        run_bench(config, "tiny", tmp_path / "out")
    (row,) = read_json_lines(tmp_path / "out" / "results.jsonl")
    assert len(row["fallbacks"]) == 1


@pytest.mark.parametrize(
    ("asked", "ran", "words"),
    [
        ({"compile": "on"}, {"fallback": "Unsupported: x"}, "ran uncompiled (Unsupported: x)"),
        ({"compile": "on"}, {"compiled": True}, "ran uncompiled (no graph)"),
        ({"dtype": "bf16"}, {}, "dtype=bf16 multiplied in fp32 100%"),
        ({"gradient_checkpointing": True}, {}, "recomputed no layer"),
        ({}, {"graph_breaks": 3}, "gave up at 3 places"),
        ({}, {"host_fallbacks": {"aten::nonzero": 2}}, "aten::nonzero ran on the host, 2 times"),
    ],
)
def test_what_ran_instead_is_named(asked: dict, ran: dict, words: str) -> None:
    (found,) = fallbacks(wished(**asked), facts(**ran), CPU)
    assert words in found
    with pytest.raises(TrainingError, match="expected what was asked for"):
        check_strictly([found])


def test_nothing_is_named_where_all_ran() -> None:
    assert fallbacks(wished(), facts(), CPU) == []
    compiled = facts(compiled=True, graphs=2)
    assert fallbacks(wished(compile="on", dtype="tf32"), compiled, CPU) == []
    check_strictly([])


def test_a_kernel_that_fell_back_on_a_gpu_is_named() -> None:
    gpu = type("Gpu", (), {"device": torch.device("cuda"), "compiles": False})()
    math = ["aten::_scaled_dot_product_attention_math"]
    found = fallbacks(wished(), facts(kernels={"glu/pytorch/cuda": 7}, attention=math), gpu)
    assert "kernel glu ran as plain PyTorch on the GPU, 7 times" in found and len(found) == 2
    (slow,) = fallbacks(wished(), facts(route="reference"), gpu)
    assert "reference" in slow and fallbacks(wished(), facts(route="gather"), gpu) == []
    assert fallbacks(wished(), facts(route="reference"), CPU) == []


def test_kernels_count_the_way_they_take() -> None:
    before = ways_taken()
    use_triton(torch.ones(1), __name__)
    use_triton(torch.ones(1), f"elsewhere.{__name__.rpartition('.')[2]}")
    assert ways_taken() - before == {("test_effective", "pytorch", "cpu"): 2}
