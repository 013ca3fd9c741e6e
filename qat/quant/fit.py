"""Quantize a weight without its layer's inputs: levels and scales by turns.

Shapes: O out_features, I in_features, G groups per row, C codebook entries.
"""

import numpy as np
import torch
from torch import Tensor

from qat.quant.codebook import fixed_grid
from qat.quant.kmeans import refine_levels, weighted_kmeans
from qat.quant.scales import absmax_scales, fit_group_scales, fit_low_rank, low_rank_start
from qat.quant.spec import LutSpec
from qat.quant.weight import (
    QuantizedWeight,
    Scales,
    as_stored,
    dequantize,
    expand_scales,
    nearest_indices,
)

ROUNDS = 10


def fit_weight(weight: Tensor, spec: LutSpec, importance: Tensor | None = None) -> QuantizedWeight:
    """The levels, scales and indices that minimise `sum h * (weight - dequantized)**2`.

    Alternates weighted k-means (learned codebooks only), nearest indices and a least-squares refit
    of the scales, and keeps the best round after rounding as a checkpoint stores it.

    Args:
        weight: `(O, I)` float.
        spec: the format.
        importance: how much an error counts, `(I,)` (the mean square of each input feature) or
            `(O, I)` (Fisher); 1 everywhere if None.
    """
    weight = weight.detach().float()
    h = torch.ones_like(weight) if importance is None else importance.float().expand_as(weight)
    scales = _start_scales(weight, spec)
    levels = fixed_grid(spec)
    levels = None if levels is None else levels.to(weight.device)
    best, least = None, float("inf")
    for _ in range(ROUNDS):
        S = expand_scales(scales, weight.shape[1])
        if spec.codebook == "lut":
            levels = _learn_levels(weight, S, h, num_levels=spec.num_levels, levels=levels)
        indices = nearest_indices(weight, S, levels)
        scales = refit_scales(weight, levels[indices.int()], h, scales)
        candidate = settle(weight, scales, levels, spec)
        error = weighted_error(weight, candidate, h)
        if error < least:
            best, least = candidate, error
    return best


def weighted_error(weight: Tensor, quantized: QuantizedWeight, importance: Tensor) -> float:
    """`sum importance * (weight - dequantized)**2`."""
    return (importance * (weight - dequantize(quantized)) ** 2).sum().item()


def refit_scales(weight: Tensor, levels: Tensor, importance: Tensor, old: Scales) -> Scales:
    """The least-squares scales for the codebook values `levels` `(O, I)`, in the form of `old`."""
    if old.scales is None:
        return fit_low_rank(weight, levels, importance, old)
    return Scales(scales=fit_group_scales(weight, levels, importance, old.scales))


def settle(weight: Tensor, scales: Scales, levels: Tensor, spec: LutSpec) -> QuantizedWeight:
    """The weight as a checkpoint would hold it: rounded scales first, then the nearest indices."""
    if spec.codebook == "lut":
        scales, levels = normalize(scales, levels)
    stored = as_stored(QuantizedWeight(torch.empty(0), levels, scales))
    S = expand_scales(stored.scales, weight.shape[1])
    return stored._replace(indices=nearest_indices(weight, S, stored.codebook))


def normalize(scales: Scales, levels: Tensor) -> tuple[Scales, Tensor]:
    """The same product with the largest level at magnitude 1 and its size in the scales."""
    size = levels.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    name = "scales" if scales.scales is not None else "rank_gain"
    return scales._replace(**{name: getattr(scales, name) * size}), levels / size


def _start_scales(weight: Tensor, spec: LutSpec) -> Scales:
    groups = absmax_scales(weight, spec.group_size)
    if spec.codebook == "int":
        groups = groups / 2 ** (spec.bits - 1)
    if spec.scale == "group":
        return Scales(scales=groups)
    return low_rank_start(groups.repeat_interleave(spec.group_size, dim=1), spec.rank)


def _learn_levels(
    weight: Tensor, S: Tensor, importance: Tensor, *, num_levels: int, levels: Tensor | None
) -> Tensor:
    # an error of the scaled weight counts S^2 times as much in the weight itself
    values = torch.where(S == 0, 0.0, weight / S).flatten()
    mass = (importance * S**2).flatten()
    values, mass = values.cpu().double().numpy(), mass.cpu().double().numpy()
    if levels is None:
        found = weighted_kmeans(values, mass, num_levels)
    else:
        found = refine_levels(values, mass, levels.cpu().double().numpy())
    return torch.from_numpy(np.ascontiguousarray(found)).float().to(weight.device)
