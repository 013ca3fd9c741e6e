"""The report of a real GPU run: compiled layers, bf16 products, our kernels, no fallback."""

import json
from pathlib import Path

import pytest

from qat.errors import TrainingError
from qat.extensions.bench.config import BenchConfig, SweepConfig
from qat.extensions.bench.run import run_bench
from qat.extensions.lab.sweep.run import run_sweep
from qat.kernels import dispatch

pytestmark = pytest.mark.gpu

QUICK = {"device": "cuda", "steps": 3, "warmup": 3, "batch_size": 8}


def test_what_was_asked_for_ran(tmp_path: Path) -> None:
    config = BenchConfig(**QUICK, gradient_checkpointing=True, strict=True)
    (row,) = run_bench(config, "tiny", tmp_path / "out").rows
    found = row["effective"]
    assert found["compiled"] and found["graphs"] > 0 and found["graph_breaks"] == 0
    assert found["matmul_dtypes"]["bf16"] > 0.5 and found["recomputed_layers"] > 0
    assert any(name.startswith("qat::") for name in found["attention"])
    assert any(way.endswith("/triton/cuda") for way in found["kernels"])
    assert row["fallbacks"] == [] and row["requested"]["dtype"] == "bf16"


def test_a_missing_kernel_is_no_secret(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    with pytest.raises(TrainingError, match="ran as plain PyTorch on the GPU"):
        run_bench(BenchConfig(**QUICK, compile="off", strict=True), "tiny", tmp_path / "out")


def test_a_sweep_watches_the_gpu(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'name = "s"\nstudent = "tiny"\nrepeats = 1\n'
        '[settings]\ndevice = "cuda"\nsteps = 200\nwarmup = 3\nbatch_size = 8\n'
        '[product]\nlayout = ["rows", "packed"]\n'
    )
    report = run_sweep(SweepConfig(sample_s=0.2), recipe, tmp_path / "out")
    assert not report.failures, "\n".join(
        Path(failure["log"]).read_text(encoding="utf-8") for failure in report.failures
    )
    for row in report.rows:
        assert row["telemetry"]["gpu_temp_c"] > 0 and row["telemetry"]["gpu_mem_mib"] > 0
        assert row["is_leaking"] is False and row["memory_trend"] is not None
        assert json.dumps(row["effective"])
