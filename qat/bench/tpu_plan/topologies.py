"""TPUs that a step is compiled for, by the names that users know; nothing heavy is imported here.

Memory is one chip's HBM as its maker states it (Google Cloud's documentation); what the compiler
lets a program have is a little less.
"""

from collections.abc import Sequence
from dataclasses import dataclass


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
