"""Detection of memory that grows with every step: a robust, steady slope counts as a leak.

Allocators follow a sawtooth; caches fill up and then stay full. Both differ from a leak in the
least memory within each tenth of the steps: a leak raises one after the other, as fast at the end
as at the beginning. A sawtooth longer than a tenth of the steps cannot be told apart from a leak.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

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
