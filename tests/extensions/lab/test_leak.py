"""Leaks planted into made-up memory are found; what memory does without one is not called so."""

import numpy as np
import pytest

from qat.extensions.lab.sweep.leak import FIRST_LOOK, leak_found_after, memory_trend


def saw(steps: int, height: float, teeth: int) -> np.ndarray:
    return height * (np.arange(steps) % teeth) / teeth


def noise(steps: int, mib: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(2000, mib, steps)


@pytest.mark.parametrize(("height", "teeth", "seed"), [(0, 1, 0), (16, 10, 1), (48, 7, 2)])
def test_a_mebibyte_a_step_is_found_within_200(height: float, teeth: int, seed: int) -> None:
    step = np.arange(200)
    warm_up = 500 * (1 - np.exp(-step / 8))
    memory = step + noise(200, 3, seed) + saw(200, height, teeth) + warm_up
    found = leak_found_after(list(memory))
    assert found is not None and FIRST_LOOK <= found <= 200


@pytest.mark.parametrize(
    "shape",
    [
        lambda step: 0 * step,
        lambda step: saw(len(step), 512, 50),
        lambda step: 1000 * (1 - np.exp(-step / 60)),
        lambda step: 256.0 * (step > 3000) + 256.0 * (step > 7000),
        lambda step: 40 * np.log1p(step),
    ],
    ids=["noise", "saw", "warm-up", "two steps up", "slower and slower"],
)
def test_no_alarm_in_10000_steps_without_a_leak(shape) -> None:
    memory = shape(np.arange(10_000)) + noise(10_000, 3, 0)
    assert leak_found_after(list(memory)) is None


def test_the_trend_says_how_fast_and_how_sure() -> None:
    trend = memory_trend(list(2.0 * np.arange(400) + noise(400, 1, 0)))
    assert trend.slope_mib == pytest.approx(2.0, rel=0.02)
    assert trend.low_mib <= trend.slope_mib <= trend.high_mib
    assert trend.steps == 320 and trend.drift_mib == pytest.approx(640, rel=0.02)
    assert trend.is_leak and trend.steadiness == pytest.approx(1, abs=0.1)


def test_too_few_steps_tell_nothing() -> None:
    assert memory_trend([1.0] * (FIRST_LOOK - 1)) is None
    assert leak_found_after([1.0] * (FIRST_LOOK - 1)) is None
    assert not memory_trend([1.0] * FIRST_LOOK).is_leak
