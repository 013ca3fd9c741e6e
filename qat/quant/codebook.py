"""Codebooks: the fixed grids, and levels learned from the weights."""

import torch
from torch import Tensor

from qat.quant.spec import LutSpec

FEW = 16
"""Levels that are faster compared one by one than searched."""
BINS = 2**13
"""Bins that middles between levels are searched by."""


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

    `torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)` at a fraction of its time.
    """
    middles = (levels[1:] + levels[:-1]) / 2
    if len(levels) > FEW:
        return _search(values, middles)
    indices = torch.zeros_like(values, dtype=torch.uint8)
    for middle in middles.unbind():
        indices += values > middle
    return indices


def _search(values: Tensor, middles: Tensor) -> Tensor:
    """How many of ascending `middles` lie below each value, uint8, exactly.

    The values' bins, equally wide, say how many middles lie in lower bins; the middles of the same
    bin, seldom more than one, are compared.
    """
    low, width = middles[0], (middles[-1] - middles[0]).clamp_min(torch.finfo(torch.float32).tiny)

    def bins(of: Tensor) -> Tensor:
        place = ((of.flatten() - low) * (BINS / width)).clamp_(0, BINS - 1)
        return place.int().clamp_(0, BINS - 1)  # no number at all lies in the first

    in_bin = torch.bincount(bins(middles), minlength=BINS)
    indices = (in_bin.cumsum(0) - in_bin).int().index_select(0, bins(values))
    padded = torch.cat([middles, middles.new_full((1,), torch.inf)])
    for _ in range(int(in_bin.max())):
        indices += values.flatten() > padded.index_select(0, indices)
    return indices.view(values.shape).to(torch.uint8)
