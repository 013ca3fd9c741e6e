"""Uniform asymmetric grids: `w = (code - zero) * scale` with a scale and a zero point per group.

Shapes: O out_features, I in_features, G groups per row, W weights per group.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.bench.baselines.training import FP16_BITS, check_groups

SMALLEST_SCALE = 1e-5


class Grid(NamedTuple):
    """What a group's codes mean."""

    scales: Tensor
    """`(O, G)` float32, positive, rounded to float16."""
    zeros: Tensor
    """`(O, G)` float32, whole numbers of the codes' range."""


def minmax_grid(weight: Tensor, bits: int, group_size: int) -> Grid:
    """The grid from each group's least to its largest weight, zero always on it.

    Raises:
        ConfigError: the groups do not divide the rows of `weight` `(O, I)`.
    """
    check_groups(weight.shape[1], group_size)
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).clamp(min=SMALLEST_SCALE).half().float()
    return Grid(scales, (-low / scales).round().clamp(0, 2**bits - 1))


def codes_of(weight: Tensor, grid: Grid, bits: int) -> Tensor:
    """The nearest codes, `(O, I)` whole numbers from 0 in float32."""
    groups = weight.float().unflatten(1, (grid.scales.shape[1], -1))
    codes = (groups / grid.scales[..., None]).round() + grid.zeros[..., None]
    return codes.clamp(0, 2**bits - 1).flatten(1)


def values_of(codes: Tensor, grid: Grid) -> Tensor:
    """The weight that `codes` mean, `(O, I)`."""
    groups = codes.unflatten(1, (grid.scales.shape[1], -1))
    return ((groups - grid.zeros[..., None]) * grid.scales[..., None]).flatten(1)


def uniform_bits(weight: Tensor, bits: int, group_size: int) -> int:
    """Bits to store: a code per weight, a float16 scale and a zero point of `bits` per group."""
    groups = weight.numel() // group_size
    return weight.numel() * bits + groups * (FP16_BITS + bits)


def round_to_nearest(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """The weight on its min-max grid, `(O, I)`."""
    grid = minmax_grid(weight, bits, group_size)
    return values_of(codes_of(weight, grid, bits), grid)


# GPTQ (arXiv:2210.17323) on uniform asymmetric grids, in order of activation.
#
# Each column is rounded in turn; its error, seen through the inverse Hessian of the layer's inputs,
# is taken off the columns not yet rounded. Groups keep their min-max grid from the start, so that
# the order of columns costs no bits.
#
# Shapes: O out_features, I in_features, G groups per row.

DAMPING = 0.01
BLOCK = 128


def gptq(weight: Tensor, hessian: Tensor, bits: int, group_size: int) -> Tensor:
    """The weight `(O, I)` on its grid, chosen against `hessian = mean(x x^T)` `(I, I)`.

    Raises:
        ConfigError: the groups do not divide the rows.
    """
    grid = minmax_grid(weight, bits, group_size)
    H = damped(hessian)
    order = H.diagonal().argsort(descending=True)
    group_of = order // group_size
    each = Grid(grid.scales[:, group_of], grid.zeros[:, group_of])  # a group per column
    U = inverse_factor(H[order][:, order])
    found = sweep(weight.float()[:, order], U, each, bits)
    return found[:, order.argsort()]


def damped(hessian: Tensor) -> Tensor:
    """The Hessian with a hundredth of its mean diagonal added; dead inputs count as 1."""
    H = hessian.float().clone()
    diagonal = H.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += DAMPING * diagonal.mean()
    return H


def inverse_factor(H: Tensor) -> Tensor:
    """The upper triangular `U` with `U^T U = H^-1`."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H.double()))
    return torch.linalg.cholesky(inverse, upper=True).float()


def sweep(weight: Tensor, U: Tensor, grid: Grid, bits: int) -> Tensor:
    """Round the columns from left to right, each with the errors before it taken off.

    `grid` has a scale and a zero point for every column.
    """
    rest, found = weight.clone(), torch.empty_like(weight)
    for start in range(0, weight.shape[1], BLOCK):
        end = min(start + BLOCK, weight.shape[1])
        errors = torch.empty_like(weight[:, start:end])
        for i in range(start, end):
            found[:, i] = _nearest(rest[:, i], grid, i, bits=bits)
            error = (rest[:, i] - found[:, i]) / U[i, i]
            rest[:, i:end] -= error[:, None] * U[i, i:end]
            errors[:, i - start] = error
        rest[:, end:] -= errors @ U[start:end, end:]
    return found


def _nearest(column: Tensor, grid: Grid, i: int, *, bits: int) -> Tensor:
    own = Grid(grid.scales[:, i : i + 1], grid.zeros[:, i : i + 1])
    return values_of(codes_of(column[:, None], own, bits), own)[:, 0]
