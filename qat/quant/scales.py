"""Scales: a start from the weights, and the least-squares refit to given levels.

Shapes: O out_features, I in_features, G groups per row, W weights per group, R rank.
"""

import torch
from torch import Tensor

from qat.quant.weight import Scales

RIDGE = 1e-6


def absmax_scales(weight: Tensor, group_size: int) -> Tensor:
    """The largest magnitude of each group, `(O, G)`, floored where a group is all zero."""
    O, I = weight.shape
    largest = weight.view(O, I // group_size, group_size).abs().amax(-1)
    return largest.clamp_min(torch.finfo(torch.float16).tiny)


def fit_group_scales(weight: Tensor, levels: Tensor, importance: Tensor, old: Tensor) -> Tensor:
    """The scales `(O, G)` that minimise `sum importance * (weight - S * levels)**2`, exactly.

    `s = sum(h w q) / sum(h q^2)` over each group; `levels` `(O, I)` are the chosen codebook
    values. A group without signal, or that would turn negative, keeps its `old` scale.
    """
    O, G = old.shape
    weighted = importance * levels
    numerator = (weighted * weight).view(O, G, -1).sum(-1)
    denominator = (weighted * levels).view(O, G, -1).sum(-1)
    fitted = numerator / denominator
    return torch.where((denominator > 0) & (fitted > 0), fitted, old)


def low_rank_start(S: Tensor, rank: int) -> Scales:
    """The best rank-`rank` factors `A diag(g) B` of a scale matrix `(O, I)`: its truncated SVD."""
    U, g, Vh = torch.linalg.svd(S, full_matrices=False)
    return Scales(scale_out=U[:, :rank], rank_gain=g[:rank], scale_in=Vh[:rank])


def fit_low_rank(weight: Tensor, levels: Tensor, importance: Tensor, old: Scales) -> Scales:
    """One round of alternating least squares on `sum h * (w - q * (A diag(g) B))**2`.

    First every row of `A diag(g)` given `B` (an R x R system each), then every column of `B`; at
    last the factors are balanced again: unit columns in `A`, unit rows in `B`, lengths in `g`.
    """
    curvature = importance * levels**2
    target = importance * levels * weight
    B = old.scale_in
    gained = _solve_rows(curvature, target, B)
    B = _solve_rows(curvature.T, target.T, gained.T).T
    return balance(gained, B)._replace(bits=old.bits)


def balance(out_factor: Tensor, in_factor: Tensor) -> Scales:
    """The same product with unit columns, unit rows, and the lengths in the gain."""
    tiny = torch.finfo(torch.float32).tiny
    out_length = out_factor.norm(dim=0).clamp_min(tiny)
    in_length = in_factor.norm(dim=1).clamp_min(tiny)
    return Scales(
        scale_out=out_factor / out_length,
        rank_gain=out_length * in_length,
        scale_in=in_factor / in_length[:, None],
    )


def _solve_rows(curvature: Tensor, target: Tensor, basis: Tensor) -> Tensor:
    """Row n: the x that minimises `sum_m curvature[n, m] (t - x @ basis[:, m])**2`; `(N, R)`."""
    R, M = basis.shape
    products = (basis[:, None] * basis[None]).view(R * R, M)
    normal = (curvature @ products.T).view(-1, R, R)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    ridge = RIDGE * diagonal.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny
    normal = normal + torch.diag_embed(ridge.expand_as(diagonal))
    right = target @ basis.T
    return torch.linalg.solve(normal, right[..., None])[..., 0]
