"""Devices with little to configure: the CPU and a Mac's GPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from qat.backend.base import Backend, MemoryUse
from qat.process import available_gib, cores, data_limit, process_gib, restart_peak


@dataclass(frozen=True)
class CpuBackend(Backend):
    """The CPU. Its memory is that of the process, which only Linux reports."""

    batches_ahead: ClassVar[int] = 0  # preparing a batch would take cores from computing

    def load_map(self) -> None:
        """See `Backend`."""

    def workers(self) -> int:
        """See `Backend`."""
        return cores()

    def memory_use(self) -> MemoryUse:
        """See `Backend`."""
        return MemoryUse(process_gib("VmRSS"), process_gib("VmHWM"))

    def reset_peak_memory(self) -> None:
        """See `Backend`."""
        restart_peak()

    def memory_gib(self) -> float | None:
        """See `Backend`."""
        free = available_gib()
        return None if free is None else free + process_gib("VmRSS")

    def _limited(self, gib: float, held: float) -> AbstractContextManager[None]:
        """See `Backend`: only private memory is limited, and all held memory counts as private."""
        return data_limit(process_gib("VmData") + gib - held)

    @contextmanager
    def session(self, cache_dir: Path | None) -> Iterator[None]:
        """See `Backend`; using more than the free memory raises an error.

        Without the limit an overcommitting system would kill the process without a message.
        """
        free = available_gib()
        limit = nullcontext() if free is None else data_limit(process_gib("VmData") + free)
        with super().session(cache_dir), limit:
            yield

    def overcommits(self) -> bool:
        """See `Backend`."""
        return True


@dataclass(frozen=True)
class MpsBackend(Backend):
    """A Mac's GPU, through PyTorch's `mps` device, with the defaults of `Backend`."""
