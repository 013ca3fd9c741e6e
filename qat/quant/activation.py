"""Quantization of the inputs of a linear before its product, with a scale per token or per tensor.

All arithmetic runs in float32; the result is rounded to the dtype of the input at the end. Divisors
and quotients are one number per token or per tensor, so they are computed in float64 and rounded to
the nearest float32: compilers divide float32 less exactly, which would change bits.

Shapes: a token is the last dimension, `(..., I)`; I in_features.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.quant.spec import ActivationKind

LEVELS = 127  # the largest level of symmetric int8; -128 is not used
LOWEST, HIGHEST = -128, 127  # int8 when asymmetric or static, where engines saturate
LARGEST_E4M3 = 448.0  # the largest finite number of `torch.float8_e4m3fn`
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal  # of zeros alone, as in torchao
HALF_DROPS = 13  # bits of a float32 mantissa that a float16 cannot hold


class Levels(NamedTuple):
    """Quantized levels of an input, which represent `(levels - zero) * scale`; all float32."""

    levels: Tensor  # `(..., I)`: whole numbers, or numbers that E4M3 can represent
    scale: Tensor  # `(..., 1)`, or a scalar
    zero: Tensor | None = None  # the zero point, whole numbers `(..., 1)`; None for symmetric kinds

    def values(self) -> Tensor:
        """Return the dequantized input, `(..., I)` float32."""
        shifted = self.levels if self.zero is None else self.levels - self.zero
        return shifted * self.scale


def token_levels(x: Tensor, kind: ActivationKind) -> Levels:
    """Quantize each token of `x` `(..., I)` with a scale of its own; no gradient.

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
        zero = LOWEST - _quotient(low, scale).round()  # `scale` keeps it at most 255 steps below 0
        levels = ((x * _inverse(scale)).round() + zero).clamp(LOWEST, HIGHEST)
        return Levels(levels, scale, zero)
    largest = LARGEST_E4M3 if kind == "fp8" else LEVELS
    amax = x.abs().amax(-1, keepdim=True)
    scale = _quotient(amax, largest).clamp_min(SMALLEST_SCALE)
    scaled = (x * _inverse(scale)).clamp(-largest, largest)
    is_float = kind == "fp8"
    return Levels(scaled.to(torch.float8_e4m3fn).float() if is_float else scaled.round(), scale)


def quantize_tokens(x: Tensor, kind: ActivationKind) -> Tensor:
    """Fake-quantize `x` `(..., I)` per token in its own dtype; the gradient passes unchanged.

    Straight-through (arXiv:1308.3432). The range is measured on the token itself, so nothing is
    clipped.
    """
    return token_levels(x, kind).values().to(x.dtype) + (x - x.detach())


def static_scale(scale: Tensor, bits: int) -> Tensor:
    """Return a static scale in float32 as stored: 16 bits keep the 11 significant bits of a half.

    From 2**-14 to 65504 this equals `scale.half().float()`. It is computed on the bit pattern
    because a compiler may drop a cast that a second cast reverses. No gradient.
    """
    scale = scale.detach().float()
    if bits == 32:
        return scale
    whole = scale.view(torch.int32)
    to_even = (1 << HALF_DROPS - 1) - 1 + (whole >> HALF_DROPS & 1)
    return (whole + to_even >> HALF_DROPS << HALF_DROPS).view(torch.float32)


def quantize_static(x: Tensor, scale: Tensor, bits: int = 32) -> Tensor:
    """Fake-quantize `x` `(..., I)` with one learned scale.

    Returns `clamp(round(x / s), -128, 127) * s` in the dtype of `x`, where `s = static_scale(scale,
    bits)`; `scale` is one float32 number.

    Learned step size quantization (arXiv:1902.08153, equations 1 to 3 and section 2.2): the
    gradient passes to `x` where it is inside the range. The gradient of `scale` is `round(x /
    scale) - x / scale` inside the range and the outermost level outside, summed and multiplied by
    `1 / sqrt(127 I)` so that its size matches a weight's gradient.
    """
    scale = scale.float()
    small = scale * (LEVELS * x.shape[-1]) ** -0.5
    # the value is the stored scale to the bit, the gradient is that of `small`
    size = (static_scale(scale, bits) + (small - small.detach())).clamp_min(SMALLEST_SCALE)
    scaled = (x.float() * _inverse(size)).clamp(LOWEST, HIGHEST)
    levels = scaled.detach().round() + (scaled - scaled.detach())
    return (levels * size).to(x.dtype)


def _quotient(numerator: Tensor, denominator: Tensor | float) -> Tensor:
    """Return the float32 nearest to the exact quotient."""
    return (numerator.double() / denominator).float()


def _inverse(scale: Tensor) -> Tensor:
    return scale.double().reciprocal().float()
