"""Import Triton if it is installed, and select a kernel or its plain-PyTorch reference.

A kernel's file holds both. It imports `triton` and `tl` from here, so that it can be imported
without Triton (macOS, Windows, CPU images).
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class _Missing:
    """A stand-in for Triton if it is missing: decorators and constants have no effect."""

    def __call__(self, *_: object, **__: object) -> Self:
        return self

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):  # no dunder names, so that `inspect` does not recurse
            raise AttributeError(name)
        return self


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Missing()
try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # also a Triton build for other than NVIDIA GPUs
    gdc_launch_dependents = gdc_wait = _Missing()

HAS_TRITON = not isinstance(triton, _Missing)
IS_COMPILED = HAS_TRITON and not triton.knobs.runtime.interpret
"""False in Triton's interpreter (`TRITON_INTERPRET=1`), which has no assembly and no registers.

Like every `@triton.jit`, it is fixed at import.
"""

Way = tuple[str, str, str]
"""The module of a kernel, `triton` or `pytorch`, and the kind of device."""

if torch.cuda.is_available() and not HAS_TRITON:
    logger.warning("triton is not installed: plain PyTorch computes instead, several times slower")

_FORCED: list[bool] = []
_taken: Counter[Way] = Counter()


def use_triton(tensor: Tensor, kernel: str) -> bool:
    """Return whether to use Triton: on CUDA with Triton installed; otherwise use the reference.

    The way is counted for `kernel`, the `__name__` of its module.
    """
    found = _FORCED[-1] if _FORCED else HAS_TRITON and tensor.is_cuda
    if not torch.compiler.is_compiling():  # a graph would guard on the count
        _taken[kernel, "triton" if found else "pytorch", tensor.device.type] += 1
    return found


def ways_taken() -> Counter[Way]:
    """Return how often each way was taken in this process so far, outside compiled graphs."""
    found: Counter[Way] = Counter()
    for (name, *way), count in _taken.items():
        found[name.rpartition(".")[2], *way] += count
    return found


@contextmanager
def computing_by(kernel: bool) -> Iterator[None]:
    """Force every kernel (interpreted on a CPU) or every reference inside the block, to compare."""
    _FORCED.append(kernel)
    try:
        yield
    finally:
        _FORCED.pop()


HOPPER = (9, 0)
"""The first compute capability with programmatic dependent launch."""


def has_warpgroups(device: torch.device) -> bool:
    """Return whether the device has `wgmma` (four warps multiply together): Hopper only."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER[0]


_is_wanted = [True]


def overlapping(device: torch.device) -> dict[str, bool]:
    """Return launch options for a kernel of a decoding step that may overlap with the one before.

    The weights are not the result of a kernel: the kernel prefetches the first of them, and waits
    only before it reads what the previous kernel wrote (programmatic dependent launch). Each kernel
    of the chain waits, so that the results of all earlier ones are visible. A token of a 4B shape
    at 2 bits took 1.66 ms with it and 1.84 without (one H200).
    """
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER
    if _is_wanted[0] and is_hopper:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Disable overlap inside the block, so that every launch waits for the one before."""
    _is_wanted[0] = False
    try:
        yield
    finally:
        _is_wanted[0] = True
