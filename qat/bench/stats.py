"""What measurements can say: medians with intervals, whether two sets differ, whether memory leaks.

Pure functions over lists of floats, all of one unit; every random draw has a fixed seed.
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
    """A median between the bounds that hold the true one with the stated confidence."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Percentiles:
    """Between the nearest ranks, as `numpy.percentile` takes them."""

    p10: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Difference:
    """What lies between a set of timings and another of the same thing."""

    before: Interval
    after: Interval
    ratio: float
    """Median after over median before; above 1 is slower."""
    effect: float
    """Cliff's delta: above 0 is slower."""
    p: float
    verdict: Verdict


def median_interval(
    samples: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0
) -> Interval:
    """The median and its percentile bootstrap interval (Efron 1979), the same at every call.

    Of fewer than six samples, which cannot bound a median so well, it is the least and the largest.

    Raises:
        ValueError: no samples, one that is not finite, or a confidence outside (0, 1).
    """
    values = np.sort(_checked(samples))
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}, expected a share between 0 and 1")
    draws = np.random.default_rng(seed).choice(values, (RESAMPLES, len(values)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.median(draws, 1), [tail, 1 - tail])
    return Interval(float(np.median(values)), float(low), float(high))


def percentiles(samples: Sequence[float]) -> Percentiles:
    """The 10th, 50th, 90th and 99th percentile."""
    return Percentiles(*np.percentile(_checked(samples), [10, 50, 90, 99]).tolist())


def variation(samples: Sequence[float]) -> float:
    """Coefficient of variation: sample standard deviation over mean; 0 for a single sample."""
    values = _checked(samples)
    return float(values.std(ddof=1) / values.mean()) if len(values) > 1 else 0.0


def effect_size(before: Sequence[float], after: Sequence[float]) -> float:
    """Cliff's delta: P(after > before) - P(after < before), from -1 to 1."""
    pairs = np.sign(_checked(after)[:, None] - _checked(before)[None, :])
    return float(pairs.mean())


def p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Two-sided Mann-Whitney test that neither set tends to be larger.

    Exact given the ties for up to `EXACT_UP_TO` samples in all; beyond, the normal approximation
    with corrections for ties and continuity.
    """
    from scipy.stats import mannwhitneyu, rankdata  # half a second

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
    confidence: float = CONFIDENCE,
) -> Difference:
    """Whether `after` is slower or faster than `before`: by more than `threshold`, intervals apart.

    Both must hold; one alone is chance or too small to matter, and the verdict is `same`.
    """
    first = median_interval(before, confidence=confidence)
    second = median_interval(after, confidence=confidence)
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
    """How often a choice of `n` ranks has a sum as extreme as the first `n`: all are counted."""
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


# Whether memory grows with every step: a robust slope that must be steady to count as a leak.
#
# Allocators rise and fall like a saw, caches fill and are then full. Both are told from a leak by
# the least memory within each tenth of the steps: a leak lifts one after the other, and as fast at
# the end as at the beginning. Teeth longer than a tenth of the steps cannot be told from it.

FIRST_LOOK, NEXT_LOOK = 150, 20
"""Steps before the first verdict; the next follows after that part of the steps so far."""
WARM_UP_STEPS, WARM_UP_SHARE = 40, 0.2
"""What is left out at the beginning: so many steps, or that share if it is more."""
BLOCKS = 10
RANKS = 8
"""Of the 45 slopes between ten blocks, as many must lie outside either bound: 99 % by Kendall's
variance (Sen 1968)."""
LEAST_DRIFT_MIB = 32.0
"""A lower bound of the growth below this is not worth an alarm."""
LEAST_STEADINESS = 0.75
"""Slope of the later half over that of the earlier one; what fills up comes to rest."""
EVEN_RISE, LEAST_RISES = 0.25, 7
"""A leak rises from a tenth to the next by this share of its slope at least, in so many of the nine
places; a cache that grows by a block now and then does not."""
LOOKS = 2
"""In a row that must find it."""


@dataclass(frozen=True)
class Trend:
    """How memory moved after the warm-up, in MiB."""

    slope_mib: float
    """A step, Theil-Sen over the least of each tenth."""
    low_mib: float
    high_mib: float
    """99 % interval of the slope."""
    drift_mib: float
    """Slope times steps."""
    steadiness: float
    """Slope of the later half over that of the earlier one."""
    rises: int
    """From a tenth of the steps to the next, of nine: those that are as large as a leak's."""
    steps: int
    """Steps looked at, warm-up left out."""

    @property
    def is_leak(self) -> bool:
        """Whether all of the interval means growth that matters and does not slow down."""
        is_large = self.low_mib * self.steps >= LEAST_DRIFT_MIB
        is_steady = self.steadiness >= LEAST_STEADINESS and self.rises >= LEAST_RISES
        return is_large and is_steady


def memory_trend(memory_mib: Sequence[float]) -> Trend | None:
    """The trend of the memory after each step; None for fewer than `FIRST_LOOK` steps."""
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
    """After how many steps somebody who looks now and then finds a leak, or None.

    Found is what two looks in a row see.
    """
    steps, in_a_row = FIRST_LOOK, 0
    while steps <= len(memory_mib):
        in_a_row = in_a_row + 1 if memory_trend(memory_mib[:steps]).is_leak else 0
        if in_a_row == LOOKS:
            return steps
        steps += steps // NEXT_LOOK
    return None


def _slopes(values: Sequence[float], width: float) -> list[float]:
    """Slopes a step between all pairs of blocks that are `width` steps wide."""
    pairs = combinations(enumerate(values), 2)
    return [float((second - first) / ((j - i) * width)) for (i, first), (j, second) in pairs]
