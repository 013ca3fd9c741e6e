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
    layout: Callable[[Tensor, Tensor, Tensor], list[Tensor]]
    """Columns of bytes from `(n, N)` uint8 codes and the bytes of `d` and `m`, `(n, 2)` each."""


def block_type(spec: LutSpec) -> BlockType | None:
    """The smallest type that holds that format exactly; None if there is none."""
    if spec.scale != "group" or spec.codebook == "lut":
        return None
    if spec.group_size % LARGE == 0:
        large = _large_type(spec)
        if large is not None:
            return large
    if spec.group_size % SMALL:
        return None
    if spec.codebook == "seq":
        return Q4_1 if spec.bits <= 4 else None
    return next(kind for most, kind in ((4, Q4_0), (5, Q5_0), (8, Q8_0)) if spec.bits <= most)


def _large_type(spec: LutSpec) -> BlockType | None:
    """The type of blocks of 256 for that format."""
    if spec.codebook == "ternary":
        return TQ2_0
    if spec.bits == 2:
        return Q2_K
    return Q3_K if spec.bits == 3 and spec.codebook == "int" else None


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
        codes, m = codes + (_lowest(weight) - kind.offset), torch.zeros_like(m)
    parts = kind.layout(codes.to(torch.uint8), _half(name, d), _half(name, m))
    return torch.cat(parts, 1).view(O, -1)


def _lowest(weight: Affine) -> int:
    """The integer that code 0 stands for."""
    some = weight.scale != 0
    return int((weight.bias[some] / weight.scale[some])[0]) if some.any() else 0


def _half(name: str, value: Tensor) -> Tensor:
    """Float16 numbers as two bytes each."""
    return exact(name, value, torch.float16, has_choice=False).view(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    """The first half of a block in the lower four bits, the second in the upper."""
    low, high = codes.chunk(2, 1)
    return (low & 15) | (high & 15) << 4


def _fifth_bits(codes: Tensor) -> Tensor:
    """The fifth bits of a block, 32 in a row."""
    bits = (codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)
    return bits.sum(-1, dtype=torch.uint8)


def _quarters(codes: Tensor) -> Tensor:
    """Two bits each: four runs of 32 weights share 32 bytes."""
    runs = (codes & 3).view(-1, 2, 4, 32) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return runs.sum(2, dtype=torch.uint8).view(-1, 64)


def _third_bits(codes: Tensor) -> Tensor:
    """The third bits: eight runs of 32 weights share 32 bytes."""
    runs = (codes >> 2).view(-1, 8, 32) << torch.arange(8, dtype=torch.uint8)[:, None]
    return runs.sum(1, dtype=torch.uint8)


def _q2_k(codes: Tensor, d: Tensor, m: Tensor) -> list[Tensor]:
    """16 scales and minima of 4 bits, all 1; then codes; the minimum is subtracted."""
    negative = m ^ torch.tensor([0, 0x80], dtype=torch.uint8)
    return [_repeated(codes, 0x11, 16), _quarters(codes), d, negative]


def _q3_k(codes: Tensor, d: Tensor, m: Tensor) -> list[Tensor]:
    """Codes, then 16 scales of 6 bits, all 33, which stand for 1."""
    scales = [_repeated(codes, 0x11, 8), _repeated(codes, 0xAA, 4)]
    return [_third_bits(codes), _quarters(codes), *scales, d]


def _repeated(codes: Tensor, value: int, count: int) -> Tensor:
    """`(n, count)` of one byte."""
    return codes.new_full((codes.shape[0], count), value)


Q4_0 = BlockType("Q4_0", SMALL, -8, lambda codes, d, m: [d, _nibbles(codes)])
Q4_1 = BlockType("Q4_1", SMALL, None, lambda codes, d, m: [d, m, _nibbles(codes)])
Q5_0 = BlockType("Q5_0", SMALL, -16, lambda codes, d, m: [d, _fifth_bits(codes), _nibbles(codes)])
Q8_0 = BlockType("Q8_0", SMALL, 0, lambda codes, d, m: [d, codes])
Q2_K = BlockType("Q2_K", LARGE, None, _q2_k)
Q3_K = BlockType("Q3_K", LARGE, -4, _q3_k)
TQ2_0 = BlockType("TQ2_0", LARGE, -1, lambda codes, d, m: [_quarters(codes), d])
