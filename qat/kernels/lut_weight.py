"""Form and pull back: the two ends of a training step around ordinary matmuls.

`form` writes `W = codebook[indices] * S`; `pull_back` reduces `dW` to the gradients of what learns.
The pull-back is linear in `dW`, so micro-batches add up.

Shapes: O out_features, I in_features, G groups per row, C codebook entries, R rank.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from qat.quant.weight import QuantizedWeight, Scales, chosen_levels, dequantize, expand_scales


def form(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """`W = codebook[indices] * S`, `(O, I)`: computed in float32, rounded once to `dtype`."""
    return dequantize(weight).to(dtype)


def pull_back(dW: Tensor, weight: QuantizedWeight, wanted: Collection[str]) -> dict[str, Tensor]:
    """The gradients that `dW` `(O, I)` implies, in float32, of those parts that are `wanted`.

    `wanted` holds names of parts: `codebook` and the fields of `Scales`. With
    `dS = dW * codebook[indices]`: group scales sum `dS` over the group; with `S = A diag(g) B`,
    `dA = (dS B^T) diag(g)`, `dg = sum_o A * (dS B^T)`, `dB = (A diag(g))^T dS`.
    `d_codebook[c]` sums `dW * S` over the places whose index is `c`.
    """
    dW = dW.float()
    gradients = {}
    if "codebook" in wanted:
        dWS = dW * expand_scales(weight.scales, dW.shape[1])
        gradients["codebook"] = _sum_by_level(dWS, weight)
    if any(name in wanted for name in Scales._fields):
        gradients |= _pull_back_scales(dW * chosen_levels(weight), weight.scales, wanted)
    return gradients


def _sum_by_level(dWS: Tensor, weight: QuantizedWeight) -> Tensor:
    """`(C,)`: the sum of `dWS` where each level is chosen.

    In float64, where no order of summation, not even that of atomics, moves the float32 result by
    more than its last bit.
    """
    sums = dWS.new_zeros(dWS.shape[0], weight.codebook.numel(), dtype=torch.float64)
    return sums.scatter_add_(1, weight.indices.long(), dWS.double()).sum(0).float()


def _pull_back_scales(dS: Tensor, scales: Scales, wanted: Collection[str]) -> dict[str, Tensor]:
    if scales.scales is not None:
        O, G = scales.scales.shape
        return {"scales": dS.view(O, G, -1).sum(-1)}
    gradients = {}
    if "scale_in" in wanted:
        gradients["scale_in"] = (scales.scale_out * scales.rank_gain).T @ dS
    if "scale_out" in wanted or "rank_gain" in wanted:
        dSB = dS @ scales.scale_in.T
        both = {"scale_out": dSB * scales.rank_gain, "rank_gain": (scales.scale_out * dSB).sum(0)}
        gradients |= {name: both[name] for name in both if name in wanted}
    return gradients
