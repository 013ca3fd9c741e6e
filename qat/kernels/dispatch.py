"""Whether a Triton kernel or its plain-PyTorch reference computes."""

import logging
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

HAS_TRITON = find_spec("triton") is not None

if torch.cuda.is_available() and not HAS_TRITON:
    logger.warning("triton is not installed: plain PyTorch computes instead, several times slower")


def use_triton(tensor: Tensor) -> bool:
    """True on a CUDA device with Triton installed; the reference computes everywhere else."""
    return HAS_TRITON and tensor.is_cuda
