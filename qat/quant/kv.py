"""Keys and values of attention in 8 or 4 bits: what a cache of them holds, and training computes.

Each half of a head of a token is a group: a scale, a zero and a code of `bits` bits for each number
(per token and asymmetric, as KIVI quantizes values: arXiv:2402.02750, section 3.1). With halves of
a head's channels `h`, levels `L = 2**bits - 1` and `f = 2**(8 - bits)`:

    scale[h] = ceil_8((max(x[h], 0) - min(x[h], 0)) / L)      5 bits of exponent, 3 of mantissa
    zero[h]  = round(-min(x[h], 0) / scale[h] * f)            8 bits
    code     = round(x / scale[h] + zero[h] / f)              in 0 ... L
    x        ~ (code - zero[h] / f) * scale[h]                exact in float32

So a head of D numbers takes `D * bits / 8 + 4` bytes. A scale is rounded up, so that no number is
cut off. A number beyond 65,504, where float16 ends, is kept as that; a zero or a code by which a
number would be read back as one beyond it is one lower.

With 4 bits the KL of stories15M to itself is 0.022 nats so; with as many bytes spent on symmetric
codes and a float16 scale for each half 0.028 to 0.036, on a float16 scale and minimum for each head
0.034.

Shapes: D width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

EXPONENT = 18
"""The smallest scale is `2**-EXPONENT`; the largest is 15,360: 15 of them hold the 131,008 from one
end of float16 to the other."""
LARGEST = 65504.0
"""The largest number that is kept: float16's."""
OFFSET = (127 - EXPONENT) << 3
"""What the upper 12 bits of a float32 are more than a scale's byte."""
REST = 20
"""Bits of a float32 below those."""
Index = Tensor | slice | int
"""Of one dimension."""


class PackedHeads(NamedTuple):
    """Keys or values as a cache keeps them."""

    codes: Tensor
    """`(..., D)` uint8, or `(..., D / 2)`: of 4 bits, the first half is in the lower bits."""
    steps: Tensor
    """`(...)` int32: from the lowest byte on, scale and zero of the first half and the second."""
    bits: int
    dtype: torch.dtype
    """What they are read as."""

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return self.codes.nbytes + self.steps.nbytes

    @property
    def width(self) -> int:
        """D."""
        return self.codes.shape[-1] * 8 // self.bits

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], bits: int, dtype: torch.dtype, device: torch.device
    ) -> "PackedHeads":
        """Room for heads of `shape` `(..., D)`, which are zeros so far."""
        *places, width = shape
        codes = torch.zeros(*places, width * bits // 8, dtype=torch.uint8, device=device)
        return cls(codes, codes.new_zeros(places, dtype=torch.int32), bits, dtype)

    def at(self, *places: Index) -> "PackedHeads":
        """Those at an index of all dimensions but the last."""
        return self._replace(codes=self.codes[places], steps=self.steps[places])

    def put(self, heads: Tensor, *places: Index) -> None:
        """Quantize `heads` and keep them at an index of all dimensions but the last."""
        packed = quantize_heads(heads.to(self.dtype), self.bits)
        self.codes[places], self.steps[places] = packed.codes, packed.steps


def quantize_heads(x: Tensor, bits: int) -> PackedHeads:
    """Heads `(..., D)` as a cache of so many bits keeps them; see the equations above."""
    code, octet, zero = _quantized(x, bits)
    code = code.to(torch.uint8)
    packed = code.flatten(-2) if bits == 8 else code[..., 0, :] | code[..., 1, :] << 4
    low, high = (octet | zero << 8).unbind(-1)
    return PackedHeads(packed, low | high << 16, bits, x.dtype)


def dequantize_heads(packed: PackedHeads) -> Tensor:
    """What attention computes with, `(..., D)` in `packed.dtype`."""
    codes, bits = packed.codes, packed.bits
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    both = torch.stack([packed.steps, packed.steps >> 16], -1)
    code = codes.unflatten(-1, (2, -1))
    return _dequantized(code, both & 255, both >> 8 & 255, bits).flatten(-2).to(packed.dtype)


def fake_quantize_heads(x: Tensor, bits: int) -> Tensor:
    """`dequantize_heads(quantize_heads(x, bits))` to the bit; the gradient passes unchanged.

    Straight through (arXiv:1308.3432), in the dtype of `x` `(..., D)`.
    """
    hard = _dequantized(*_quantized(x, bits), bits).flatten(-2).to(x.dtype)
    return hard + (x - x.detach())


def _quantized(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `(..., 2, D / 2)` int32; a scale's byte and the zero of each half, `(..., 2)` int32.

    They do not depend on how a device rounds a division, which compiled code leaves open: what it
    gives is compared with products that float32 holds exactly.
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
    """`floor(x / scale + zero + 1 / 2)`, whichever way the division is rounded."""
    code = (x / scale + zero + 0.5).floor()
    code = code + ((code + 0.5 - zero) * scale <= x).float()
    return code - ((code - 0.5 - zero) * scale > x).float()


def _dequantized(code: Tensor, octet: Tensor, zero: Tensor, bits: int) -> Tensor:
    """`(..., 2, D / 2)` float32: a code of 8 bits times a mantissa of 4, which is exact."""
    scale = _scale(octet)
    return code * scale[..., None] - (zero * scale / 2 ** (8 - bits))[..., None]


def _scale(octet: Tensor) -> Tensor:
    return ((octet + OFFSET) << REST).view(torch.float32)
