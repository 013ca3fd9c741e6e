"""The backend of NVIDIA GPUs: streams, CUDA graphs, memory counters and sensors."""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from qat.backend.base import GIB, VISITORS, Backend, MemoryUse
from qat.backend.copies import pinned_rooms
from qat.backend.nvidia import gpu_health
from qat.errors import ConfigError

T = TypeVar("T")
AMPERE = (8, 0)
"""Compute capability of the first GPUs with bf16 and TF32 units."""


@dataclass(frozen=True)
class CudaBackend(Backend):
    """One GPU, which executes its queue asynchronously to the host."""

    compiles: ClassVar[bool] = True
    records: ClassVar[bool] = True
    decision_lag: ClassVar[int] = 2
    tokens_at_once: ClassVar[int] = 2**15

    def dtype_name(self, name: str) -> str:
        """See `Backend`; `auto` is fp16 on GPUs without bf16 units."""
        if name == "auto" and not self.has_bf16():
            return "fp16"
        if name == "bf16" and not self.has_bf16():
            raise ConfigError("dtype=bf16, but this GPU has no bf16 units; use --dtype fp16")
        return super().dtype_name(name)

    def has_bf16(self) -> bool:
        """See `Backend`."""
        return torch.cuda.get_device_capability(self.device) >= AMPERE

    def shared_memory_bytes(self) -> int:
        """See `Backend`."""
        return torch.cuda.get_device_properties(self.device).shared_memory_per_block_optin

    def has_tensor_memory(self) -> bool:
        """See `Backend`: Blackwell has it, but for the cards of consumers (12.0)."""
        return torch.cuda.get_device_capability(self.device)[0] in (10, 11)

    @contextmanager
    def waits(self) -> Iterator[list[str]]:
        """See `Backend`; PyTorch's sync debug mode warns of every synchronizing call."""
        found: list[str] = []
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in heard:
            if "synchronizing CUDA operation" in str(warning.message):
                found.append(f"{warning.filename}:{warning.lineno}")
            elif "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """See `Backend`: a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        # other threads may prepare batches during the capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = run()
        # The capture's stream still resets the graph's random offset to 0. On a busy device that
        # could happen after the first replay has set its own offset, which would then draw other
        # numbers.
        torch.cuda.synchronize(self.device)
        return graph.replay, result

    def pinned(self, tensor: Tensor) -> Tensor:
        """See `Backend`."""
        return tensor.pin_memory()

    def pinned_zeros(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[Tensor]:
        """See `Backend`: packed into a few allocations."""
        sizes = [shape.numel() * dtype.itemsize for shape in shapes]
        rooms = zip(pinned_rooms(sizes), shapes, strict=True)
        return [room.zero_().view(dtype).view(shape) for room, shape in rooms]

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Backend`; the host does not wait."""
        return tensor.to("cpu", non_blocking=True)

    def visiting(self, groups: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """See `Backend`; uses one stream per direction, separate from the compute stream."""
        if not groups or groups[0][0].is_cuda:
            yield from groups
            return
        work = torch.cuda.current_stream(self.device)
        up, down = self._copy_stream(), self._copy_stream()
        up.wait_stream(work)  # wait for the last step's copies back, and for the new memory below
        slots = [
            tuple(_largest(tensors, self.device) for tensors in zip(*groups, strict=True))
            for _ in range(VISITORS)
        ]
        left: list[torch.cuda.Event | None] = [None] * VISITORS

        def fetch(place: int) -> tuple[tuple[Tensor, ...], torch.cuda.Event]:
            slot = place % VISITORS
            if (event := left[slot]) is not None:
                up.wait_event(event)
            pairs = [*zip(slots[slot], groups[place], strict=True)]
            here = tuple(room[: host.numel()].view(host.shape) for room, host in pairs)
            with torch.cuda.stream(up):
                for there, host in zip(here, groups[place], strict=True):
                    there.copy_(host, non_blocking=True)
            return here, up.record_event()

        ahead = fetch(0)
        for place, group in enumerate(groups):
            here, arrived = ahead
            if place + 1 < len(groups):
                ahead = fetch(place + 1)
            work.wait_event(arrived)
            yield here
            down.wait_stream(work)
            with torch.cuda.stream(down):
                for host, there in zip(group, here, strict=True):
                    host.copy_(there, non_blocking=True)
            left[place % VISITORS] = down.record_event()
        work.wait_stream(down)

    def _copy_stream(self) -> torch.cuda.Stream:
        """See `Backend`."""
        return torch.cuda.Stream(self.device)

    def finished(self) -> Callable[[], None]:
        """See `Backend`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event.synchronize

    def logits_at_once(self) -> int:
        """See `Backend`: a 16th of the GPU's memory, at most what 32-bit indices address."""
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        return min(2**31 - 1, total_bytes // 16 // torch.float32.itemsize)

    def mark(self, after: Tensor | None = None) -> torch.cuda.Event:
        """See `Backend`: by the GPU's own clock."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds_between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """See `Backend`."""
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def synchronize(self) -> None:
        """See `Backend`."""
        torch.cuda.current_stream(self.device).synchronize()

    def health(self) -> dict[str, float | None]:
        """See `Backend`."""
        return gpu_health(str(torch.cuda.get_device_properties(self.device).uuid))

    def generators(self) -> dict[str, torch.Generator]:
        """See `Backend`."""
        torch.cuda.init()  # before it there are none
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return {**super().generators(), "cuda": torch.cuda.default_generators[index]}

    def name(self) -> str:
        """See `Backend`: such as `NVIDIA H200`."""
        return torch.cuda.get_device_name(self.device)

    def memory_use(self) -> MemoryUse:
        """See `Backend`."""
        counts = torch.cuda.memory_stats(self.device)
        names = (f"{kind}_bytes.all" for kind in ("allocated", "reserved"))
        held, reserved = (
            [counts.get(f"{name}.{when}", 0) / GIB for when in ("current", "peak")]
            for name in names
        )
        failed = (counts.get(name, 0) for name in ("num_alloc_retries", "num_ooms"))
        return MemoryUse(*held, *reserved, *failed)

    def reset_peak_memory(self) -> None:
        """See `Backend`."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def free_memory(self) -> None:
        """See `Backend`."""
        gc.collect()
        torch.cuda.empty_cache()
        # also PyTorch's cache of pinned memory, which the host would otherwise lack
        if hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()
        else:  # before PyTorch 2.12
            torch._C._host_emptyCache()

    def memory_gib(self) -> float:
        """See `Backend`."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return (free + torch.cuda.memory_reserved(self.device)) / GIB

    @contextmanager
    def _limited(self, gib: float, held: float) -> Iterator[None]:
        """See `Backend`."""
        total = torch.cuda.get_device_properties(self.device).total_memory / GIB
        index = self.device.index  # a bare `cuda` has no index, but the limit needs one
        index = torch.cuda.current_device() if index is None else index
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib / total), index)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, index)


def _largest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Allocate memory on `device` that can hold any one of these tensors."""
    largest = max(tensors, key=Tensor.numel)
    return torch.empty(largest.numel(), dtype=largest.dtype, device=device)
