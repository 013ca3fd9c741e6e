"""Comparison of two sets of measurements of the same thing.

Pure functions over lists of floats of one unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qat.extensions.bench.stats import Interval, checked, median_interval

THRESHOLD, MIN_SAMPLES = 0.03, 3
EXACT_UP_TO = 60

Verdict = Literal["same", "slower", "faster"]


@dataclass(frozen=True)
class Difference:
    """The difference between two sets of timings of the same thing."""

    before: Interval
    after: Interval
    ratio: float  # median after over median before; above 1 is slower
    effect: float  # Cliff's delta; above 0 is slower
    p: float
    verdict: Verdict


def effect_size(before: Sequence[float], after: Sequence[float]) -> float:
    """Return Cliff's delta: P(after > before) - P(after < before), from -1 to 1."""
    pairs = np.sign(checked(after)[:, None] - checked(before)[None, :])
    return float(pairs.mean())


def p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the p-value of the two-sided Mann-Whitney test that neither set tends to be larger.

    Exact given the ties for up to `EXACT_UP_TO` samples in total; beyond that, the normal
    approximation with corrections for ties and continuity.
    """
    from scipy.stats import mannwhitneyu, rankdata  # imported here: it takes half a second

    a, b = checked(before), checked(after)
    both = np.concatenate([a, b])
    if len(both) <= EXACT_UP_TO:
        return _exact_p(np.rint(2 * rankdata(both)).astype(int), len(a))
    if (both == both[0]).all():  # no spread to divide by
        return 1.0
    return float(mannwhitneyu(a, b, method="asymptotic").pvalue)


def compare(
    before: Sequence[float],
    after: Sequence[float],
    *,
    threshold: float = THRESHOLD,
) -> Difference:
    """Decide whether `after` is slower or faster than `before`.

    The medians must differ by more than `threshold` and their intervals must not overlap. One alone
    is chance or too small to matter, and the verdict is `same`.
    """
    first, second = median_interval(before), median_interval(after)
    ratio = second.median / first.median
    verdict: Verdict = "same"
    if first.low > second.high or second.low > first.high:
        if ratio > 1 + threshold:
            verdict = "slower"
        elif 1 / ratio > 1 + threshold:
            verdict = "faster"
    return Difference(
        first, second, ratio, effect_size(before, after), p_value(before, after), verdict
    )


def _exact_p(doubled_ranks: NDArray[np.int_], n: int) -> float:
    """Return the exact two-sided p-value of the rank sum of the first `n`, counting all choices."""
    ways = np.zeros((n + 1, doubled_ranks.sum() + 1))
    ways[0, 0] = 1
    for rank in doubled_ranks:
        ways[1:, rank:] += ways[:-1, :-rank]
    found = doubled_ranks[:n].sum()
    below, above = ways[n, : found + 1].sum(), ways[n, found:].sum()
    return float(min(1.0, 2 * min(below, above) / ways[n].sum()))
