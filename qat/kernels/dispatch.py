"""Whether a Triton kernel or its plain-PyTorch reference computes."""

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Way = tuple[str, str, str]
"""Module of a kernel, `triton` or `pytorch`, and the kind of device."""

HAS_TRITON = find_spec("triton") is not None

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
