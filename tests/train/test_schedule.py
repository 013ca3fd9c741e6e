"""Schedules against their closed forms."""

import math

import pytest

from qat.train.optim import lr_share

N, WARMUP, LEAST = 100, 10, 0.1


def shares(schedule: str, warmup: int = WARMUP, steps: int = N) -> list[float]:
    return [
        lr_share(step, steps, schedule=schedule, warmup_steps=warmup, min_ratio=LEAST)
        for step in range(steps)
    ]


def test_warm_up_is_linear_and_never_zero() -> None:
    for schedule in ("cosine", "constant", "wsd"):
        assert shares(schedule)[:WARMUP] == [(step + 1) / 10 for step in range(10)]
        assert shares(schedule, warmup=0)[0] == 1.0


def test_cosine() -> None:
    expected = [
        LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * k / 89)) for k in range(N - WARMUP)
    ]
    assert shares("cosine")[WARMUP:] == pytest.approx(expected)
    assert shares("cosine")[-1] == pytest.approx(LEAST)


def test_constant() -> None:
    assert shares("constant")[WARMUP:] == [1.0] * 90


def test_warm_up_stable_decay() -> None:
    course = shares("wsd")
    assert course[WARMUP:80] == [1.0] * 70
    assert course[80:] == pytest.approx([1 - 0.9 * k / 20 for k in range(1, 21)])


def test_short_runs_stay_within_bounds() -> None:
    for warmup, steps in ((0, 1), (5, 3), (3, 3), (2, 4)):
        for schedule in ("cosine", "constant", "wsd"):
            assert all(LEAST - 1e-9 <= share <= 1 for share in shares(schedule, warmup, steps))
