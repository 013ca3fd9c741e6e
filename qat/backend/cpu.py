"""The devices that compute where the program runs, or tell little of themselves: CPU, Mac's GPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from qat.backend.base import Backend
from qat.process import available_gib, cores, data_limit, process_gib, restart_peak


@dataclass(frozen=True)
class CpuBackend(Backend):
    """The CPU, whose memory is the process's, as Linux counts it; elsewhere nobody does."""

    def batches_ahead(self) -> int:
        """See `Backend`: preparing one would take cores from computing."""
        return 0

    def load_map(self) -> None:
        """See `Backend`."""

    def workers(self) -> int:
        """See `Backend`."""
        return cores()

    def peak_memory_gib(self) -> float | None:
        """See `Backend`."""
        return process_gib("VmHWM")

    def reset_peak_memory(self) -> None:
        """See `Backend`."""
        restart_peak()

    def held_memory_gib(self) -> float | None:
        """See `Backend`."""
        return process_gib("VmRSS")

    def memory_gib(self) -> float | None:
        """See `Backend`."""
        free = available_gib()
        return None if free is None else free + process_gib("VmRSS")

    def limited(self, gib: float, held: float) -> AbstractContextManager[None]:
        """See `Backend`: the limit is of private memory, so what is held counts as that."""
        return data_limit(process_gib("VmData") + gib - held)

    @contextmanager
    def staying_in_memory(self) -> Iterator[None]:
        """See `Backend`.

        Without it a system that promises more than it has kills the process, without a word.
        """
        free = available_gib()
        if free is None:
            yield
            return
        with data_limit(process_gib("VmData") + free):
            yield

    def overcommits(self) -> bool:
        """See `Backend`."""
        return True


@dataclass(frozen=True)
class MpsBackend(Backend):
    """A Mac's GPU, through PyTorch's `mps` device: all that `Backend` says, and nothing else."""
