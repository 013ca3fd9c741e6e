"""Cases for `qat.kernels.lut_weight` and its textbook form, shared by the tests of every path."""

import torch
from quantized import SPECS, nearest_e5m3, random_codebook, random_indices, random_scales
from torch import Tensor

from qat.quant.spec import LutSpec
from qat.quant.weight import PackedIndices, Scales, pack

ODD_SPECS = {
    "lut1_odd": LutSpec(bits=1, group_size=7),
    "lut2_odd": LutSpec(bits=2, group_size=3),
    "lut3_odd": LutSpec(bits=3, group_size=5),
    "lut4_odd": LutSpec(bits=4, group_size=1),
    "lut3_g24": LutSpec(bits=3, group_size=24),
    "lut2_g40": LutSpec(bits=2, group_size=40),
    "ternary_odd": LutSpec(bits=2, codebook="ternary", group_size=9),
    "lut3_odd_s8": LutSpec(bits=3, group_size=5, scale_bits=8),
    "lut3_odd_r5": LutSpec(bits=3, scale="low_rank", rank=5, group_size=11),
    "lut1_odd_r2": LutSpec(bits=1, scale="low_rank", rank=2, group_size=7),
    "lut2_odd_s32": LutSpec(bits=2, group_size=3, scale_bits=32),
    "pairs5_odd": LutSpec(bits=5, vector_size=2, group_size=6),
    "fours12": LutSpec(bits=12, vector_size=4, group_size=12, scale_bits=8),
    "lut4_odd_r3_s32": LutSpec(bits=4, scale="low_rank", rank=3, group_size=7, scale_bits=32),
}
"""Group sizes that fill no bytes or are no powers of two; rows that end within a byte."""

ALL_SPECS = {**SPECS, **ODD_SPECS}
SOURCES = ("packed", "float32", "bfloat16")


def random_parts(
    O: int, I: int, spec: LutSpec, source: str
) -> tuple[PackedIndices | Tensor, Tensor, Scales]:
    """Source, codebook and scales: scales not rounded yet, some zero; a latent source has ties.

    Levels lie as training may leave them, in any order. Codewords are rounded, as their formats
    have them.
    """
    d = spec.vector_size
    codebook = random_codebook(spec)[torch.randperm(spec.num_levels)]
    codebook = codebook.half().float() if spec.vector_size > 1 else codebook
    scales = random_scales(O, I, spec)
    next(iter(scales.present().values())).view(-1)[::5] = 0
    if source == "packed":
        octets = pack(random_indices(O, I, spec), spec.bits)
        return PackedIndices(octets, spec.bits, I, d), codebook, scales
    latent = torch.randn(O, I) * 0.1
    if spec.scale == "group" and spec.vector_size == 1:
        levels = codebook.sort().values
        middles = ((levels[1:] + levels[:-1]) / 2).repeat(O * I)[: O * I].view(O, I)
        tied = middles * stored(scales)["scales"].repeat_interleave(spec.group_size, 1)
        latent = torch.where(torch.rand(O, I) < 0.3, tied, latent)
    return latent.to(getattr(torch, source)), codebook, scales


def chosen(source: PackedIndices | Tensor, codebook: Tensor, scales: Scales) -> Tensor:
    """The index of each weight or vector, int64, by trying every one for a latent source.

    The lower of two levels that are equally near: with `float32` division, as is defined. The first
    of two codewords, in float64.
    """
    if isinstance(source, PackedIndices):
        return source.indices().long()
    S = textbook_scale({n: t.float() for n, t in stored(scales).items()}, source.shape[1])
    if codebook.dim() > 1:
        shape = (len(source), -1, 1, codebook.shape[1])
        w, s = source.double().view(shape), S.double().view(shape)
        return (w - s * codebook.double()).pow(2).sum(-1).argmin(-1)
    scaled = torch.where(S == 0, torch.zeros(()), source.float() / S)
    levels, order = codebook.sort()
    middles = (levels[1:] + levels[:-1]) / 2
    return order[(scaled[..., None] > middles).sum(-1)]


def stored(scales: Scales) -> dict[str, Tensor]:
    """Every scale tensor as a checkpoint holds it, by name."""
    if scales.bits == 8:
        return {"scales": nearest_e5m3(scales.scales)}
    kept = scales.present() if scales.bits == 32 else {"rank_gain"}
    rounded = {n: t if n in kept else t.half() for n, t in scales.present().items()}
    return {name: tensor.float() for name, tensor in rounded.items()}


def textbook_scale(parts: dict[str, Tensor], I: int) -> Tensor:
    """`S`, written out, with gradients."""
    if "scales" in parts:
        return parts["scales"][:, torch.arange(I) // (I // parts["scales"].shape[1])]
    S = 0
    for r in range(len(parts["rank_gain"])):
        column = parts["scale_out"][:, r] * parts["rank_gain"][r]
        S = S + column[:, None] * parts["scale_in"][r]
    return S


def gradients(
    indices: Tensor, codebook: Tensor, scales: Scales, dW: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight and all gradients by autograd, in the dtype of `dW`."""
    tensors = {"codebook": codebook, **stored(scales)}
    parts = {name: t.to(dW.dtype, copy=True).requires_grad_() for name, t in tensors.items()}
    W = parts["codebook"][indices].flatten(1) * textbook_scale(parts, dW.shape[1])
    W.backward(dW)
    return W.detach(), {name: part.grad for name, part in parts.items()}
