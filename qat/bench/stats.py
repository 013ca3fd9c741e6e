"""Statistics of measurements: medians with intervals, comparison of two sets, and memory leaks.

Pure functions over lists of floats of one unit; every random draw has a fixed seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

CONFIDENCE, THRESHOLD, MIN_SAMPLES = 0.95, 0.03, 3
RESAMPLES, EXACT_UP_TO = 2_000, 60

Array = NDArray[np.float64]
Verdict = Literal["same", "slower", "faster"]


@dataclass(frozen=True)
class Interval:
    """A median with the bounds that hold the true median at a confidence of 95 %."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Percentiles:
    """Percentiles with linear interpolation between the nearest ranks, as in `numpy.percentile`."""

    p10: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Difference:
    """The difference between two sets of timings of the same thing."""

    before: Interval
    after: Interval
    ratio: float  # median after over median before; above 1 is slower
    effect: float  # Cliff's delta; above 0 is slower
    p: float
    verdict: Verdict


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median and its percentile bootstrap interval (Efron 1979), the same at every call.

    For fewer than six samples, too few for such bounds, these are the least and the largest.

    Raises:
        ValueError: no samples, or one that is not finite.
    """
    values = np.sort(_checked(samples))
    draws = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(draws, 1), [tail, 1 - tail])
    return Interval(float(np.median(values)), float(low), float(high))


def percentiles(samples: Sequence[float]) -> Percentiles:
    """Return the 10th, 50th, 90th and 99th percentile."""
    return Percentiles(*np.percentile(_checked(samples), [10, 50, 90, 99]).tolist())


def variation(samples: Sequence[float]) -> float:
    """Return the coefficient of variation, sample standard deviation over mean; 0 for one value."""
    values = _checked(samples)
    return float(values.std(ddof=1) / values.mean()) if len(values) > 1 else 0.0


def effect_size(before: Sequence[float], after: Sequence[float]) -> float:
    """Return Cliff's delta: P(after > before) - P(after < before), from -1 to 1."""
    pairs = np.sign(_checked(after)[:, None] - _checked(before)[None, :])
    return float(pairs.mean())


def p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the p-value of the two-sided Mann-Whitney test that neither set tends to be larger.

    Exact given the ties for up to `EXACT_UP_TO` samples in total; beyond that, the normal
    approximation with corrections for ties and continuity.
    """
    from scipy.stats import mannwhitneyu, rankdata  # imported here: it takes half a second

    a, b = _checked(before), _checked(after)
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


def _checked(samples: Sequence[float]) -> Array:
    values = np.asarray(samples, dtype=np.float64)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"samples={list(samples)[:5]}, expected finite numbers, at least one")
    return values


# Detection of memory that grows with every step: a robust slope that must be steady to count as a
# leak.
#
# Allocators follow a sawtooth; caches fill up and then stay full. Both differ from a leak in the
# least memory within each tenth of the steps: a leak raises one after the other, as fast at the end
# as at the beginning. A sawtooth longer than a tenth of the steps cannot be told apart from a leak.

FIRST_LOOK, NEXT_LOOK = 150, 20
"""Steps before the first verdict; the next one follows after another 1/NEXT_LOOK of the steps so
far."""
WARM_UP_STEPS, WARM_UP_SHARE = 40, 0.2
"""Steps left out at the beginning: this number or this fraction, whichever is more."""
BLOCKS = 10
RANKS = 8
"""Rank of the interval's bounds from either end of the 45 sorted slopes between ten blocks: 99 % by
the variance of Kendall's statistic (Sen 1968)."""
LEAST_DRIFT_MIB = 32.0
"""The growth at the interval's lower bound must reach this to be worth an alarm."""
LEAST_STEADINESS = 0.75
"""Least slope of the later half over that of the earlier one; filling caches slow down."""
EVEN_RISE, LEAST_RISES = 0.25, 7
"""A leak rises from a tenth to the next by at least this fraction of its slope, in this many of the
nine places; a cache that occasionally grows by a block does not."""
LOOKS = 2  # consecutive looks that must find a leak


@dataclass(frozen=True)
class Trend:
    """The trend of memory after the warm-up, in MiB."""

    slope_mib: float  # growth per step: Theil-Sen over the least memory of each tenth
    low_mib: float  # bounds of the 99 % interval of the slope
    high_mib: float
    drift_mib: float  # slope times steps
    steadiness: float  # slope of the later half over that of the earlier one
    rises: int
    """The number of the nine differences between successive tenths are as large as a leak's."""
    steps: int  # steps considered, without the warm-up

    @property
    def is_leak(self) -> bool:
        """True if even the interval's lower bound is relevant growth, and it does not slow down."""
        is_large = self.low_mib * self.steps >= LEAST_DRIFT_MIB
        is_steady = self.steadiness >= LEAST_STEADINESS and self.rises >= LEAST_RISES
        return is_large and is_steady


def memory_trend(memory_mib: Sequence[float]) -> Trend | None:
    """Return the trend of the memory after each step; None for fewer than `FIRST_LOOK` steps."""
    if len(memory_mib) < FIRST_LOOK:
        return None
    start = max(WARM_UP_STEPS, int(WARM_UP_SHARE * len(memory_mib)))
    values = np.asarray(memory_mib[start:], dtype=np.float64)
    lows = [block.min() for block in np.array_split(values, BLOCKS)]
    width = len(values) / BLOCKS
    slopes = sorted(_slopes(lows, width))
    slope = float(np.median(slopes))
    half = BLOCKS // 2
    early, late = (float(np.median(_slopes(part, width))) for part in (lows[:half], lows[half:]))
    return Trend(
        slope_mib=slope,
        low_mib=slopes[RANKS - 1],
        high_mib=slopes[-RANKS],
        drift_mib=slope * len(values),
        steadiness=late / early if early > 0 else 0.0,
        rises=int((np.diff(lows) >= EVEN_RISE * slope * width).sum()),
        steps=len(values),
    )


def leak_found_after(memory_mib: Sequence[float]) -> int | None:
    """Return after how many steps regular checks find a leak, or None.

    A leak is found if `LOOKS` consecutive checks see it.
    """
    steps, in_a_row = FIRST_LOOK, 0
    while steps <= len(memory_mib):
        in_a_row = in_a_row + 1 if memory_trend(memory_mib[:steps]).is_leak else 0
        if in_a_row == LOOKS:
            return steps
        steps += steps // NEXT_LOOK
    return None


def _slopes(values: Sequence[float], width: float) -> list[float]:
    """Return the slopes per step between all pairs of blocks that are `width` steps wide."""
    pairs = combinations(enumerate(values), 2)
    return [float((second - first) / ((j - i) * width)) for (i, first), (j, second) in pairs]
