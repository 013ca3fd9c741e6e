"""Memory, garbage and cores of this process on Linux, and the limits of its container."""

import gc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GIB = 2**30
USUAL, RARE = gc.get_threshold(), (100_000, 50, 100)
"""Python's thresholds of garbage collection, and those while modules are imported."""
STATUS, CLEAR_REFS, MEMINFO = (
    Path("/proc", *parts) for parts in (("self", "status"), ("self", "clear_refs"), ("meminfo",))
)
"""Linux's memory statistics; writing 5 to the second file resets the peak."""


CGROUP = Path("/sys/fs/cgroup")
"""The container's limits: `cpu.max` and `memory.max`, or in version 1 files below `cpu` and
`memory`."""


OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED",
    "Out of memory allocating",
    "Cannot allocate memory",
    "can't start new thread",
    "failed to map segment",
)
"""Texts in errors of other types that mean out of memory: from PyTorch outside its device
allocator, XLA, the system, Python, and the loader of libraries."""


GAPS = "PYTORCH_ALLOC_CONF=expandable_segments:True"
"""The setting with which PyTorch's allocator leaves no gaps between its blocks on a GPU."""
IN_GAPS = re.compile(r"([\d.]+) (MiB|GiB) is reserved by PyTorch but unallocated")
"""What its out-of-memory error says about gaps."""
LEAST_GAPS_GIB = 0.5  # smaller gaps would hardly have made a difference


def gaps_gib(error: BaseException) -> float:
    """Return the memory that an out-of-memory error says lay in gaps; 0 if it does not matter."""
    found = IN_GAPS.search(str(error))
    gib = float(found[1]) / (1 if found[2] == "GiB" else 1024) if found else 0.0
    return gib if gib >= LEAST_GAPS_GIB else 0.0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means out of memory, of the process or of a device.

    Before torch is imported, nothing can have raised its error.
    """
    if isinstance(error, getattr(sys.modules.get("torch"), "OutOfMemoryError", ())):
        return True
    if isinstance(error, RuntimeError | OSError | ImportError):
        return any(sign in str(error) for sign in OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def cores() -> int:
    """Return the cores that this process may use: its affinity, limited by its container's share.

    Python and PyTorch count the cores of the machine, of which a rented container often has only a
    few.
    """
    pinned = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(pinned or 1, _share_of_cores()))


def _share_of_cores() -> float:
    """Return the container's CPU quota in cores, rounded up."""
    new, old = CGROUP / "cpu.max", CGROUP / "cpu" / "cpu.cfs_quota_us"
    if new.exists():
        quota, period = new.read_text().split()
    elif old.exists():
        quota, period = (path.read_text() for path in (old, old.with_name("cpu.cfs_period_us")))
    else:
        return float("inf")
    has_limit = quota != "max" and int(quota) > 0
    return -(-int(quota) // int(period)) if has_limit else float("inf")


def process_gib(field: str) -> float | None:
    """Return a size of this process that Linux reports, such as VmRSS; None on other systems."""
    if not STATUS.exists():
        return None
    return _kib(STATUS.read_text(), field) / 2**20


def available_gib() -> float | None:
    """Return the memory available without taking it from another process; None if unknown.

    It is limited by what the container may still use, which the host's numbers do not include.
    """
    if not MEMINFO.exists():
        return None
    return min(_kib(MEMINFO.read_text(), "MemAvailable") / 2**20, _left_in_container_gib())


def _left_in_container_gib() -> float:
    """Return the memory that the container may still use, counting inactive file cache as free."""
    new = CGROUP / "memory.max", CGROUP / "memory.current", "inactive_file"
    old_limit = CGROUP / "memory" / "memory.limit_in_bytes"
    old = old_limit, old_limit.with_name("memory.usage_in_bytes"), "total_inactive_file"
    for limit, taken, kept in (new, old):
        if limit.exists() and limit.read_text().strip() != "max":
            stat = dict(map(str.split, limit.with_name("memory.stat").read_text().splitlines()))
            return (int(limit.read_text()) - int(taken.read_text()) + int(stat[kept])) / GIB
    return float("inf")


def restart_peak() -> None:
    """Reset the peak VmHWM, where that is possible."""
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")


@contextmanager
def data_limit(gib: float) -> Iterator[None]:
    """Limit the private memory of this process to `gib` in the block, or to a lower existing limit.

    It is what Linux counts as VmData.
    """
    import resource

    old, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (old, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([int(gib * GIB), *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (old, hard))


@contextmanager
def uncounted() -> Iterator[None]:
    """Raise the limit of `data_limit` by the private memory that the block allocates.

    For maps of files: Linux counts them, though their pages are reclaimable.
    """
    import resource

    old, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if old == resource.RLIM_INFINITY:
        yield
        return
    before = process_gib("VmData") or 0.0
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        grown = int(((process_gib("VmData") or 0.0) - before) * GIB)
        most = [limit for limit in (old + max(0, grown), hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(most), hard))


def collect_rarely() -> None:
    """Collect garbage rarely until `collect_as_usual`, while modules are imported.

    They make more than a million objects that stay, and every full collection walks through all of
    them: imports and a tokenizer took 5.5 s of a core with it, and 4.2 s without.
    """
    if gc.get_threshold() == USUAL:  # else somebody has chosen
        gc.set_threshold(*RARE)


def collect_as_usual() -> None:
    """End `collect_rarely`: from here on garbage is collected as usual, but not among modules."""
    if gc.get_threshold()[:2] == RARE[:2]:  # since Python 3.14 the third always reads as 0
        gc.freeze()
        gc.set_threshold(*USUAL)


def _kib(text: str, field: str) -> int:
    return int(text.split(f"{field}:")[1].split()[0])
