"""Whether memory grows with every step: a robust slope that must be steady to count as a leak.

Allocators rise and fall like a saw, caches fill and are then full. Both are told from a leak by the
least memory within each tenth of the steps: a leak lifts them all, and as fast at the end as at
the beginning. A saw whose teeth are longer than a tenth of the steps cannot be told from one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

FIRST_LOOK, LOOK_EVERY = 150, 25
"""Steps before the first verdict, and between verdicts."""
WARM_UP_STEPS, WARM_UP_SHARE = 50, 0.2
"""What is left out at the beginning: so many steps, or that share if it is more."""
BLOCKS = 10
RANKS = 8
"""Of the 45 slopes between ten blocks, as many must lie outside either bound: 99 % by Kendall's
variance (Sen 1968)."""
LEAST_DRIFT_MIB = 32.0
"""A lower bound of the growth below this is not worth an alarm."""
LEAST_STEADINESS = 0.7
"""Slope of the later half over that of the earlier one; what fills up comes to rest."""


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
    steps: int
    """Steps looked at, warm-up left out."""

    @property
    def is_leak(self) -> bool:
        """Whether all of the interval means growth that matters and does not slow down."""
        is_large = self.low_mib * self.steps >= LEAST_DRIFT_MIB
        return is_large and self.steadiness >= LEAST_STEADINESS


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
        steps=len(values),
    )


def leak_found_after(memory_mib: Sequence[float]) -> int | None:
    """After how many steps somebody who looks every `LOOK_EVERY` steps finds a leak, or None."""
    for steps in range(FIRST_LOOK, len(memory_mib) + 1, LOOK_EVERY):
        if memory_trend(memory_mib[:steps]).is_leak:
            return steps
    return None


def _slopes(values: Sequence[float], width: float) -> list[float]:
    """Slopes a step between all pairs of blocks that are `width` steps wide."""
    pairs = combinations(enumerate(values), 2)
    return [float((second - first) / ((j - i) * width)) for (i, first), (j, second) in pairs]
