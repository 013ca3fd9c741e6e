"""Whether memory grows with every step: a robust slope that must be steady to count as a leak.

Allocators rise and fall like a saw, caches fill and are then full. Both are told from a leak by the
least memory within each tenth of the steps: a leak lifts one after the other, and as fast at the
end as at the beginning. Teeth longer than a tenth of the steps cannot be told from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

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
