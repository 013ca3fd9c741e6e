"""Codebooks: the fixed grids, and levels learned from the weights."""

import torch
from torch import Tensor

from qat.quant.spec import LutSpec

FEW = 16
"""Levels that are faster compared one by one than searched."""


def fixed_grid(spec: LutSpec) -> Tensor | None:
    """The levels of a grid that never moves, ascending float32 `(C,)`; None for a learned LUT.

    seq: evenly spaced, symmetric, no zero (ParetoQ, arXiv:2502.02631): `(2c + 1 - C) / C`.
    int: `-2**(bits-1) ... 2**(bits-1) - 1`. ternary: `-1, 0, 1`.
    """
    C = spec.num_levels
    if spec.codebook == "lut":
        return None
    if spec.codebook == "seq":
        return (2 * torch.arange(C) + 1 - C) / C
    if spec.codebook == "int":
        return torch.arange(-(C // 2), C // 2).float()
    return torch.tensor([-1.0, 0.0, 1.0])


def nearest_level(values: Tensor, levels: Tensor) -> Tensor:
    """The index, uint8, of the one of ascending `levels` `(C,)` that is nearest to each value.

    `torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)`, for few levels at a fraction of its
    time.
    """
    middles = (levels[1:] + levels[:-1]) / 2
    if len(levels) > FEW:
        return torch.bucketize(values, middles, out_int32=True).to(torch.uint8)
    indices = torch.zeros_like(values, dtype=torch.uint8)
    for middle in middles.unbind():
        indices += values > middle
    return indices
