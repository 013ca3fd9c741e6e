"""Medians, intervals and tests against numpy's and scipy's, and how often an interval holds."""

import itertools

import numpy as np
import pytest

from qat.bench.stats import (
    compare,
    effect_size,
    median_interval,
    p_value,
    percentiles,
    variation,
)


def drawn(n: int, *, mean: float = 1.0, spread: float = 0.02, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).normal(mean, spread, n).tolist()


def test_the_median_is_numpys_and_the_interval_the_same_at_every_call() -> None:
    samples = drawn(31)
    found = median_interval(samples)
    assert found == median_interval(samples[::-1])
    assert found.median == np.median(samples)
    assert min(samples) < found.low < found.median < found.high < max(samples)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_few_samples_are_bounded_by_their_least_and_largest(n: int) -> None:
    samples = drawn(n)
    found = median_interval(samples)
    assert (found.low, found.high) == (min(samples), max(samples))


@pytest.mark.parametrize("n", [6, 15, 40])
def test_the_interval_is_scipys_bootstrap(n: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    samples = drawn(n, seed=n)
    theirs = stats.bootstrap(
        (samples,), np.median, method="percentile", n_resamples=2_000, rng=1
    ).confidence_interval
    ours = median_interval(samples)
    room = 0.2 * (ours.high - ours.low)
    assert ours.low == pytest.approx(theirs.low, abs=room)
    assert ours.high == pytest.approx(theirs.high, abs=room)


def test_the_p_value_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    for n, m, method in [
        (3, 3, "exact"),
        (5, 9, "exact"),
        (20, 20, "exact"),
        (45, 60, "asymptotic"),
    ]:
        a, b = drawn(n), drawn(m, mean=1.01, seed=1)
        theirs = stats.mannwhitneyu(a, b, method=method).pvalue
        assert p_value(a, b) == pytest.approx(theirs, rel=1e-9)
    ties = np.random.default_rng(2).integers(0, 9, (2, 50)).astype(float)
    assert p_value(*ties) == pytest.approx(stats.mannwhitneyu(*ties, method="asymptotic").pvalue)


def test_the_p_value_with_ties_counts_every_split() -> None:
    a, b = [1.0, 2.0, 2.0], [2.0, 3.0, 4.0, 4.0]
    ranks = np.array([1, 3, 3, 3, 5, 6.5, 6.5])
    sums = np.array([ranks[list(chosen)].sum() for chosen in itertools.combinations(range(7), 3)])
    expected = 2 * min((sums <= 7).mean(), (sums >= 7).mean())
    assert p_value(a, b) == pytest.approx(expected)
    assert p_value([1.0] * 40, [1.0] * 40) == 1.0


def test_effect_percentiles_and_variation() -> None:
    assert effect_size([1, 2], [3, 4]) == 1 and effect_size([3, 4], [1, 2]) == -1
    assert effect_size([1, 2, 3], [1, 2, 3]) == 0 and effect_size([1, 3], [2, 3]) == 0.25
    samples = drawn(57)
    found = percentiles(samples)
    expected = [np.percentile(samples, q) for q in (10, 50, 90, 99)]
    assert [found.p10, found.p50, found.p90, found.p99] == pytest.approx(expected)
    assert variation([1.0, 3.0]) == pytest.approx(2**0.5 / 2) and variation([5.0]) == 0


@pytest.mark.parametrize(
    ("mean", "threshold", "verdict"),
    [
        (1.0, 0.03, "same"),
        (1.02, 0.03, "same"),  # apart, but too little to matter
        (1.02, 0.01, "slower"),
        (1.08, 0.03, "slower"),
        (0.92, 0.03, "faster"),
    ],
)
def test_a_verdict_needs_the_threshold(mean: float, threshold: float, verdict: str) -> None:
    before, after = drawn(30, spread=0.005), drawn(30, mean=mean, spread=0.005, seed=1)
    found = compare(before, after, threshold=threshold)
    assert found.verdict == verdict
    assert found.ratio == np.median(after) / np.median(before)
    assert np.sign(found.effect) == np.sign(found.ratio - 1)


def test_a_verdict_needs_intervals_apart() -> None:
    found = compare(drawn(4, spread=0.3), drawn(4, mean=1.3, spread=0.3, seed=1))
    assert abs(found.ratio - 1) > 0.03 and found.verdict == "same"


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")]])
def test_nothing_and_nan_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="expected finite numbers, at least one"):
        median_interval(samples)
