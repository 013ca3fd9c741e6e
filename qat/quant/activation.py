"""How the input of a quantized linear is rounded before the product: per token, or per tensor.

Everything runs in float32 and is rounded to the dtype of the input at the end. Divisions are of
one number a token, or a tensor, in float64 and then rounded to float32, which is the float32 that
is nearest: a compiler divides float32 less exactly, and other bits would come out.

Shapes: a token is the last dimension, `(..., I)`; I in_features.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.quant.spec import ActivationKind

LEVELS = 127
"""The largest level of symmetric int8; -128 is not used."""
LOWEST, HIGHEST = -128, 127
"""Levels of int8, asymmetric or static, where engines saturate."""
LARGEST_E4M3 = 448.0
"""The largest finite number of `torch.float8_e4m3fn`."""
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
"""Of a token of zeros, as in torchao."""
HALF_DROPS = 13
"""Bits of a float32's mantissa that a float16 has no place for."""


class Levels(NamedTuple):
    """An input as levels: it stands for `(levels - zero) * scale`; all float32."""

    levels: Tensor
    """`(..., I)`: whole numbers, or numbers that E4M3 holds."""
    scale: Tensor
    """`(..., 1)`, or one number."""
    zero: Tensor | None = None
    """`(..., 1)` whole numbers."""

    def values(self) -> Tensor:
        """What the levels stand for, `(..., I)` float32."""
        shifted = self.levels if self.zero is None else self.levels - self.zero
        return shifted * self.scale


def token_levels(x: Tensor, kind: ActivationKind) -> Levels:
    """Each token of `x` `(..., I)` in levels of its own scale; no gradient.

    - int8: `scale = amax / 127`, `levels = round(x / scale)`, as vLLM's kernels and Q8_0 of GGUF.
    - int8-asymmetric: with `low = min(amin, 0)` and `high = max(amax, 0)`, `scale = (high - low) /
      255`, `zero = -128 - round(low / scale)`, `levels = round(x / scale) + zero`, both clamped to
      -128 ... 127: torchao 0.18, `Int8DynamicActivationIntxWeightConfig`, to the bit in float32.
    - fp8: `scale = amax / 448`, `levels = (x / scale)` rounded to E4M3.

    Rounding is to nearest even; `x / scale` is `x * (1 / scale)`, as torchao has it.
    """
    x = x.detach().float()
    if kind == "int8-asymmetric":
        low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
        scale = _quotient(high - low, HIGHEST - LOWEST).clamp_min(SMALLEST_SCALE)
        zero = (
            LOWEST - _quotient(low, scale).round()
        )  # at most 255 steps below 0, as `scale` has it
        levels = ((x * _inverse(scale)).round() + zero).clamp(LOWEST, HIGHEST)
        return Levels(levels, scale, zero)
    largest = LARGEST_E4M3 if kind == "fp8" else LEVELS
    amax = x.abs().amax(-1, keepdim=True)
    scale = _quotient(amax, largest).clamp_min(SMALLEST_SCALE)
    scaled = (x * _inverse(scale)).clamp(-largest, largest)
    is_float = kind == "fp8"
    return Levels(scaled.to(torch.float8_e4m3fn).float() if is_float else scaled.round(), scale)


def quantize_tokens(x: Tensor, kind: ActivationKind) -> Tensor:
    """`x` `(..., I)` as its levels give it, in its own dtype; the gradient passes unchanged.

    Straight-through (arXiv:1308.3432): the range is the token's own, so that nothing is clipped.
    """
    return token_levels(x, kind).values().to(x.dtype) + (x - x.detach())


def static_scale(scale: Tensor, bits: int) -> Tensor:
    """A static scale in float32 as it is stored: of 16 bits with the 11 significant ones of a half.

    From 2**-14 to 65504 that is `scale.half().float()`, found by its bits: a compiler drops a cast
    that another one takes back. No gradient.
    """
    scale = scale.detach().float()
    if bits == 32:
        return scale
    whole = scale.view(torch.int32)
    to_even = (1 << HALF_DROPS - 1) - 1 + (whole >> HALF_DROPS & 1)
    return (whole + to_even >> HALF_DROPS << HALF_DROPS).view(torch.float32)


def quantize_static(x: Tensor, scale: Tensor, bits: int = 32) -> Tensor:
    """`clamp(round(x / s), -128, 127) * s` `(..., I)` in the dtype of `x`, `s = static_scale(scale,
    bits)`.

    `scale` is one float32 number. Learned step size quantization (arXiv:1902.08153, equations 1 to
    3 and section 2.2): the gradient passes to `x` where it is inside the range; that of `scale` is
    `round(x / scale) - x / scale` inside, the outermost level outside, summed and times
    `1 / sqrt(127 I)`, so that it is of the size of a weight's gradient.
    """
    scale = scale.float()
    small = scale * (LEVELS * x.shape[-1]) ** -0.5
    # the value of the stored scale, to the bit, with a smaller gradient
    size = (static_scale(scale, bits) + (small - small.detach())).clamp_min(SMALLEST_SCALE)
    scaled = (x.float() * _inverse(size)).clamp(LOWEST, HIGHEST)
    levels = scaled.detach().round() + (scaled - scaled.detach())
    return (levels * size).to(x.dtype)


def _quotient(numerator: Tensor, denominator: Tensor | float) -> Tensor:
    """The float32 nearest to the quotient."""
    return (numerator.double() / denominator).float()


def _inverse(scale: Tensor) -> Tensor:
    """The float32 nearest to `1 / scale`."""
    return scale.double().reciprocal().float()
