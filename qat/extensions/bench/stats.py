"""Statistics of measurements: medians with intervals, percentiles, variation.

Pure functions over lists of floats of one unit; every random draw has a fixed seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE, RESAMPLES = 0.95, 2_000
TAIL = 10  # slowest steps that a row names

Array = NDArray[np.float64]


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


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median and its percentile bootstrap interval (Efron 1979), the same at every call.

    For fewer than six samples, too few for such bounds, these are the least and the largest.

    Raises:
        ValueError: no samples, or one that is not finite.
    """
    values = np.sort(checked(samples))
    draws = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(draws, 1), [tail, 1 - tail])
    return Interval(float(np.median(values)), float(low), float(high))


def percentiles(samples: Sequence[float]) -> Percentiles:
    """Return the 10th, 50th, 90th and 99th percentile."""
    return Percentiles(*np.percentile(checked(samples), [10, 50, 90, 99]).tolist())


def slowest(seconds: Sequence[float], steps: Sequence[int]) -> list[tuple[int, float]]:
    """Return the `TAIL` slowest of `steps` with their seconds, the slowest first."""
    return sorted(zip(steps, seconds, strict=True), key=lambda pair: -pair[1])[:TAIL]


def variation(samples: Sequence[float]) -> float:
    """Return the coefficient of variation, sample standard deviation over mean; 0 for one value."""
    values = checked(samples)
    return float(values.std(ddof=1) / values.mean()) if len(values) > 1 else 0.0


def checked(samples: Sequence[float]) -> Array:
    """Return the samples as an array.

    Raises:
        ValueError: no samples, or one that is not finite.
    """
    values = np.asarray(samples, dtype=np.float64)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"samples={list(samples)[:5]}, expected finite numbers, at least one")
    return values
