"""The benchmark on a real GPU: its clock, emulated memory, isolation and every baseline."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from qat.backend import device as backend
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.find_max import TOLERANCE, OutOfMemory, unless_out_of_memory
from qat.extensions.bench.run import run_bench
from qat.extensions.lab.baselines.run import run_baselines
from qat.extensions.lab.config import BaselinesConfig
from qat.models.devices import device_called

pytestmark = pytest.mark.gpu

QUICK = {"device": "cuda", "steps": 3, "warmup": 3}


def test_a_smaller_card_is_emulated_and_gives_its_memory_back() -> None:
    gpu = backend.select("cuda")

    def take(gib: float) -> int:
        return torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").numel()

    with gpu.limit_memory(gpu.memory_use().held_gib + 2):
        assert unless_out_of_memory(lambda: take(1), gpu)
        found = unless_out_of_memory(lambda: take(3), gpu)
        assert isinstance(found, OutOfMemory) and "Tried to allocate" in found.error
        assert unless_out_of_memory(lambda: take(1), gpu)
    assert unless_out_of_memory(lambda: take(3), gpu)


def test_marks_measure_the_device_and_not_the_host() -> None:
    gpu = backend.select("cuda")
    x = torch.randn(4096, 4096, device="cuda")
    x @ x
    first = gpu.mark()
    for _ in range(10):
        x @ x
    assert gpu.seconds_between(first, gpu.mark()) > 1e-4


def test_a_table_with_mfu_and_compile_facts(tmp_path: Path) -> None:
    config = BenchConfig(**QUICK, batch_sizes="8,32,128", plan=True)
    report = run_bench(config, "tiny", tmp_path / "out")
    assert device_called(torch.cuda.get_device_name()) is not None
    for row in report.rows[:3]:
        assert row["status"] == "OK" and 0 < row["mfu_frac"] < 1
        assert row["compiled"] and row["graphs"] > 0
        assert 0 < row["peak_gib"] <= row["peak_reserved_gib"]
        assert row["fallback"] is None
    assert all(prediction.max_batch > 0 for prediction in report.predictions)


def searched(out: Path, limit_gib: float, device: str, checkpointing: bool) -> tuple:
    """Return which batches fit, the largest, the predicted one and how the last row ended."""
    config = BenchConfig(
        **{**QUICK, "device": device},
        find_max_batch=True,
        memory_limit=f"{limit_gib:.2f}GiB",
        gradient_checkpointing=checkpointing,
        seq_len=256,
    )
    report = run_bench(config, "tiny", out)
    fits = {trial.batch_size: trial.fits for trial in report.search.trials}
    return fits, report.search.largest, report.search.predicted, report.rows[-1]["status"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_largest_batch_within_a_limit_is_known_within_a_hundredth(
    tmp_path: Path, checkpointing: bool
) -> None:
    # a process of its own: what tests before it left in the allocator's pools is not free, and no
    # prediction knows of it
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(searched, (tmp_path / "out", 1.5, "cuda", checkpointing))
    fits, largest, predicted, status = found
    assert status == "MAX"
    failing = min(size for size, fit in fits.items() if not fit)
    assert failing - max(size for size, fit in fits.items() if fit) <= max(1, TOLERANCE * largest)
    assert predicted == pytest.approx(largest, rel=0.3)


def test_every_baseline_takes_its_turn(tmp_path: Path) -> None:
    config = BaselinesConfig(**QUICK, batch_size=64, rounds=1)
    _, rows = run_baselines(config, "tiny", tmp_path / "out")
    status = {row["case"]: row["status"] for row in rows}
    assert status.pop("torchao-int2") in ("OK", "torchao is not installed")
    assert set(status.values()) == {"OK"}
    losses = {row["case"]: row.get("loss_nats") for row in rows}
    assert losses["plain-compiled"] == pytest.approx(losses["ours"], rel=0.02)
