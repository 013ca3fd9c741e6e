"""What Linux tells of this process's memory, and how much of it it may have."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GIB = 2**30
STATUS, CLEAR_REFS, MEMINFO = (
    Path("/proc", *parts) for parts in (("self", "status"), ("self", "clear_refs"), ("meminfo",))
)
"""Where Linux tells about memory, and where a 5 starts its count of the peak anew."""


def process_gib(field: str) -> float | None:
    """A size of this process as Linux tells it, such as VmRSS; None on other systems."""
    if not STATUS.exists():
        return None
    return _kib(STATUS.read_text(), field) / 2**20


def available_gib() -> float | None:
    """Memory that could be had without taking it from another process; None if unknown."""
    if not MEMINFO.exists():
        return None
    return _kib(MEMINFO.read_text(), "MemAvailable") / 2**20


def restart_peak() -> None:
    """Let VmHWM count from here, where that is possible."""
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")


@contextmanager
def data_limit(gib: float) -> Iterator[None]:
    """At most `gib` of private memory inside the block: what Linux counts as VmData."""
    import resource

    old, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gib * GIB), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (old, hard))


def _kib(text: str, field: str) -> int:
    return int(text.split(f"{field}:")[1].split()[0])
