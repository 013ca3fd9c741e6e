"""Form and pull back: the two ends of a training step around ordinary matmuls.

`form` writes `W = codebook[indices] * S`; `pull_back` reduces `dW` to the gradients of what learns.
The pull-back is linear in `dW`, so micro-batches add up.

Shapes: O out_features, I in_features, G groups per row, C codebook entries, R rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.quant.weight import QuantizedWeight, Scales, dequantize, expand_scales


class PulledBack(NamedTuple):
    """Gradients of what a linear's weight is made of, in float32."""

    codebook: Tensor
    scales: Scales


def form(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """`W = codebook[indices] * S`, `(O, I)`: computed in float32, rounded once to `dtype`."""
    return dequantize(weight).to(dtype)


def pull_back(dW: Tensor, weight: QuantizedWeight) -> PulledBack:
    """The gradients of the codebook and the scales that `dW` `(O, I)` implies.

    `dS = dW * codebook[indices]`; group scales sum it over the group; with `S = A diag(g) B`:
    `dA = (dS B^T) diag(g)`, `dg = sum_o A * (dS B^T)`, `dB = (A diag(g))^T dS`.
    `d_codebook[c]` sums `dW * S` over the places whose index is `c`.
    """
    dW = dW.float()
    index = weight.indices.int()
    dS = dW * weight.codebook[index]
    S = expand_scales(weight.scales, index.shape[1])
    # one masked sum per level: deterministic on every device, unlike a scatter
    products = dW * S
    d_codebook = torch.stack(
        [torch.where(index == c, products, 0.0).sum() for c in range(weight.codebook.numel())]
    )
    return PulledBack(d_codebook, _pull_back_scales(dS, weight.scales))


def _pull_back_scales(dS: Tensor, scales: Scales) -> Scales:
    if scales.scales is not None:
        O, G = scales.scales.shape
        return Scales(scales=dS.view(O, G, -1).sum(-1))
    dSB = dS @ scales.scale_in.T
    gained = scales.scale_out * scales.rank_gain
    return Scales(
        scale_out=dSB * scales.rank_gain,
        rank_gain=(scales.scale_out * dSB).sum(0),
        scale_in=gained.T @ dS,
    )
