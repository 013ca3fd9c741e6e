"""What a device says of its memory: held, free, and how to find out that it ran out."""

import ctypes
import gc
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from qat.errors import ConfigError
from qat.process import (
    available_gib,
    data_limit,
    is_out_of_memory,
    process_gib,
    restart_peak,
)

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemory:
    """One device as memory."""

    device: torch.device

    def peak_memory_gib(self) -> float | None:
        """Most memory held since `reset_peak_memory`: by tensors, or by the process on a CPU.

        None where nobody counts.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / GIB
        return process_gib("VmHWM") if self.device.type == "cpu" else None

    def reset_peak_memory(self) -> None:
        """Let `peak_memory_gib` count from here."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device.type == "cpu":
            restart_peak()

    def free_memory(self) -> None:
        """Give back what dead objects and the allocator still hold."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)

    def held_memory_gib(self) -> float | None:
        """Memory held now, counted as `peak_memory_gib` does."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) / GIB
        return process_gib("VmRSS") if self.device.type == "cpu" else None

    def reserved_memory_gib(self) -> float | None:
        """Memory that PyTorch took from a GPU, in use or not; None elsewhere."""
        is_gpu = self.device.type == "cuda"
        return torch.cuda.memory_reserved(self.device) / GIB if is_gpu else None

    def memory_gib(self) -> float | None:
        """Memory that this process could hold if it took all that is free; None if unknown."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            return (free + torch.cuda.memory_reserved(self.device)) / GIB
        free = available_gib() if self.device.type == "cpu" else None
        return None if free is None else free + process_gib("VmRSS")

    @contextmanager
    def limit_memory(self, gib: float) -> Iterator[float]:
        """Let the process hold no more than `gib` inside the block; beyond it runs out of memory.

        The block gets `gib`.

        Raises:
            ConfigError: that much is held already, or more is asked for than there is.
        """
        held, there = self.held_memory_gib(), self.memory_gib()
        if held is None or there is None:
            raise ConfigError(
                f"memory_limit={gib:.4g}GiB, but memory is not counted on {self.name()}; use "
                "--device cpu or cuda"
            )
        if not held < gib <= there * 1.001:
            raise ConfigError(
                f"memory_limit={gib:.4g}GiB, but {held:.4g} GiB are held already and {there:.4g} "
                "GiB can be had; choose a limit between them"
            )
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory / GIB
            index = self.device.index  # a bare `cuda` has none, and the limit wants one
            index = torch.cuda.current_device() if index is None else index
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(min(1.0, gib / total), index)
            try:
                yield gib
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0, index)
            return
        with data_limit(process_gib("VmData") + gib - held):
            yield gib

    @contextmanager
    def staying_in_memory(self) -> Iterator[None]:
        """A block in which memory that is not there is an error.

        Without it a system that promises more than it has kills the process, without a word.
        """
        free = available_gib() if self.overcommits() else None
        if free is None:
            yield
            return
        with data_limit(process_gib("VmData") + free):
            yield

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` says that memory ran out: the device's, or the process's on a CPU."""
        return isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error)

    def overcommits(self) -> bool:
        """Whether the system promises memory that it has not got, and kills who uses it."""
        return self.device.type == "cpu"

    def name(self) -> str:
        """What a record calls this device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"


@dataclass(frozen=True)
class RuntimeMemory(DeviceMemory, ABC):
    """One device whose memory its runtime counts, if anybody; or a CPU's, which is the process's.

    A runtime's peak is that of the whole process: what held less than before says nothing.
    """

    @abstractmethod
    def told(self) -> dict[str, int] | None:
        """`bytes_used`, `peak_bytes_used` and `bytes_limit`; None if the runtime does not say."""

    @abstractmethod
    def is_host(self) -> bool:
        """Whether the device computes in the process's own memory."""

    def peak_memory_gib(self) -> float | None:
        """See `DeviceMemory`; None too where it stayed below an earlier peak."""
        if self.is_host():
            return HOST.peak_memory_gib()
        peak = (self.told() or {}).get("peak_bytes_used", 0)
        return peak / GIB if peak > PEAKS.get(self.device, 0) else None

    def reset_peak_memory(self) -> None:
        """See `DeviceMemory`."""
        if self.is_host():
            HOST.reset_peak_memory()
        else:
            PEAKS[self.device] = (self.told() or {}).get("peak_bytes_used", 0)

    def held_memory_gib(self) -> float | None:
        """See `DeviceMemory`; of a CPU nobody knows which of it is the device's."""
        told = None if self.is_host() else self.told()
        return None if told is None else told["bytes_used"] / GIB

    def memory_gib(self) -> float | None:
        """See `DeviceMemory`."""
        if self.is_host():
            return HOST.memory_gib()
        told = self.told()
        return None if told is None else told["bytes_limit"] / GIB

    def limit_memory(self, gib: float) -> AbstractContextManager[float]:
        """See `DeviceMemory`; nothing sets one here, and on a CPU the compiler would crash at it.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"memory_limit={gib:.4g}GiB, but no limit can be set on {self.name()}, nor a search "
            "stay within it there; ask what fits with --plan, such as --plan v6e --memory-limit "
            "16GiB"
        )

    def overcommits(self) -> bool:
        """See `DeviceMemory`."""
        return self.is_host()


HOST = DeviceMemory(torch.device("cpu"))
PEAKS: dict[torch.device, int] = {}
"""Bytes of a device's peak when `reset_peak_memory` was called."""
