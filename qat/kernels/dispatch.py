"""Whether a Triton kernel or its plain-PyTorch reference computes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

HAS_TRITON = find_spec("triton") is not None

if torch.cuda.is_available() and not HAS_TRITON:
    logger.warning("triton is not installed: plain PyTorch computes instead, several times slower")

_FORCED: list[bool] = []


def use_triton(tensor: Tensor) -> bool:
    """True on a CUDA device with Triton installed; the reference computes everywhere else."""
    if _FORCED:
        return _FORCED[-1]
    return HAS_TRITON and tensor.is_cuda


@contextmanager
def computing_by(kernel: bool) -> Iterator[None]:
    """Inside, every kernel (interpreted on a CPU) or every reference computes: to compare them."""
    _FORCED.append(kernel)
    try:
        yield
    finally:
        _FORCED.pop()
