"""GPUs that are described instead of present: kernels are compiled for them as they are launched.

Inside `standing_in(gpu)` the package takes tensors without memory (PyTorch's meta device) for
tensors on that GPU. Launch wrappers run as they are and choose tiles, dtypes and fallbacks by the
facts of the described GPU. Each launch compiles its kernel instead of running it: Triton's compiler
and ptxas, which it brings along, need no GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from qat.backend.base import GIB
from qat.extensions.lab.kernels.resources import OURS, Compiled, name_of, taking
from qat.kernels import tuned
from qat.kernels.dispatch import triton

KIB = 1024
LANES = 32
"""Threads of a warp."""
TENSOR_COLUMNS = 512
"""Columns of a multiprocessor's tensor memory on Blackwell."""
STAND_IN, META = torch.device("cuda:0"), torch.device("meta")


class Gpu(NamedTuple):
    """The facts about a GPU on which the package's choices depend."""

    name: str
    """The name that its driver reports, by which a table of tuned configurations is found."""
    capability: tuple[int, int]
    shared_bytes: int
    """Shared memory that one block may use (CUDA C++ programming guide, compute capabilities)."""
    memory_gib: int

    @property
    def architecture(self) -> str:
        """The name of its instruction set, such as `sm_90`."""
        return f"sm_{self.number}"

    @property
    def number(self) -> int:
        """Its compute capability as one number, such as 90."""
        major, minor = self.capability
        return 10 * major + minor


GPUS = (
    Gpu("Tesla T4", (7, 5), 64 * KIB, 15),
    Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 163 * KIB, 79),
    Gpu("NVIDIA GeForce RTX 3090", (8, 6), 99 * KIB, 24),
    Gpu("NVIDIA GeForce RTX 4090", (8, 9), 99 * KIB, 24),
    Gpu("NVIDIA H100 80GB HBM3", (9, 0), 227 * KIB, 79),
    Gpu("NVIDIA B200", (10, 0), 227 * KIB, 178),
    Gpu("NVIDIA GeForce RTX 5090", (12, 0), 99 * KIB, 31),
)
"""One GPU of each architecture that the package is meant for."""


class NotCompiledError(Exception):
    """A kernel is launched on a GPU that it does not compile for."""


@contextmanager
def standing_in(gpu: Gpu, take: Callable[[Compiled], None]) -> Iterator[None]:
    """Let tensors on `cuda` be on a described GPU inside the block.

    Every launch hands what its kernel takes to `take`, each combination of constants once. Results
    hold nothing, so that nothing may depend on their values.

    Raises:
        NotCompiledError: a kernel does not compile for the GPU.
        triton.OutOfResources: a kernel takes more shared or tensor memory than the GPU has.
    """
    facts = SimpleNamespace(
        name=gpu.name,
        shared_memory_per_block_optin=gpu.shared_bytes,
        total_memory=gpu.memory_gib * GIB,
    )
    answers = {
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: facts,
        "get_device_name": lambda device=None: gpu.name,
        "is_current_stream_capturing": lambda: False,
        "device_of": lambda tensor: nullcontext(),
    }
    launcher = _Launcher(gpu)
    tuned.forget_tables()
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(triton.runtime.jit.JITFunction, "run", launcher.method()))
        stack.enter_context(patch.object(triton.runtime.driver, "_active", launcher))
        stack.enter_context(taking(take))
        stack.enter_context(_OnMeta())
        stack.enter_context(_Bodies())
        yield
    tuned.forget_tables()


class _OnMeta(TorchFunctionMode):
    """A mode that makes tensors for `cuda` on the meta device and calls their device `cuda`."""

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        def placed(device: torch.device) -> torch.device:
            return META if device.type == STAND_IN.type else device

        args, kwargs = tree_map_only(torch.device, placed, (args, kwargs or {}))
        found = func(*args, **kwargs)
        if func == Tensor.device.__get__ and found == META:
            return STAND_IN
        return args[0].is_meta if func == Tensor.is_cuda.__get__ else found


class _Bodies(TorchDispatchMode):
    """A mode that runs the bodies of the package's operators on meta tensors."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace != OURS:
            return func(*args, **(kwargs or {}))
        with self, _OnMeta():
            return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))


class _Launcher:
    """A driver of Triton for one described GPU, which compiles a kernel where it is launched."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def get_current_device(self) -> int:
        """Return the index of the device, by which Triton keeps compiled kernels apart."""
        return self.gpu.number

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> Any:
        """Return the target that Triton compiles for."""
        return triton.backends.compiler.GPUTarget("cuda", self.gpu.number, LANES)

    def method(self) -> Callable:
        """Return a function in place of `JITFunction.run` that compiles and does not launch."""
        run = triton.runtime.jit.JITFunction.run

        def compiled(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> Any:
            name = name_of(kernel)
            try:
                found = run(kernel, *args, grid=grid, warmup=True, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever Triton's passes and ptxas raise
                raise NotCompiledError(f"{name} does not compile: {_reason(error)}") from error
            shared, columns = found.metadata.shared, getattr(found.metadata, "tmem_size", None) or 0
            for kind, needed, room in (
                ("shared memory", shared, self.gpu.shared_bytes),
                ("tensor memory", columns, TENSOR_COLUMNS),
            ):
                if needed > room:  # as a launch does
                    raise triton.OutOfResources(needed, room, f"{kind} of {name}")
            return found

        return compiled


def _reason(error: Exception) -> str:
    """Return the one line of a compiler's error that names the cause; ptxas repeats its input."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "error" in line and ":" in line), lines[0])
