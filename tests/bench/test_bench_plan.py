"""Predictions for other devices follow the stated formula."""

import pytest

from qat.bench.find_max import MemoryModel
from qat.bench.measure import Roofline
from qat.bench.run import RESERVED_GIB, Measured, predict
from qat.models.cost import devices_named

H200, T4, A100 = devices_named(("h200", "t4", "a100-80"))
FLOPS = 3e9


def measured(**values: object) -> Measured:
    roofline = Roofline(H200.peak_flops("bf16"), 0.8 * H200.peak_flops("bf16"), 4e12)
    parts = {
        "device": H200,
        "roofline": roofline,
        "flops_per_token": FLOPS,
        "tokens_per_s": 150_000.0,
        "memory": MemoryModel(3.0, 0.01),
    }
    return Measured(**{**parts, **values})


def test_the_measuring_device_is_predicted_as_measured() -> None:
    found = predict(measured(), H200)
    assert found.tokens_per_s == pytest.approx(150_000)
    assert found.max_batch == int((H200.memory_gib - RESERVED_GIB - 3.0) / 0.01)


def test_matmuls_scale_with_the_peak_and_the_rest_with_bandwidth() -> None:
    run = measured()
    expected = (
        run.matmul_s * H200.peak_flops("bf16") / A100.peak_flops("bf16")
        + run.rest_s * H200.bandwidth / A100.bandwidth
    )
    assert predict(run, A100).tokens_per_s == pytest.approx(1 / expected)


def test_a_small_card_uses_its_own_dtype_and_holds_fewer() -> None:
    found = predict(measured(), T4)
    assert found.dtype == "fp16" and found.tokens_per_s < 15_000
    assert found.max_batch == int((T4.memory_gib - RESERVED_GIB - 3.0) / 0.01)


def test_without_a_memory_model_no_batch_is_predicted() -> None:
    assert predict(measured(memory=None), T4).max_batch is None


def test_an_unknown_measuring_device_counts_with_its_measured_peaks() -> None:
    roofline = Roofline(None, 1e11, 1e10)
    run = measured(device=None, roofline=roofline, tokens_per_s=20.0)
    expected = run.matmul_s * 1e11 / (0.8 * A100.peak_flops("bf16")) + run.rest_s * 1e10 / (
        0.8 * A100.bandwidth
    )
    assert predict(run, A100).tokens_per_s == pytest.approx(1 / expected)
