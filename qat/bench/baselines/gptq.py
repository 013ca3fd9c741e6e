"""GPTQ (arXiv:2210.17323) on uniform asymmetric grids, in order of activation.

Each column is rounded in turn; its error, seen through the inverse Hessian of the layer's inputs,
is taken off the columns not yet rounded. Groups keep their min-max grid from the start, so that
the order of columns costs no bits.

Shapes: O out_features, I in_features, G groups per row.
"""

import torch
from torch import Tensor

from qat.bench.baselines.uniform import Grid, codes_of, minmax_grid, values_of

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
