"""Tests of two sets of measurements against scipy's, and the verdicts that follow."""

import itertools

import numpy as np
import pytest

from qat.extensions.lab.stats import compare, effect_size, p_value


def drawn(n: int, *, mean: float = 1.0, spread: float = 0.02, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).normal(mean, spread, n).tolist()


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


def test_the_effect_is_cliffs_delta() -> None:
    assert effect_size([1, 2], [3, 4]) == 1 and effect_size([3, 4], [1, 2]) == -1
    assert effect_size([1, 2, 3], [1, 2, 3]) == 0 and effect_size([1, 3], [2, 3]) == 0.25


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
