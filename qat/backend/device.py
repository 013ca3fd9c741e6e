"""What the rest of the code may ask of a device; no other file names one.

CPU and CUDA are implemented here; MPS works through the same code. XLA has a file of its own.
"""

import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TypeVar

import torch
from torch import Tensor, nn

from qat.backend import nvidia
from qat.backend.before_torch import tpu_name
from qat.backend.compiling import Compiling
from qat.backend.copying import Copying
from qat.backend.nvml import UNKNOWN, gpu_health
from qat.errors import ConfigError
from qat.process import cores

logger = logging.getLogger(__name__)

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
OTHER_KINDS = {"xla": "qat.backend.xla"}
"""Where the backends of devices live that need a package of their own."""
SHAPING = re.compile(
    r"(CUDA|CUBLAS|CUDNN|NCCL|GLOO|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|XLA|PJRT|TPU|LIBTPU|OMP|GOMP"
    r"|KMP|MKL|OPENBLAS|MALLOC)_\w+|NVIDIA_(VISIBLE_DEVICES|TF32_OVERRIDE)|LD_PRELOAD"
)
"""Names of environment variables that decide what a run computes on, how fast and how exactly."""
PRIVATE = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")
"""Parts of the names of those that are nobody's business."""
T = TypeVar("T")


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
class Backend(Compiling):
    """One device and the things that differ between devices."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of tensors in the compute dtype called `name` (see `dtype_name`).

        Raises:
            ConfigError: the device cannot really compute in that dtype.
        """
        return DTYPES[self.dtype_name(name)]

    def dtype_name(self, name: str) -> str:
        """`name` itself, or what `auto` means here: bf16 where it is native, else fp16 on a GPU.

        Raises:
            ConfigError: the device cannot really compute in that dtype.
        """
        if name == "auto":
            return "bf16" if self.has_bf16() else "fp16" if self.device.type == "cuda" else "fp32"
        if name == "bf16" and self.device.type == "cuda" and not self.has_bf16():
            raise ConfigError("dtype=bf16, but this GPU has no bf16 units; use --dtype fp16")
        if name == "tf32" and not self.has_bf16():
            raise ConfigError(f"dtype=tf32, but {self.name()} has no such units; use --dtype fp32")
        return name

    def has_bf16(self) -> bool:
        """Whether bf16 (and tf32) arithmetic is native and worth its name here."""
        if self.device.type != "cuda":
            return False
        return torch.cuda.get_device_capability(self.device) >= (8, 0)

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
        if self.device.type != "cuda":
            return 0
        return torch.cuda.get_device_properties(self.device).shared_memory_per_block_optin

    def compiles(self) -> bool:
        """Whether compiling a model is worth its while here."""
        return self.device.type == "cuda"

    def records(self) -> bool:
        """Whether work can be recorded as a graph and replayed."""
        return self.device.type == "cuda"

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record what `run` gives the device; a replay and `run`'s result, which each replay fills.

        `run` must have run before, wait for nothing, and read its inputs from tensors that stay.
        """
        graph = torch.cuda.CUDAGraph()
        # other threads may go on preparing batches meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result

    def decision_lag(self) -> int:
        """Steps that the host lets pass before it reads what a step decided, so as not to wait."""
        return 2 if self.device.type == "cuda" else 0

    def batches_ahead(self) -> int:
        """Batches worth preparing while the device computes; a CPU would do both at once.

        Each on a thread of its own: one alone unpacks some 500,000 tokens a second, a small
        model learns from more.
        """
        return 0 if self.device.type == "cpu" else 4

    def load_map(self) -> dict[str, torch.device] | None:
        """Where transformers is to put the weights that it reads; None: on the host."""
        return None if self.device.type == "cpu" else {"": self.device}

    def place(self, model: nn.Module) -> None:
        """Bring a model that was read as `load_map` says to the device, its ties kept."""

    def checkpoint_fn(self) -> Callable | None:
        """What recomputes a function of tensors in backward; None: PyTorch's own can."""
        return None

    def divided(self, tensor: Tensor) -> Tensor:
        """A tensor of one row per sequence, its rows shared out where one process has many devices.

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
        """What gives tensors back the values of now, which wait on the host."""
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
        """Whether bits of floats cannot be looked at, nor sorted numbers be searched, over here.

        Then comparing does it; `exp2` and `logaddexp` are missing too.
        """
        return False

    def pinned(self, tensor: Tensor) -> Tensor:
        """`tensor` in host memory that the device can copy from while it computes."""
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, in the order of its work; the host does not wait."""
        return self.pinned(tensor).to(self.device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """`tensor` on the host, to be read only after a call of what `finished` then gives."""
        return tensor.to("cpu", non_blocking=self.device.type == "cuda")

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
        copying = Copying(self.device, list(sources.values()))
        copies = dict(zip(sources, copying.copies, strict=True))
        return {name: copies[key] for name, key in keys.items()}, copying

    def finished(self) -> Callable[[], None]:
        """A function, for any thread, that waits for all that the device was given until now."""
        if self.device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event.synchronize

    def tokens_at_once(self) -> int:
        """Tokens in one forward without gradients that keep the device busy."""
        return 2**15 if self.device.type == "cuda" else 2**11

    def logits_at_once(self) -> int:
        """Logits to form at once: 64 MiB of float32 on a CPU; on a GPU a 16th of its memory.

        Never more than 32-bit indices reach.
        """
        if self.device.type != "cuda":
            return 2**24
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        return min(2**31 - 1, total_bytes // 16 // torch.float32.itemsize)

    def mark(self, after: Tensor | None = None) -> "torch.cuda.Event | float":
        """This moment in the course of the device's work; `seconds_between` compares two.

        A device without a clock of its own takes the moment when `after` is computed.
        """
        if self.device.type != "cuda":
            self.synchronize()
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds_between(
        self, first: "torch.cuda.Event | float", last: "torch.cuda.Event | float"
    ) -> float:
        """Device time from one `mark` to a later one; waits for the later."""
        if isinstance(first, float):
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Device time of what `run` gives the device."""
        first = self.mark()
        run()
        return self.seconds_between(first, self.mark())

    def synchronize(self) -> None:
        """Wait until the device has done all it was given, but for copies beside its work."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def health(self) -> dict[str, float | None]:
        """Load (%), power (W) and temperature (C) of a GPU; takes milliseconds."""
        if self.device.type != "cuda":
            return UNKNOWN
        return gpu_health(str(torch.cuda.get_device_properties(self.device).uuid))

    def workers(self) -> int:
        """Threads worth giving work to: one per core on the CPU, one for a device's one queue."""
        return cores() if self.device.type == "cpu" else 1

    def rng_state(self) -> dict[str, Tensor]:
        """The state of every random generator that a step may draw from."""
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `rng_state` gave."""
        torch.set_rng_state(state["cpu"])
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def select(device: str = "auto") -> Backend:
    """The backend of `device` (`auto`, `cpu`, `cuda`, `cuda:1`, `mps`, `xla`).

    Under a launcher `cuda` is the GPU of this process's number on its host.

    Raises:
        ConfigError: the device is not there.
    """
    if device == "auto":
        device = "cuda" if _has_cuda() else "cpu"
        if device == "cpu" and launched().rank == 0:
            _tell_what_idles()
    kind, _, index = device.partition(":")
    if device in OTHER_KINDS:
        return import_module(OTHER_KINDS[device]).open_backend()
    if device == "cuda" and launched().world > 1:
        index = str(launched().local_rank)
        device = f"cuda:{index}"
    present = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if kind not in present or not (index or "0").isdecimal():
        raise ConfigError(f"device={device} is unknown; use auto, cpu, cuda, cuda:N, mps or xla")
    if int(index or 0) >= present[kind]:
        unused = idle_device() if kind == "cuda" and not present[kind] else None
        if unused is not None:
            raise ConfigError(f"device={device}: {unused}, or use --device cpu")
        raise ConfigError(
            f"device={device}, but {present[kind]} {kind.upper()} devices are visible here; use "
            "--device cpu or one that is there"
        )
    if kind == "cuda" and index:
        torch.cuda.set_device(int(index))  # where kernels are launched
    return Backend(torch.device(device))


def idle_device() -> str | None:
    """The accelerator of this machine that `auto` leaves alone, why, and the way out, or None."""
    gpu = None if nvidia.hidden() else nvidia.present()
    if gpu is not None and not _has_cuda():
        return nvidia.unused(gpu, torch.__version__, torch.version.cuda, _cuda_trouble())
    if torch.backends.mps.is_available():
        return "this machine's GPU waits to be asked for; use --device mps"
    if tpu_name() is not None:
        return f"this machine's {tpu_name()} waits to be asked for; use --device xla"
    return None


@cache
def _tell_what_idles() -> None:
    idle = idle_device()
    if idle is not None:
        logger.warning("the CPU computes: %s, or say --device cpu to silence this line", idle)


def _has_cuda() -> bool:
    """Whether torch drives a GPU; what it warns of where it does not, `idle_device` tells."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="CUDA initialization")
        return torch.cuda.is_available()


def _cuda_trouble() -> str:
    """What torch says when CUDA is to start, on one line; empty where it was built without."""
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    except AssertionError:  # no CUDA in it
        pass
    return ""


def on(device: torch.device) -> Backend:
    """The backend of a tensor's device."""
    module = OTHER_KINDS.get(device.type)
    return Backend(device) if module is None else import_module(module).backend_on(device)


def devices(name: str) -> tuple[str, ...]:
    """The devices over which work may spread: all GPUs where `name` says none, else that device."""
    if name == "cuda" or (name == "auto" and _has_cuda()):
        return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    return (name,)


def profile_operators() -> torch.profiler.profile:
    """A context that notes each operator which the host calls, with shapes and dtypes."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print that it begins and ends
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, record_shapes=True)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under `seed` and put the generators back afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
