"""The interface of a device, with defaults that hold for most devices.

Each kind of device is a subclass of `Backend` that overrides only what differs: CPUs and Macs' GPUs
in `cpu.py`, NVIDIA's GPUs in `cuda.py`, TPUs in the extension `xla`. `device.py` chooses.
"""

import ctypes
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from qat.backend.copies import Copying
from qat.backend.nvidia import UNKNOWN
from qat.backend.tracing import Tracing
from qat.errors import ConfigError

VISITORS = 2
"""Groups of tensors from the host that are on the device at once: one in use, one in flight."""
GIB = 2**30
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""PyTorch dtype of each compute dtype; tf32 is a mode of float32 matmuls."""
SHAPING = re.compile(
    r"(CUDA|CUBLAS|CUDNN|NCCL|GLOO|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|XLA|PJRT|TPU|LIBTPU|OMP|GOMP"
    r"|KMP|MKL|OPENBLAS|MALLOC)_\w+|NVIDIA_(VISIBLE_DEVICES|TF32_OVERRIDE)|LD_PRELOAD"
)
"""Names of environment variables that affect a run's devices, speed or numerics."""
PRIVATE = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")
"""Parts of variable names that mark secrets, which are never recorded."""
T = TypeVar("T")


@contextmanager
def undivided() -> Iterator[None]:
    """Run PyTorch's CPU operators, and those of threads started inside, on one thread each.

    With many small operators, cores would wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def side_by_side(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield a `map` with ordered results on this many threads, each running operators alone."""
    with undivided():
        if workers == 1:
            yield map
            return
        with ThreadPoolExecutor(workers) as pool:
            yield pool.map


def environment() -> dict[str, str]:
    """Return the environment variables that affect a run's devices, speed or numerics."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if SHAPING.fullmatch(name) and not PRIVATE.search(name)
    }


@dataclass(frozen=True)
class Launch:
    """The rank of this process, as set by a launcher such as torchrun."""

    rank: int = 0
    """Index of this process among all."""
    local_rank: int = 0
    """Index of this process on its host, which is also that of its GPU."""
    world: int = 1
    """Number of processes."""
    attempt: int = 0
    """Number of times that the launcher has restarted the processes that share a store."""


def launched() -> Launch:
    """Read the launcher's environment variables; without a launcher, return a single process."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if not all(name in os.environ for name in (*names, "MASTER_ADDR", "MASTER_PORT")):
        return Launch()
    # each host counts by itself, so the count serves for a store that the launcher keeps alone
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_kept else "0"
    return Launch(*(int(os.environ[name]) for name in names), int(attempt))


class MemoryUse(NamedTuple):
    """Memory in GiB, and counts of its allocator; None where it is not counted."""

    held_gib: float | None = None
    """Memory held now."""
    peak_gib: float | None = None
    """The most that was held since `Backend.reset_peak_memory`."""
    reserved_gib: float | None = None
    """Memory that PyTorch's allocator has reserved on a GPU."""
    peak_reserved_gib: float | None = None
    """The most that was reserved since `Backend.reset_peak_memory`."""
    retries: int | None = None
    """The number of times that PyTorch's allocator found no memory, freed its cache and retried."""
    failures: int | None = None
    """The number of retries that found no memory either."""


@dataclass(frozen=True)
class Backend:
    """One device. The defaults hold for eager execution without memory accounting."""

    device: torch.device
    is_traced: ClassVar[bool] = False
    """Whether operators are only recorded, and compiled anew for each shape (XLA).

    Callers then keep shapes fixed, and compare numbers instead of using bit views of floats and
    searchsorted; exp2 and logaddexp are missing too.
    """
    tracing: ClassVar[Tracing] = Tracing()
    """The operations of such devices alone: compiling graphs, and dividing them over devices."""
    compiles: ClassVar[bool] = False
    """True if compiling a model pays off."""
    records: ClassVar[bool] = False
    """True if work can be captured as a graph and replayed (`record`)."""
    decision_lag: ClassVar[int] = 0
    """Number of steps by which the host reads decisions late, so as never to wait."""
    batches_ahead: ClassVar[int] = 4
    """Number of batches to prepare ahead; 0 where the device is the host's CPU.

    Each is prepared on its own thread: one thread unpacks about 500,000 tokens a second, fewer than
    a small model trains on.
    """
    tokens_at_once: ClassVar[int] = 2**11
    """Number of tokens per forward without gradients that keeps the device busy."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of tensors in the compute dtype `name` (see `dtype_name`).

        Raises:
            ConfigError: the device has no hardware support for that dtype.
        """
        return DTYPES[self.dtype_name(name)]

    def dtype_name(self, name: str) -> str:
        """Return `name`, with `auto` resolved: bf16 where it is native.

        Raises:
            ConfigError: the device has no hardware support for that dtype.
        """
        if name == "auto":
            return "bf16" if self.has_bf16() else "fp32"
        if name == "tf32" and not self.has_bf16():
            raise ConfigError(f"dtype=tf32, but {self.name()} has no such units; use --dtype fp32")
        return name

    def has_bf16(self) -> bool:
        """Return whether bf16 (and tf32) arithmetic is native."""
        return False

    @contextmanager
    def matmul_precision(self, name: str) -> Iterator[None]:
        """Let float32 matmuls use TF32 inside the block if the compute dtype is `tf32`."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def autocast(self, dtype: torch.dtype) -> torch.autocast | nullcontext:
        """Return a mixed-precision context in `dtype`; a no-op for float32."""
        if dtype == torch.float32:
            return nullcontext()
        # the cache of casts would outlive the block inside a captured graph
        return torch.autocast(self.device.type, dtype=dtype, cache_enabled=False)

    def shared_memory_bytes(self) -> int:
        """Return the bytes of a GPU's shared memory that one block may use; 0 elsewhere."""
        return 0

    def has_tensor_memory(self) -> bool:
        """Return whether tensor cores keep sums in a memory of their own, which is limited."""
        return False

    @contextmanager
    def waits(self) -> Iterator[list[str]]:
        """List where the block made the host wait for the device, as FILE:LINE, at its end.

        Code that waits cannot be captured. Always empty on devices that never capture graphs.
        """
        yield []

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Capture the work of `run`; return a replay and the result, which replays overwrite.

        Call it only where `records` is true. `run` must have run before, must not wait for the
        device, and must read its inputs from tensors that keep their addresses.
        """
        raise NotImplementedError

    def load_map(self) -> dict[str, torch.device] | None:
        """Return transformers' `device_map` for loading weights; None loads them on the host."""
        return {"": self.device}

    def step_end(self) -> None:
        """Execute the operators recorded since the last call, on devices that record lazily.

        Read values only after it: a value that is read before is computed in a graph of its own.
        """

    def step_results(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """End the step and return its results on the host, as `to_host` does."""
        self.step_end()
        return {name: self.to_host(tensor) for name, tensor in tensors.items()}

    def read(self, tensors: Sequence[Tensor]) -> list[float | int | bool]:
        """Return the values of scalars; waits for the device.

        Read those of a step after its `step_end`.
        """
        return [tensor.item() for tensor in tensors]

    def undoing(self, tensors: Iterable[Tensor]) -> Callable[[], None]:
        """Return a function that restores the present values of tensors from copies on the host."""
        named = {str(place): tensor.detach() for place, tensor in enumerate(tensors)}
        copies, copying = self.copied_to_host(named)
        copying.wait()

        def undo() -> None:
            for name, tensor in named.items():
                tensor.copy_(copies[name])

        return undo

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in host memory that the device can copy from while it computes."""
        return tensor

    def pinned_zeros(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[Tensor]:
        """Return zeros of these shapes in pinned memory."""
        return [torch.zeros(shape, dtype=dtype) for shape in shapes]

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device, in the order of its work; the host does not wait."""
        return self.pinned(tensor).to(self.device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the host; call what a later `finished` returns before reading it."""
        return tensor.to("cpu")

    def copied_to_host(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Copying]:
        """Copy tensors to the host concurrently with the device's work.

        Tensors with the same address, shape and dtype share one copy. The copies hold the present
        values if they are read after `Copying.wait` and the device changes the tensors only after
        `Copying.hold`.
        """
        keys = {
            name: (tensor.data_ptr(), tensor.shape, tensor.dtype) if tensor.numel() else name
            for name, tensor in tensors.items()
        }
        sources = {keys[name]: tensor.detach().contiguous() for name, tensor in tensors.items()}
        copying = Copying(list(sources.values()), self._copy_stream())
        copies = dict(zip(sources, copying.copies, strict=True))
        return {name: copies[key] for name, key in keys.items()}, copying

    def visiting(self, groups: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Yield each group of tensors on the device, one after the other, to be changed in place.

        Groups in pinned host memory are copied in one group ahead and copied back afterwards; the
        host may read them after `synchronize`. At most `VISITORS` groups are on the device at once.
        """
        return iter(groups)

    def _copy_stream(self) -> "torch.cuda.Stream | None":
        """Return a new stream for copies concurrent with other work; None without streams."""
        return None

    def finished(self) -> Callable[[], None]:
        """Return a function, callable from any thread, that waits for all work submitted so far."""
        return lambda: None

    def logits_at_once(self) -> int:
        """Return the number of logits to form at once: 64 MiB of float32 by default."""
        return 2**24

    def mark(self, after: Tensor | None = None) -> object:
        """Return a time stamp in the device's queue of work, for `seconds_between`.

        A device without its own clock takes the moment when `after` is computed.
        """
        self.synchronize()
        return time.perf_counter()

    def seconds_between(self, first: object, last: object) -> float:
        """Return the seconds of device time between two `mark`s; waits for the later."""
        return last - first

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Return the device time of the work that `run` submits, in seconds."""
        first = self.mark()
        run()
        return self.seconds_between(first, self.mark())

    def synchronize(self) -> None:
        """Wait until all submitted work is done, except copies on streams of their own."""

    def health(self) -> dict[str, float | None]:
        """Return load (%), power (W) and temperature (C) of a GPU in milliseconds; else None."""
        return UNKNOWN

    def workers(self) -> int:
        """Return how many threads to use: one per core on the CPU, one for a GPU's one queue."""
        return 1

    def generators(self) -> dict[str, torch.Generator]:
        """Return every random generator that a step may draw from, by name."""
        return {"cpu": torch.default_generator}

    def name(self) -> str:
        """Return the device's name in records."""
        return self.device.type

    def memory_use(self) -> MemoryUse:
        """Return the memory of tensors, or on a CPU of the process."""
        return MemoryUse()

    def reset_peak_memory(self) -> None:
        """Restart the count of `MemoryUse.peak_gib`."""

    def free_memory(self) -> None:
        """Release memory held by dead objects and by the allocator's cache."""
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)

    def memory_gib(self) -> float | None:
        """Return the memory that this process could hold, held plus free; None if unknown."""
        return None

    @contextmanager
    def limit_memory(self, gib: float) -> Iterator[float]:
        """Limit the process's memory to `gib` inside the block; beyond it allocations fail.

        Yields `gib`.

        Raises:
            ConfigError: that much is held already, or the limit exceeds what is available.
        """
        held, there = self.memory_use().held_gib, self.memory_gib()
        if held is None or there is None:
            raise ConfigError(
                f"memory_limit={gib:.4g}GiB, but memory is not counted on {self.name()}; use "
                "--device cpu or cuda"
            )
        # free memory changes between two readings: tolerate one part in a thousand
        if not held < gib <= there * 1.001:
            raise ConfigError(
                f"memory_limit={gib:.4g}GiB, but {held:.4g} GiB are held already and {there:.4g} "
                "GiB can be had; choose a limit between them"
            )
        with self._limited(gib, held):
            yield gib

    def _limited(self, gib: float, held: float) -> AbstractContextManager[None]:
        """Apply the limit, on devices that count memory; `held` GiB are held now."""
        raise NotImplementedError

    def overcommits(self) -> bool:
        """Return whether the system overcommits memory and kills processes that use it."""
        return False

    @contextmanager
    def session(self, cache_dir: Path | None) -> Iterator[None]:
        """Wrap all of a verb's computation; later processes reuse graphs kept in `cache_dir`.

        Raises:
            ConfigError: `cache_dir` is given, which only XLA devices use.
        """
        if cache_dir is not None:
            raise ConfigError(
                f"xla_cache_dir={cache_dir} is for XLA devices, but device={self.device}; drop it "
                "or use --device xla"
            )
        yield
