"""Medians, intervals and percentiles against numpy's and scipy's."""

import numpy as np
import pytest

from qat.extensions.bench.stats import median_interval, percentiles, variation


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


def test_percentiles_and_variation() -> None:
    samples = drawn(57)
    found = percentiles(samples)
    expected = [np.percentile(samples, q) for q in (10, 50, 90, 99)]
    assert [found.p10, found.p50, found.p90, found.p99] == pytest.approx(expected)
    assert variation([1.0, 3.0]) == pytest.approx(2**0.5 / 2) and variation([5.0]) == 0


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")]])
def test_nothing_and_nan_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="expected finite numbers, at least one"):
        median_interval(samples)
