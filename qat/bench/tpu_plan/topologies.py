"""TPUs that a step is compiled for, by the names that users know; nothing heavy is imported here.

Memory is one chip's HBM as its maker states it (Google Cloud's documentation); what the compiler
lets a program have is a little less.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from qat.errors import ConfigError, how_to_install


@dataclass(frozen=True)
class Topology:
    """One chip of a kind."""

    name: str
    described: str
    """The smallest slice that libtpu describes; the step is compiled for its first chip."""
    host_bounds: tuple[int, int, int] | None
    """Chips of a host, where libtpu must be told."""
    hbm_gib: float


TOPOLOGIES = (
    Topology("v4", "v4:2x2x1", None, 32),
    Topology("v5e", "v5e:1x1", (1, 1, 1), 16),
    Topology("v5p", "v5p:2x2x1", None, 95),
    Topology("v6e", "v6e:1x1", (1, 1, 1), 32),
)


def split_names(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[Topology, ...]]:
    """Devices to predict, and topologies to compile for; every other name counts as a device."""
    known = {topology.name: topology for topology in TOPOLOGIES}
    cleaned = [name.strip() for name in names]
    devices = tuple(name for name in cleaned if name.lower() not in known)
    return devices, tuple(known[name.lower()] for name in cleaned if name.lower() in known)


# What a compiler says of a step's memory.

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


# Whether the extra for planning TPUs is there.

NEEDED = ("jax", "torchax", "libtpu")


def check_installed() -> None:
    """Refuse to plan without the extra.

    Raises:
        ConfigError: naming what is missing.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"plan: {', '.join(missing)} not installed, expected the extra for planning TPUs; run: "
            f"{how_to_install('tpu-plan')}"
        )
