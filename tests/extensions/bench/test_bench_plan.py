"""Predictions for other devices: from what was measured, at the rates fitted on one H200."""

from dataclasses import replace

import pytest
from tiny import tiny_model

from qat.extensions.bench.find_max import MemoryModel
from qat.extensions.bench.run import (
    LAYER_S,
    RESERVED_GIB,
    SPREAD,
    SPREADS,
    Measured,
    predict,
    seconds_by_rates,
)
from qat.extensions.bench.work import StepWork, step_work
from qat.models.devices import devices_named
from qat.models.flops import TokenFlops
from qat.models.language_model import LanguageModel

H200, H100, T4, V100, A100 = devices_named(("h200", "h100", "t4", "v100-32", "a100-80"))
WORK = StepWork(matmul_flops=3e9, attention_flops=1e8, elements=8e5, weights=6e8, layers=28)


def measured(**values: object) -> Measured:
    parts = {
        "device": H200,
        "dtype": "bf16",
        "work": WORK,
        "positions": 32768,
        "tokens_per_s": 150_000.0,
        "memory": MemoryModel(3.0, 0.01),
        "recomputes": True,
    }
    return Measured(**{**parts, **values})


def test_the_measuring_device_is_predicted_as_measured() -> None:
    found = predict(measured(), H200)
    assert found.tokens_per_s == pytest.approx(150_000)
    assert found.max_batch == int((H200.memory_gib - RESERVED_GIB - 3.0) / 0.01)
    assert found.tokens_per_s_range == pytest.approx((150_000, 150_000))


@pytest.mark.parametrize(("device", "spread"), [(H100, SPREADS["H100"]), (T4, SPREAD)])
def test_a_range_is_that_of_the_cards_own_points_or_of_all(device, spread) -> None:
    found = predict(measured(), device)
    expected = [share * found.tokens_per_s for share in spread]
    assert found.tokens_per_s_range == pytest.approx(expected)
    assert expected[0] < found.tokens_per_s < expected[1]


def test_flops_scale_with_the_peak_and_the_rest_with_bandwidth() -> None:
    flops = replace(WORK, elements=0.0, weights=0.0)
    ratio = A100.peak_flops("bf16") / H200.peak_flops("bf16")
    assert predict(measured(work=flops), A100).tokens_per_s == pytest.approx(150_000 * ratio)
    moved = replace(WORK, matmul_flops=0.0, attention_flops=0.0)
    ratio = A100.bandwidth / H200.bandwidth
    assert predict(measured(work=moved), A100).tokens_per_s == pytest.approx(150_000 * ratio)
    both = predict(measured(), A100).tokens_per_s / 150_000
    assert 312 / 989.4 < both < ratio


def test_a_small_card_uses_its_own_dtype_and_holds_fewer() -> None:
    found = predict(measured(), T4)
    assert found.dtype == "fp16" and found.tokens_per_s < 15_000
    assert found.max_batch == int((T4.memory_gib - RESERVED_GIB - 3.0) / 0.01)


def test_without_a_memory_model_no_batch_is_predicted() -> None:
    assert predict(measured(memory=None), T4).max_batch is None


def test_without_a_run_only_a_card_with_room_may_hold_a_batch() -> None:
    said = []

    def held_gib(dtype: str) -> float:
        said.append(dtype)
        return 100.0

    run = measured(device=None, tokens_per_s=None, memory=None, held_gib=held_gib)
    found = predict(run, H200), predict(run, T4)
    assert [each.max_batch for each in found] == [None, 0] and said == ["bf16", "fp16"]
    assert [each.peak_gib for each in found] == [RESERVED_GIB + 100] * 2


@pytest.mark.parametrize("run", [measured(device=None), measured(dtype="tf64")])
def test_from_a_device_without_a_known_peak_the_rates_alone_predict(run: Measured) -> None:
    expected = seconds_by_rates(WORK, A100, "bf16", 32768)
    assert predict(run, A100).tokens_per_s == pytest.approx(1 / expected)


def test_a_small_step_takes_its_launches_on_every_card() -> None:
    least = LAYER_S * WORK.layers / 64
    assert seconds(WORK, positions=64) == pytest.approx(least)
    assert seconds_by_rates(WORK, H100, "bf16", 64) == pytest.approx(least)
    assert seconds(WORK) > LAYER_S * WORK.layers / 32768


def test_recomputing_repeats_a_share_of_the_forward() -> None:
    student = LanguageModel(tiny_model())
    forward = 2.0 * step_work(student, TokenFlops(0.0, 0.0, 0.0)).weights
    flops = TokenFlops(3 * forward, 0.0, 30.0)
    kept, half, whole = (step_work(student, flops, recompute=r) for r in (0.0, 0.5, 1.0))
    assert kept.matmul_flops == 3 * forward and half.matmul_flops == 3.5 * forward
    assert whole.matmul_flops == 4 * forward and whole.attention_flops == pytest.approx(40.0)
    assert whole.elements == pytest.approx(kept.elements * 4 / 3)


def test_elements_are_what_enters_and_leaves_linears() -> None:
    student = LanguageModel(tiny_model())
    V, D = student.head.out_features, student.head.in_features
    linears = [m for m in student.model.base_model.modules() if hasattr(m, "in_features")]
    expected = V + D + sum(m.in_features + m.out_features for m in linears)
    assert step_work(student, TokenFlops(0.0, 4.0 * V * D, 0.0)).elements == pytest.approx(expected)


def seconds(work: StepWork, positions: int = 32768) -> float:
    return seconds_by_rates(work, H200, "bf16", positions)
