"""What the rest of the code may ask of a device, and the answers that most devices give.

Each device is a class of its own that changes only what differs there: CPUs and Macs' GPUs in
`cpu.py`, NVIDIA's GPUs in `cuda.py`, TPUs behind PyTorch/XLA in `xla.py`. `device.py` chooses.
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
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from qat.backend.nvidia import UNKNOWN
from qat.errors import ConfigError
from qat.process import is_out_of_memory

# Copies of tensors that are made while the device goes on.

SMALL_BYTES = 2**20
"""Up to here a tensor travels joined with others: a copy of its own costs the host more."""


class Copying:
    """Copies of tensors on the host, made on `stream` beside a GPU's other work, if that is given.

    Small ones are joined on their device before, in memory that is free again after `wait`.
    """

    def __init__(
        self, tensors: Sequence[Tensor], stream: "torch.cuda.Stream | None" = None
    ) -> None:
        groups = _groups(tensors)
        # of a GPU: whose memory must not be given away before the end
        self._sources = [_joined([tensors[place] for place in group]) for group in groups]
        self._event: torch.cuda.Event | None = None
        beside = nullcontext() if stream is None else torch.cuda.stream(stream)
        if stream is not None:  # which must not begin before the joined ones are there
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self.copies = list(tensors)
        with beside:
            for group, source in zip(groups, self._sources, strict=True):
                is_new = len(group) > 1 and source.device.type == "cpu"
                copy = source if is_new else _on_host(source)
                parts = copy.split([tensors[place].numel() for place in group])
                for place, part in zip(group, parts, strict=True):
                    self.copies[place] = part.view(tensors[place].shape)
        if stream is not None:
            self._event = stream.record_event()

    def hold(self) -> None:
        """Let the device's later work begin after the copies; the host does not wait."""
        if self._event is not None:
            self._event.wait()

    def wait(self) -> None:
        """Wait on the host, in any thread, until the copies can be read."""
        if self._event is not None:
            self._event.synchronize()
        self._sources = []


class _Kept(NamedTuple):
    source: Tensor
    """Held, so that no other tensor comes to lie at its address."""
    version: int
    copy: Tensor


class KeptCopies:
    """Copies on the host of tensors that hardly ever change, each made once."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def missing(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those without a copy, or changed since by an operator of PyTorch."""
        return {name: tensor for name, tensor in tensors.items() if not self._has(name, tensor)}

    def keep(self, tensors: dict[str, Tensor], copies: dict[str, Tensor]) -> None:
        """Remember `copies` of these; what lies on the host is its own."""
        for name, tensor in tensors.items():
            self._kept[name] = _Kept(tensor, tensor._version, copies[name])

    def of(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The copies of these."""
        return {name: self._kept[name].copy for name in names}

    def _has(self, name: str, tensor: Tensor) -> bool:
        kept = self._kept.get(name)
        return kept is not None and (
            (kept.source.data_ptr(), kept.source.shape, kept.source.dtype, kept.version)
            == (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor._version)
        )


def _groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors that travel together: small ones of a kind, every other alone."""
    groups: list[list[int]] = []
    small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.nbytes <= SMALL_BYTES:
            small.setdefault((tensor.device, tensor.dtype), []).append(place)
        else:
            groups.append([place])
    return groups + list(small.values())


def _joined(tensors: list[Tensor]) -> Tensor:
    """One after the other, flat: a copy of several, the tensor itself if it is alone."""
    flat = [tensor.flatten() for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    return tensor.to("cpu", non_blocking=tensor.is_cuda)


PIECE_BYTES = 2**30
"""Of pinned memory, in which many tensors lie side by side."""
ALIGNED = 256
"""Bytes of which each tensor there begins at a multiple."""


def placed(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Where blocks of these bytes lie, as piece and first byte, and how large each piece is.

    PyTorch takes a power of two of pinned memory for each tensor, up to twice what it needs: so
    pieces are such, of up to a GiB if no block is larger. The largest blocks are placed first, each
    in the first piece with room.
    """
    places, ends, rooms = [(0, 0)] * len(sizes), [], []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = -(-sizes[number] // ALIGNED) * ALIGNED
        fitting = (piece for piece, end in enumerate(ends) if end + size <= rooms[piece])
        piece = next(fitting, len(ends))
        if piece == len(ends):
            ends.append(0)
            rooms.append(max(PIECE_BYTES, _power_of_two(size)))
        places[number] = piece, ends[piece]
        ends[piece] += size
    return places, [_power_of_two(end) for end in ends]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


VISITORS = 2
"""Groups of tensors from the host that are on the device at once: one at work, one on its way."""
GIB = 2**30
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
SHAPING = re.compile(
    r"(CUDA|CUBLAS|CUDNN|NCCL|GLOO|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|XLA|PJRT|TPU|LIBTPU|OMP|GOMP"
    r"|KMP|MKL|OPENBLAS|MALLOC)_\w+|NVIDIA_(VISIBLE_DEVICES|TF32_OVERRIDE)|LD_PRELOAD"
)
"""Names of environment variables that decide what a run computes on, how fast and how exactly."""
PRIVATE = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")
"""Parts of the names of those that are nobody's business."""
T = TypeVar("T")


@contextmanager
def undivided() -> Iterator[None]:
    """No operation is divided among cores: many small ones would wait for the slower core.

    Threads that start inside compute alone as well.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def environment() -> dict[str, str]:
    """The variables of this process that shape a run: allocator, threads, devices, exchange."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if SHAPING.fullmatch(name) and not PRIVATE.search(name)
    }


@dataclass(frozen=True)
class Launch:
    """What a launcher such as torchrun said about this process."""

    rank: int = 0
    """Its number among all processes."""
    local_rank: int = 0
    """Its number on this host, which is its GPU's."""
    world: int = 1
    """How many processes there are."""
    attempt: int = 0
    """How often the launcher started them anew."""


def launched() -> Launch:
    """What the launcher said; one process alone where none did."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if not all(name in os.environ for name in (*names, "MASTER_ADDR", "MASTER_PORT")):
        return Launch()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(*(int(os.environ[name]) for name in names), int(attempt))


@dataclass(frozen=True)
class Backend:
    """One device. What is here holds where operators run as they come and nobody counts memory."""

    device: torch.device

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of tensors in the compute dtype called `name` (see `dtype_name`).

        Raises:
            ConfigError: the device cannot really compute in that dtype.
        """
        return DTYPES[self.dtype_name(name)]

    def dtype_name(self, name: str) -> str:
        """`name` itself, or what `auto` means here: bf16 where it is native.

        Raises:
            ConfigError: the device cannot really compute in that dtype.
        """
        if name == "auto":
            return "bf16" if self.has_bf16() else "fp32"
        if name == "tf32" and not self.has_bf16():
            raise ConfigError(f"dtype=tf32, but {self.name()} has no such units; use --dtype fp32")
        return name

    def has_bf16(self) -> bool:
        """Whether bf16 (and tf32) arithmetic is native and worth its name here."""
        return False

    def check_optimizer(self, name: str, latent_dtype: str) -> None:
        """Make sure that latent weights can be kept and moved so over here.

        Raises:
            ConfigError: they cannot.
        """

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
        """Mixed precision in `dtype`; nothing for float32."""
        if dtype == torch.float32:
            return nullcontext()
        # a cache of casts would outlive the block inside a captured graph
        return torch.autocast(self.device.type, dtype=dtype, cache_enabled=False)

    def shared_memory_bytes(self) -> int:
        """What one block of a kernel may use of a GPU's shared memory; 0 elsewhere."""
        return 0

    def compiles(self) -> bool:
        """Whether compiling a model is worth its while here."""
        return False

    def records(self) -> bool:
        """Whether work can be recorded as a graph and replayed."""
        return False

    @contextmanager
    def waits(self) -> Iterator[list[str]]:
        """Where the block made the host wait for the device, as FILE:LINE, once it has ended.

        What waits cannot be recorded. Empty where nobody can tell, which never records.
        """
        yield []

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record what `run` gives the device; a replay and `run`'s result, which each replay fills.

        To be called where `records` says so. `run` must have run before, wait for nothing, and read
        its inputs from tensors that stay.
        """
        raise NotImplementedError

    def decision_lag(self) -> int:
        """Steps after which the host reads a decision, so that it never waits for the device."""
        return 0

    def batches_ahead(self) -> int:
        """Batches worth preparing while the device computes; a CPU would do both at once.

        Each on a thread of its own: one alone unpacks some 500,000 tokens a second, a small
        model learns from more.
        """
        return 4

    def load_map(self) -> dict[str, torch.device] | None:
        """Where transformers is to put the weights that it reads; None: on the host."""
        return {"": self.device}

    def place(self, model: nn.Module) -> None:
        """Bring a model that was read as `load_map` says to the device, its ties kept."""

    def checkpoint_fn(self) -> Callable | None:
        """What recomputes a function of tensors in backward; None: PyTorch's own can."""
        return None

    def divided(self, tensor: Tensor) -> Tensor:
        """A tensor with one row a sequence, its rows divided over the devices of this process.

        To be called on what comes from the host; what is computed of it follows.
        """
        return tensor

    def divisions(self) -> int:
        """Over how many devices `divided` shares rows out."""
        return 1

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Divide the rows of tensors over the process's devices, if it has several; waits for them.

        What is computed of them, and what is written into them, lies as they do.
        """

    def step_end(self) -> None:
        """Give the device what is recorded since the last call, where operators only record.

        Values are read after it: read before, they would be computed by themselves.
        """

    def step_results(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Ends the step and gives what came of it on the host, as `to_host` does."""
        self.step_end()
        return {name: self.to_host(tensor) for name, tensor in tensors.items()}

    def read(self, tensors: Sequence[Tensor]) -> list[float | int | bool]:
        """The values of scalars; waits for the device. Those of a step after its `step_end`."""
        return [tensor.item() for tensor in tensors]

    def equal(self, a: Tensor, b: Tensor) -> bool:
        """Whether all values of two tensors are the same; waits for the device."""
        return torch.equal(a, b)

    def undoing(self, tensors: Iterable[Tensor]) -> Callable[[], None]:
        """A function that restores the present values of tensors, kept on the host until then."""
        named = {str(place): tensor.detach() for place, tensor in enumerate(tensors)}
        copies, copying = self.copied_to_host(named)
        copying.wait()

        def undo() -> None:
            for name, tensor in named.items():
                tensor.copy_(copies[name])

        return undo

    def generator(self, seed: int) -> torch.Generator:
        """A seeded generator of what may be made on the device, else on the host."""
        return torch.Generator(self.device).manual_seed(seed)

    def compares(self) -> bool:
        """Whether this device lacks bit views of floats and searchsorted.

        Then comparing does it; `exp2` and `logaddexp` are missing too.
        """
        return False

    def pinned(self, tensor: Tensor) -> Tensor:
        """`tensor` in host memory that the device can copy from while it computes."""
        return tensor

    def pinned_zeros(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[Tensor]:
        """Zeros of these shapes in such memory."""
        return [torch.zeros(shape, dtype=dtype) for shape in shapes]

    def to_device(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, in the order of its work; the host does not wait."""
        return self.pinned(tensor).to(self.device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """`tensor` on the host, to be read only after a call of what `finished` then gives."""
        return tensor.to("cpu")

    def copied_to_host(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Copying]:
        """Copies on the host, made beside the device's other work; of one storage they stay so.

        They hold what the tensors are now, if they are read after `Copying.wait`, and if the device
        changes no tensor but after `Copying.hold`.
        """
        keys = {
            name: (tensor.data_ptr(), tensor.shape, tensor.dtype) if tensor.numel() else name
            for name, tensor in tensors.items()
        }
        sources = {keys[name]: tensor.detach().contiguous() for name, tensor in tensors.items()}
        copying = Copying(list(sources.values()), self.copy_stream())
        copies = dict(zip(sources, copying.copies, strict=True))
        return {name: copies[key] for name, key in keys.items()}, copying

    def visiting(self, groups: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Each group of tensors on the device, one after the other, to be written there.

        Those in pinned host memory come one group ahead and go back behind: they are there again
        for the host after `synchronize`. `VISITORS` of them are on the device at once.
        """
        return iter(groups)

    def copy_stream(self) -> "torch.cuda.Stream | None":
        """A new stream for copies that are made beside the device's work, if it has streams."""
        return None

    def finished(self) -> Callable[[], None]:
        """A function, for any thread, that waits for all that the device was given until now."""
        return lambda: None

    def tokens_at_once(self) -> int:
        """Tokens in one forward without gradients that keep the device busy."""
        return 2**11

    def logits_at_once(self) -> int:
        """Logits to form at once: 64 MiB of float32, where nobody knows better."""
        return 2**24

    def mark(self, after: Tensor | None = None) -> object:
        """A time stamp in the device's queue of work, for `seconds_between`.

        A device without a clock of its own takes the moment when `after` is computed.
        """
        self.synchronize()
        return time.perf_counter()

    def seconds_between(self, first: object, last: object) -> float:
        """Device time from one `mark` to a later one; waits for the later."""
        return last - first

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Device time of what `run` gives the device."""
        first = self.mark()
        run()
        return self.seconds_between(first, self.mark())

    def synchronize(self) -> None:
        """Wait until the device has done all it was given, but for copies beside its work."""

    def health(self) -> dict[str, float | None]:
        """Load (%), power (W) and temperature (C) of a GPU; takes milliseconds. None elsewhere."""
        return UNKNOWN

    def workers(self) -> int:
        """Threads worth giving work to: one per core on the CPU, one for a device's one queue."""
        return 1

    @contextmanager
    def side_by_side(self, workers: int = 0) -> Iterator[Callable[..., Iterator[Any]]]:
        """A `map`, its results in order, whose work so many threads do; 0: `self.workers()`."""
        workers = workers or self.workers()
        with undivided():
            if workers == 1:
                yield map
                return
            with ThreadPoolExecutor(workers) as pool:
                yield pool.map

    def rng_state(self) -> dict[str, Tensor]:
        """The state of every random generator that a step may draw from."""
        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `rng_state` gave."""
        torch.set_rng_state(state["cpu"])

    def name(self) -> str:
        """What a record calls this device."""
        return self.device.type

    def peak_memory_gib(self) -> float | None:
        """Most memory held since `reset_peak_memory`: by tensors, or by the process on a CPU.

        None where nobody counts.
        """
        return None

    def reset_peak_memory(self) -> None:
        """Let `peak_memory_gib` count from here."""

    def free_memory(self) -> None:
        """Give back what dead objects and the allocator still hold."""
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)

    def held_memory_gib(self) -> float | None:
        """Memory held now, counted as `peak_memory_gib` does."""
        return None

    def reserved_memory_gib(self) -> float | None:
        """Memory that PyTorch took from a GPU, in use or not; None elsewhere."""
        return None

    def peak_reserved_gib(self) -> float | None:
        """Most memory that PyTorch took from a GPU since `reset_peak_memory`; None elsewhere."""
        return None

    def memory_gib(self) -> float | None:
        """Memory that this process could hold if it took all that is free; None if unknown."""
        return None

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
        # what is free moves between two looks: a thousandth is no more than there is
        if not held < gib <= there * 1.001:
            raise ConfigError(
                f"memory_limit={gib:.4g}GiB, but {held:.4g} GiB are held already and {there:.4g} "
                "GiB can be had; choose a limit between them"
            )
        with self.limited(gib, held):
            yield gib

    def limited(self, gib: float, held: float) -> AbstractContextManager[None]:
        """The limit itself, where memory is counted; `held` GiB of it are held now."""
        raise NotImplementedError

    def staying_in_memory(self) -> AbstractContextManager[None]:
        """A block in which memory that is not there is an error, even where `overcommits`."""
        return nullcontext()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` says that memory ran out: the device's, or the process's on a CPU."""
        return isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error)

    def overcommits(self) -> bool:
        """Whether the system promises memory that it has not got, and kills who uses it."""
        return False

    @contextmanager
    def session(self, cache_dir: Path | None) -> Iterator[None]:
        """All that a verb computes here; `cache_dir` keeps what is compiled for later processes.

        Raises:
            ConfigError: this device keeps nothing that it compiles.
        """
        if cache_dir is not None:
            raise ConfigError(
                f"xla_cache_dir={cache_dir} is for XLA devices, but device={self.device}; drop it "
                "or use --device xla"
            )
        with self.staying_in_memory():
            yield

    def waiting_for(self, what: str) -> AbstractContextManager[None]:
        """A block in which `what` may have to be compiled, as progress then calls it."""
        return nullcontext()

    def compile_count(self) -> int:
        """Graphs compiled so far in this process; 0 where work need not be compiled."""
        return 0

    def compile_seconds(self) -> float:
        """What these took."""
        return 0.0

    def host_fallbacks(self) -> dict[str, int]:
        """Operators that the device lacks and the host computed, and how often, in this process."""
        return {}

    def counts(self) -> dict[str, object]:
        """For records: what compiling and running came to in this process, if somebody counts."""
        return {}

    def fixed_shapes(self) -> bool:
        """Whether a new shape costs so much that work is filled up to one that was there."""
        return False

    def filled_length(self, length: int) -> int:
        """How long a row of `length` should be: the same, or one of few lengths above."""
        return length

    def sizes_tried(self) -> tuple[int, ...]:
        """Batch sizes that a search tries, ascending; none for any, where one costs a moment."""
        return ()
