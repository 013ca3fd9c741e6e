"""Whether a Triton kernel or its plain-PyTorch reference computes."""

import logging
from functools import cache
from importlib.util import find_spec

from torch import Tensor

logger = logging.getLogger(__name__)


def use_triton(tensor: Tensor) -> bool:
    """True on a CUDA device with Triton installed; the reference computes everywhere else."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    if find_spec("triton") is not None:
        return True
    logger.warning("triton is not installed: plain PyTorch computes instead, several times slower")
    return False
