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


class Missing:
    """A stand-in for Triton if it is missing: decorators and constants have no effect."""

    def __call__(self, *_: object, **__: object) -> Self:
        """Return itself: a decorator without effect."""
        return self

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):  # no dunder names, so that `inspect` does not recurse
            raise AttributeError(name)
        return self


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = Missing()

HAS_TRITON = not isinstance(triton, Missing)

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


def plain_on_gpu() -> dict[str, int]:
    """Return how often each kernel ran as plain PyTorch on a GPU in this process so far."""
    plain = ("pytorch", "cuda")
    return {name: n for (name, *way), n in sorted(ways_taken().items()) if tuple(way) == plain}


@contextmanager
def computing_by(kernel: bool) -> Iterator[None]:
    """Force every kernel (interpreted on a CPU) or every reference inside the block, to compare."""
    _FORCED.append(kernel)
    try:
        yield
    finally:
        _FORCED.pop()
