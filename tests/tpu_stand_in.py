"""A device called `tpu` whose operators the CPU computes, in a process of its own.

What torch_tpu would bring is here as far as our code asks for it: tensors whose device is `tpu`,
`torch.tpu`, and what `torch.accelerator` says. Run as a script, it compares runs there with the
CPU's and prints what differs. Nothing of this is a TPU: how one computes is not to be found here.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
LOWERED = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
"""Operators of which autocast lowers the arguments."""


class Runtime:
    """`torch.tpu`, and the part of `torch.accelerator` that asks an allocator."""

    def __init__(self) -> None:
        self.default_generators = [torch.Generator()]
        self.waits = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def _get_cache_misses(self) -> int:
        return 0

    def synchronize(self) -> None:
        self.waits += 1

    def memory_allocated(self) -> int:
        return 2**30

    def max_memory_allocated(self) -> int:
        return 2**30

    def reset_peak_memory_stats(self) -> None:
        pass

    def get_memory_info(self) -> tuple[int, int]:
        return 2**30, 2**31


class Held(Tensor):
    """A tensor on the device: a CPU's behind a face that says `tpu`."""

    @staticmethod
    def __new__(cls, cpu: Tensor) -> "Held":
        face = Tensor._make_wrapper_subclass(
            cls,
            cpu.size(),
            strides=cpu.stride(),
            storage_offset=cpu.storage_offset(),
            dtype=cpu.dtype,
            device=torch.device("tpu:0"),
        )
        face.cpu_tensor = cpu
        return face

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> "Held":
        return self.detach()

    @data.setter
    def data(self, other: "Held") -> None:
        Tensor.data.__set__(self, other)
        self.cpu_tensor = other.cpu_tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


class Inside(TorchDispatchMode):
    """Where tensors can be made on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


def computed(func, args: tuple, kwargs: dict) -> object:
    """What `func` gives; on the device if an argument is there or it is to be made there."""
    held = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Held)]
    if func is aten.copy_.default:
        _bare(args[0]).copy_(_bare(args[1]))
        return args[0]
    made_on = kwargs.get("device")
    is_there = bool(held) if made_on is None else torch.device(made_on).type == "tpu"
    found = func(*tree_map(_bare, args), **tree_map(_bare, kwargs))
    known = {id(tensor.cpu_tensor): tensor for tensor in held}  # of operators that work in place

    def face(value: object) -> object:
        if not is_there or not isinstance(value, Tensor):
            return value
        there = known.get(id(value))
        return Held(value) if there is None else there

    return tree_map(face, found)


def _bare(value: object) -> object:
    if isinstance(value, Held):
        return value.cpu_tensor
    if isinstance(value, torch.device) and value.type == "tpu":
        return torch.device("cpu")
    return value


def _lowered(operator: Callable) -> Callable:
    """The operator under autocast."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: object, **kwargs: object) -> Tensor:
        lower = torch.get_autocast_dtype("tpu")
        with torch._C._ExcludeDispatchKeyGuard(keys):

            def cast(value: object) -> object:
                is_number = isinstance(value, Tensor) and value.is_floating_point()
                return value.to(lower) if is_number else value

            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


def install() -> Runtime:
    """Let this process have the device from now on."""
    runtime = Runtime()
    _setup_privateuseone_for_python_backend("tpu", runtime)
    for name in vars(Runtime):
        if "memory" in name or name == "synchronize":
            setattr(torch.accelerator, name, getattr(runtime, name))
    anything = torch.library.Library("_", "IMPL")
    anything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    ours = torch.library.Library("aten", "IMPL")

    def empty(size: list[int], dtype: torch.dtype | None = None, **_: object) -> Tensor:
        return Held(torch.empty(size, dtype=dtype))

    def empty_strided(size, stride, dtype=None, **_: object) -> Tensor:
        return Held(torch.empty_strided(size, stride, dtype=dtype))

    def copy_(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        _bare(to).copy_(_bare(source))
        return to

    # where PyTorch goes past modes: `torch.tensor(1.0, device="tpu")`
    ours.impl("empty.memory_format", empty, "PrivateUse1")
    ours.impl("empty_strided", empty_strided, "PrivateUse1")
    ours.impl("copy_", copy_, "PrivateUse1")
    for name in LOWERED:
        ours.impl(name, _lowered(getattr(aten, name)), "AutocastPrivateUse1")
    runtime.kept = (anything, ours)
    return runtime


def compare(place: Path) -> dict[str, object]:
    """A cache, a run that crashed and went on, a verdict and a text: there and on the CPU."""
    from cache_case import build, teacher
    from crash import stopped_at
    from train_case import config
    from xla_case import make_short_place

    from qat.backend import tpu as backend_tpu
    from qat.backend.device import select
    from qat.data.reader import TeacherCache
    from qat.evaluate.config import EvalConfig
    from qat.evaluate.judge import judge
    from qat.logs import read_json_lines
    from qat.train.optim import Optimizer
    from qat.train.start import train_student

    backend_tpu.torch_tpu_obstacle = lambda: None
    make_short_place(place)
    found: dict[str, object] = {}
    for device in ("cpu", "tpu"):
        out = place / device
        placed = teacher()
        select(device).place(placed.model)
        build(out / "cache", teacher=placed)
        values = {"max_steps": 4, "save_every": 2, "device": device, "gradient_checkpointing": True}
        settings = config(place, learn="weights,codebook,scales,norms", **values)
        student = str(place / "student")
        with stopped_at(Optimizer, "step", 3):
            train_student(settings, student, out / "run", resume=False)
        train_student(settings, student, out / "run", resume=True, begins_anew=True)
        train_student(settings, student, out / "whole", resume=False)
        lower = config(place, **values, dtype="bf16")
        train_student(lower, student, out / "lower", resume=False)
        batch = TeacherCache.open(out / "cache").batch(range(10))
        verdict = judge(str(out / "whole"), EvalConfig(cache_dir=place / "cache", device=device))
        found[device] = {
            "ids": batch.topk_ids.tolist(),
            "logprobs": batch.topk_logprobs.tolist(),
            "run": read_json_lines(out / "run/metrics.jsonl"),
            "whole": read_json_lines(out / "whole/metrics.jsonl"),
            "lower": read_json_lines(out / "lower/metrics.jsonl"),
            "verdict": verdict.numbers(),
        }
    return found


if __name__ == "__main__":
    RUNTIME = install()
    with Inside():
        FOUND = compare(Path(sys.argv[1]))
    print(json.dumps(FOUND | {"waits": RUNTIME.waits}))  # noqa: T201
