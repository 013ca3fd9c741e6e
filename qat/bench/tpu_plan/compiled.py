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
    """What the compiler says that a step would take: `Used 48.66G of 15.75G hbm`."""
    found = re.search(rf"Used ([\d.]+)([{_UNITS}]) of [\d.]+[{_UNITS}] hbm", message)
    return None if found is None else float(found[1]) * 1024.0 ** (_UNITS.index(found[2]) - 2)
