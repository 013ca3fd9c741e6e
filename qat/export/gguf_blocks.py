"""Blocks of GGUF: evenly spaced levels and float16 scales in the types of ggml that hold them.

Shapes: O rows, B blocks per row, N weights per block (32, or 256 of the K types).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qat.export.parts import Affine, exact
from qat.quant.spec import LutSpec

SMALL, LARGE = 32, 256


class BlockType(NamedTuple):
    """One type of ggml: `W = d * (code + offset)`, or `d * code + m`."""

    name: str
    size: int
    """Weights per block."""
    offset: int | None
    """Of the codes, where the type has no `m`."""
    pack: Callable[[Tensor], list[Tensor]]
    """From `(n, N)` uint8 codes, already shifted by what the type wants, to columns of bytes."""


def block_type(spec: LutSpec) -> BlockType | None:
    """The smallest type that holds that format exactly; None if there is none."""
    if spec.scale != "group" or spec.codebook == "lut":
        return None
    is_even = spec.codebook == "seq"
    if spec.group_size % LARGE == 0:
        if spec.codebook == "ternary":
            return TQ2_0
        if spec.bits == 2:
            return Q2_K
        if spec.bits == 3 and not is_even:
            return Q3_K
    if spec.group_size % SMALL:
        return None
    if is_even:
        return Q4_1 if spec.bits <= 4 else None
    return next(kind for most, kind in ((4, Q4_0), (5, Q5_0), (8, Q8_0)) if spec.bits <= most)


def to_blocks(name: str, weight: Affine, kind: BlockType) -> Tensor:
    """The rows of a weight in that type, `(O, bytes)` uint8.

    Raises:
        ExportError: a scale is no float16.
    """
    O, I = weight.codes.shape
    repeats = I // weight.scale.shape[1] // kind.size
    d, m = (t.repeat_interleave(repeats, 1).reshape(-1, 1) for t in (weight.scale, weight.bias))
    codes = weight.codes.reshape(-1, kind.size)
    if kind.offset is not None:
        # bias = scale * lowest: `code + lowest` is the integer, which the type counts from `offset`
        lowest = _lowest(weight)
        codes = codes + (lowest - kind.offset)
    parts = _with_scales(kind, codes.to(torch.uint8), _half(name, d), _half(name, m.abs()), m)
    return torch.cat(parts, 1).view(O, -1)


def _lowest(weight: Affine) -> int:
    """The integer that code 0 stands for."""
    some = weight.scale != 0
    return int((weight.bias[some] / weight.scale[some])[0]) if some.any() else 0


def _with_scales(
    kind: BlockType, codes: Tensor, d: Tensor, size_of_m: Tensor, m: Tensor
) -> list[Tensor]:
    """The bytes of blocks in the order of their type."""
    packed, ones = kind.pack(codes), torch.ones_like(codes[:, :1])
    if kind is Q2_K:  # 16 scales and minima of 4 bits, all 1; the minimum is subtracted
        return [(ones * 0x11).repeat(1, 16), *packed, d, size_of_m]
    if kind is Q3_K:  # 16 scales of 6 bits, all 33 = 32 + 1
        return [*packed, (ones * 0x11).repeat(1, 8), (ones * 0xAA).repeat(1, 4), d]
    if kind is TQ2_0:
        return [*packed, d]
    if kind is Q4_1:
        return [d, _half("m", m), *packed]
    return [d, *packed]


def _half(name: str, value: Tensor) -> Tensor:
    """Float16 numbers as two bytes each."""
    return exact(name, value, torch.float16).view(torch.uint8)


def _nibbles(codes: Tensor) -> list[Tensor]:
    """The first half of a block in the lower four bits, the second in the upper."""
    low, high = codes.chunk(2, 1)
    return [(low & 15) | (high & 15) << 4]


def _five_bits(codes: Tensor) -> list[Tensor]:
    """The fifth bits of a block, 32 in a row, then nibbles."""
    bits = (codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)
    return [bits.sum(-1, dtype=torch.uint8), *_nibbles(codes)]


def _quarters(codes: Tensor) -> list[Tensor]:
    """Two bits each: four runs of 32 weights share 32 bytes."""
    runs = (codes & 3).view(-1, 2, 4, 32) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return [runs.sum(2, dtype=torch.uint8).view(-1, 64)]


def _three_bits(codes: Tensor) -> list[Tensor]:
    """The third bits: eight runs of 32 weights share 32 bytes; then the lower two."""
    runs = (codes >> 2).view(-1, 8, 32) << torch.arange(8, dtype=torch.uint8)[:, None]
    return [runs.sum(1, dtype=torch.uint8), *_quarters(codes)]


Q4_0 = BlockType("Q4_0", SMALL, -8, _nibbles)
Q4_1 = BlockType("Q4_1", SMALL, None, _nibbles)
Q5_0 = BlockType("Q5_0", SMALL, -16, _five_bits)
Q8_0 = BlockType("Q8_0", SMALL, 0, lambda codes: [codes])
Q2_K = BlockType("Q2_K", LARGE, None, _quarters)
Q3_K = BlockType("Q3_K", LARGE, -4, _three_bits)
TQ2_0 = BlockType("TQ2_0", LARGE, -1, _quarters)
