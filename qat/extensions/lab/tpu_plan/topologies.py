"""TPUs that a step is compiled for.

Memory is the HBM of one chip from Google Cloud's documentation; the compiler leaves slightly less
to a program.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """A chip of one TPU generation."""

    name: str
    described: str
    """The smallest slice that libtpu describes; the step is compiled for its first chip."""
    host_bounds: tuple[int, int, int] | None  # chips per host, where libtpu needs them; else None
    hbm_gib: float


TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("v4", "v4:2x2x1", None, 32),
        Topology("v5e", "v5e:1x1", (1, 1, 1), 16),
        Topology("v5p", "v5p:2x2x1", None, 95),
        Topology("v6e", "v6e:1x1", (1, 1, 1), 32),
    )
}
"""The topologies of `qat.extensions.bench.config.TPUS` by name."""
