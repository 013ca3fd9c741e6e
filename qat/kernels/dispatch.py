"""Triton where it is installed, and whether a kernel or its plain-PyTorch reference computes.

A kernel's file holds both. It takes `triton` and `tl` from here, so that it can be imported where
there is no Triton (macOS, Windows, CPU images).
"""

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class _Missing:
    """Stands for all of Triton where it is missing: decorators and constants come to nothing."""

    def __call__(self, *_: object, **__: object) -> Self:
        return self

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):  # no module's or function's: who inspects it shall not go on
            raise AttributeError(name)
        return self


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Missing()
try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # also of a Triton for other GPUs than NVIDIA's
    gdc_launch_dependents = gdc_wait = _Missing()

HAS_TRITON = not isinstance(triton, _Missing)
IS_COMPILED = HAS_TRITON and not triton.knobs.runtime.interpret
"""False in Triton's interpreter (`TRITON_INTERPRET=1`), which knows no assembly and no registers.

Like every `@triton.jit`, it is settled at import.
"""

Way = tuple[str, str, str]
"""Module of a kernel, `triton` or `pytorch`, and the kind of device."""

if torch.cuda.is_available() and not HAS_TRITON:
    logger.warning("triton is not installed: plain PyTorch computes instead, several times slower")

_FORCED: list[bool] = []
_taken: Counter[Way] = Counter()


def use_triton(tensor: Tensor) -> bool:
    """True on a CUDA device with Triton installed; the reference computes everywhere else."""
    found = _FORCED[-1] if _FORCED else HAS_TRITON and tensor.is_cuda
    if not torch.compiler.is_compiling():  # which would guard on the count
        kernel = sys._getframe(1).f_globals["__name__"].rpartition(".")[2]
        _taken[kernel, "triton" if found else "pytorch", tensor.device.type] += 1
    return found


def ways_taken() -> Counter[Way]:
    """How often each way was taken so far in this process, outside compiled graphs."""
    return _taken.copy()


@contextmanager
def computing_by(kernel: bool) -> Iterator[None]:
    """Inside, every kernel (interpreted on a CPU) or every reference computes: to compare them."""
    _FORCED.append(kernel)
    try:
        yield
    finally:
        _FORCED.pop()


HOPPER = (9, 0)
"""The first compute capability with programmatic dependent launch."""


def has_warpgroups(device: torch.device) -> bool:
    """Whether tensor cores take the rows of four warps as one: `wgmma`, which only Hopper has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER[0]


_is_wanted = [True]


def overlapping(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel of a decoding step, which may start while the one before it ends.

    Its weights are no kernel's result: it reads the first of them meanwhile, and waits only before
    what the one before wrote (programmatic dependent launch). Each kernel of the chain waits, so
    that what an earlier one wrote is there too. A token of a 4B shape at 2 bits took 1.66 ms so,
    else 1.84 (one H200).
    """
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER
    if _is_wanted[0] and is_hopper:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Run a block with every launch waiting for the one before: to compare with."""
    _is_wanted[0] = False
    try:
        yield
    finally:
        _is_wanted[0] = True
