"""Form and pull back: the two ends of a training step around ordinary matmuls.

`form` writes `W = codebook[indices] * S`; `pull_back` reduces `dW` to the gradients of what learns.
The pull-back is linear in `dW`, so micro-batches add up.

The indices come from a `source`: packed ones, or a latent weight `(O, I)` of any float dtype, whose
index is that of the level nearest to it under the scales (`qat.quant.codebook.latent_indices`).
Scales are taken as they learn, in float32; both functions compute with them rounded to what a
checkpoint stores, which changes nothing where they are rounded already.

Shapes: O out_features, I in_features, G groups per row, C codebook entries, R rank.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from qat.kernels.dispatch import use_triton
from qat.quant.codebook import latent_indices
from qat.quant.pack import Packed
from qat.quant.weight import (
    QuantizedWeight,
    Scales,
    chosen_levels,
    expand_scales,
    round_scales,
)

MOST_LEVELS = 16
"""Levels that a kernel's threads hold."""


def form(
    source: Packed | Tensor,
    codebook: Tensor,
    scales: Scales,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`W = codebook[indices] * S`, `(O, I)`: computed in float32, rounded once to `dtype`.

    The same bits on every device. Written into `out` of that dtype if it is given.
    """
    if out is None:
        out = torch.empty(source.shape, dtype=dtype, device=codebook.device)
    if _by_kernel(codebook):
        from qat.kernels import lut_weight_triton

        lut_weight_triton._form_by_kernel(out, source, codebook, scales)
        return out
    weight, S = _weight_and_scale(source, codebook, scales)
    return out.copy_(chosen_levels(weight) * S)


def pull_back(
    dW: Tensor,
    source: Packed | Tensor,
    codebook: Tensor,
    scales: Scales,
    *,
    wanted: Collection[str],
) -> dict[str, Tensor]:
    """The gradients that `dW` `(O, I)` implies, in float32, of those parts that are `wanted`.

    `wanted` holds names of parts: `codebook` and the fields of `Scales`. With
    `dS = dW * codebook[indices]`: group scales sum `dS` over the group; with `S = A diag(g) B`,
    `dA = (dS B^T) diag(g)`, `dg = sum_o A * (dS B^T)`, `dB = (A diag(g))^T dS`.
    `d_codebook[c]` sums `dW * S` over the places whose index is `c`.
    """
    wants = {
        "wants_codebook": "codebook" in wanted,
        "wants_scales": any(name in wanted for name in scales.present()),
    }
    if not any(wants.values()):
        return {}
    if _by_kernel(codebook):
        from qat.kernels.lut_weight_triton import _reduce_by_kernel

        d_codebook, dS = _reduce_by_kernel(dW, source, codebook, scales, **wants)
    else:
        d_codebook, dS = _reduce(dW, source, codebook, scales, **wants)
    gradients = {} if d_codebook is None else {"codebook": d_codebook}
    if dS is None:
        return gradients
    if scales.scales is not None:
        return gradients | {"scales": dS}
    return gradients | _pull_back_low_rank(dS, round_scales(scales), wanted)


def _by_kernel(codebook: Tensor) -> bool:
    """Whether the Triton kernel computes: not where the levels are many."""
    return use_triton(codebook) and codebook.numel() <= MOST_LEVELS


def _reduce(
    dW: Tensor,
    source: Packed | Tensor,
    codebook: Tensor,
    scales: Scales,
    *,
    wants_codebook: bool,
    wants_scales: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """`d_codebook`, and the gradient of group scales `(O, G)` or else `dS` `(O, I)`."""
    dW = dW.float()
    weight, S = _weight_and_scale(source, codebook, scales)
    d_codebook = dS = None
    if wants_codebook:
        d_codebook = _added_by_level(dW * S, weight)
    if wants_scales:
        dS = dW * chosen_levels(weight)
        if scales.scales is not None:
            dS = dS.view(*scales.scales.shape, -1).sum(-1)
    return d_codebook, dS


def _weight_and_scale(
    source: Packed | Tensor, codebook: Tensor, scales: Scales
) -> tuple[QuantizedWeight, Tensor]:
    scales = round_scales(scales)
    S = expand_scales(scales, source.shape[1])
    is_packed = isinstance(source, Packed)
    indices = source.indices() if is_packed else latent_indices(source, S, codebook)
    return QuantizedWeight(indices, codebook, scales), S


def _added_by_level(dWS: Tensor, weight: QuantizedWeight) -> Tensor:
    """`(C,)`: the sum of `dWS` where each level is chosen.

    In float64, where no order of summation, not even that of atomics, moves the float32 result by
    more than its last bit.
    """
    sums = dWS.new_zeros(dWS.shape[0], weight.codebook.numel(), dtype=torch.float64)
    return sums.scatter_add_(1, weight.indices.long(), dWS.double()).sum(0).float()


def _pull_back_low_rank(dS: Tensor, scales: Scales, wanted: Collection[str]) -> dict[str, Tensor]:
    gradients = {}
    if "scale_in" in wanted:
        gradients["scale_in"] = (scales.scale_out * scales.rank_gain).T @ dS
    if "scale_out" in wanted or "rank_gain" in wanted:
        dSB = dS @ scales.scale_in.T
        both = {"scale_out": dSB * scales.rank_gain, "rank_gain": (scales.scale_out * dSB).sum(0)}
        gradients |= {name: both[name] for name in both if name in wanted}
    return gradients
