"""What a compiler says of a step's memory."""

import re
from dataclasses import dataclass

_UNITS = "KMGT"


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step."""

    peak_gib: float | None
    """None if the step does not fit into the memory of the device."""
    needed_gib: float | None
    """What it would take; the peak if it fits."""
    seconds: float
    """Of the compiler alone."""


def used_gib(message: str) -> float | None:
    """What the compiler says that a step would take, in either of its two ways.

    `Used 48.66G of 15.75G hbm`, or `(16.34G) exceeds available HBM (14.40G)`.
    """
    size = rf"([\d.]+)([{_UNITS}])"
    found = re.search(rf"Used {size} of {size} hbm|\({size}\) exceeds available HBM", message)
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[5], found[6])
    return float(number) * 1024.0 ** (_UNITS.index(unit) - 2)
