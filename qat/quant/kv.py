"""Quantization of attention keys and values to 8 or 4 bits, for the cache and for training.

Each half of a head of a token is a group: it has a scale, a zero, and a code of `bits` bits for
each number (per token and asymmetric, as KIVI quantizes values: arXiv:2402.02750, section 3.1).
With `h` the halves of a head's channels, `L = 2**bits - 1` levels and `f = 2**(8 - bits)`:

    scale[h] = ceil_8((max(x[h], 0) - min(x[h], 0)) / L)      5 bits of exponent, 3 of mantissa
    zero[h]  = round(-min(x[h], 0) / scale[h] * f)            8 bits
    code     = round(x / scale[h] + zero[h] / f)              in 0 ... L
    x        ~ (code - zero[h] / f) * scale[h]                exact in float32

So a head of D numbers takes `D * bits / 8 + 4` bytes. Scales are rounded up, so that no number is
clipped. Numbers beyond 65,504, the float16 limit, are clamped to it; a zero or a code that would
dequantize to a number beyond the limit is lowered by one.

With 4 bits the KL of stories15M to itself is 0.022 nats. With the same number of bytes, symmetric
codes and a float16 scale per half give 0.028 to 0.036, and a float16 scale and minimum per head
give 0.034.

Shapes: D width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

EXPONENT = 18
"""The smallest scale is `2**-EXPONENT`. The largest is 15,360: 15 of them cover 131,008, the range
of float16."""
LARGEST = 65504.0  # the largest number that is kept, the maximum of float16
OFFSET = (127 - EXPONENT) << 3  # from the upper 12 bits of a float32 to the byte of a scale
REST = 20  # bits of a float32 below those upper 12
Index = Tensor | slice | int  # an index of one dimension


class PackedHeads(NamedTuple):
    """Keys or values as a cache stores them."""

    codes: Tensor
    """`(..., D)` uint8; with 4 bits `(..., D / 2)`, the first half of a head in the lower bits."""
    steps: Tensor
    """`(...)` int32: from the lowest byte on, the scale and zero of the first half and of the
    second."""
    bits: int
    dtype: torch.dtype  # the dtype of dequantized heads

    @property
    def nbytes(self) -> int:
        """Bytes of codes and steps together."""
        return self.codes.nbytes + self.steps.nbytes

    @property
    def width(self) -> int:
        """D, the number of channels of a head."""
        return self.codes.shape[-1] * 8 // self.bits

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], bits: int, dtype: torch.dtype, device: torch.device
    ) -> "PackedHeads":
        """Allocate storage for heads of `shape` `(..., D)`, filled with zeros."""
        *places, width = shape
        codes = torch.zeros(*places, width * bits // 8, dtype=torch.uint8, device=device)
        return cls(codes, codes.new_zeros(places, dtype=torch.int32), bits, dtype)

    def at(self, *places: Index) -> "PackedHeads":
        """Return the heads at an index of all dimensions but the last."""
        return self._replace(codes=self.codes[places], steps=self.steps[places])

    def put(self, heads: Tensor, *places: Index) -> None:
        """Quantize `heads` and store them at an index of all dimensions but the last."""
        packed = quantize_heads(heads.to(self.dtype), self.bits)
        self.codes[places], self.steps[places] = packed.codes, packed.steps


def quantize_heads(x: Tensor, bits: int) -> PackedHeads:
    """Quantize heads `(..., D)` to `bits` bits by the equations of the module docstring."""
    code, octet, zero = _quantized(x, bits)
    code = code.to(torch.uint8)
    packed = code.flatten(-2) if bits == 8 else code[..., 0, :] | code[..., 1, :] << 4
    low, high = (octet | zero << 8).unbind(-1)
    return PackedHeads(packed, low | high << 16, bits, x.dtype)


def dequantize_heads(packed: PackedHeads) -> Tensor:
    """Return what attention computes with, `(..., D)` in `packed.dtype`."""
    codes, bits = packed.codes, packed.bits
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    both = torch.stack([packed.steps, packed.steps >> 16], -1)
    code = codes.unflatten(-1, (2, -1))
    return _dequantized(code, both & 255, both >> 8 & 255, bits).flatten(-2).to(packed.dtype)


def fake_quantize_heads(x: Tensor, bits: int) -> Tensor:
    """Return `dequantize_heads(quantize_heads(x, bits))` to the bit; the gradient passes unchanged.

    Straight-through (arXiv:1308.3432), in the dtype of `x` `(..., D)`.
    """
    hard = _dequantized(*_quantized(x, bits), bits).flatten(-2).to(x.dtype)
    return hard + (x - x.detach())


def _quantized(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes `(..., 2, D / 2)` and each half's scale byte and zero `(..., 2)`, all int32.

    The results do not depend on how a device rounds a division, which compiled code leaves open:
    each quotient is corrected by comparison with products that float32 holds exactly.
    """
    levels, fine = 2**bits - 1, 2 ** (8 - bits)
    halves = x.detach().float().clamp(-LARGEST, LARGEST).unflatten(-1, (2, -1))
    low, high = halves.amin(-1).clamp_max(0.0), halves.amax(-1).clamp_min(0.0)
    span = high - low
    octet = (((span / levels).view(torch.int32) + (1 << REST) - 1) >> REST) - OFFSET
    is_short, is_long = _scale(octet) * levels < span, _scale(octet - 1) * levels >= span
    octet = (octet + is_short.int() - is_long.int()).clamp_min(0)
    scale = _scale(octet)
    zero = _nearest(low * -fine, scale, torch.zeros_like(low))
    zero = zero - (zero * scale > LARGEST * fine).float()
    scale, shift = scale[..., None], (zero / fine)[..., None]
    code = _nearest(halves, scale, shift).clamp(0.0, float(levels))
    code = code - ((code - shift) * scale > LARGEST).float()
    return code.int(), octet, zero.int()


def _nearest(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return `floor(x / scale + zero + 1 / 2)`, however the device rounds the division."""
    code = (x / scale + zero + 0.5).floor()
    code = code + ((code + 0.5 - zero) * scale <= x).float()
    return code - ((code - 0.5 - zero) * scale > x).float()


def _dequantized(code: Tensor, octet: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return `(..., 2, D / 2)` float32: an 8-bit code times a 4-bit mantissa, which is exact."""
    scale = _scale(octet)
    return code * scale[..., None] - (zero * scale / 2 ** (8 - bits))[..., None]


def _scale(octet: Tensor) -> Tensor:
    return ((octet + OFFSET) << REST).view(torch.float32)
