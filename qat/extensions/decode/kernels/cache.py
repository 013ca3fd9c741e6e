"""The key-value cache that attention of new tokens reads, as numbers or packed.

Its kernel functions quantize new heads and dequantize packed ones.

Shapes: B sequences, J key heads, N positions of the cache, D width of a head.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton
from qat.quant.kv import LARGEST, OFFSET, REST, Index, PackedHeads, dequantize_heads

EVERY = slice(None)
"""The index of all elements along a dimension of a cache."""


class Cache(NamedTuple):
    """Keys and values of one layer, as numbers or packed."""

    keys: Tensor | PackedHeads
    """`(B, J, N, D)`, rotated."""
    values: Tensor | PackedHeads
    """`(B, J, N, D)`."""

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        bits: int | None = None,
    ) -> Self:
        """Allocate zeros of `shape` `(B, J, N, D)`; packed in `bits` bits if given."""
        if bits is None:
            return cls(*(torch.zeros(shape, dtype=dtype, device=device) for _ in cls._fields))
        return cls(*(PackedHeads.empty(shape, bits, dtype, device) for _ in cls._fields))

    @property
    def shape(self) -> tuple[int, ...]:
        """`(B, J, N, D)`."""
        keys = self.keys
        packed = isinstance(keys, PackedHeads)
        return (*keys.steps.shape, keys.width) if packed else tuple(keys.shape)

    def for_kernel(self) -> tuple[list[Tensor | None], dict[str, object]]:
        """Return the tensors and constants that a kernel takes.

        Tensors: keys, their steps, values, their steps. Constants: bits (0 if not packed) and
        dtype.
        """
        kind = getattr(tl, str(self.keys.dtype).removeprefix("torch."))
        if isinstance(self.keys, PackedHeads):
            tensors = [tensor for part in self for tensor in (part.codes, part.steps)]
            return tensors, {"BITS": self.keys.bits, "KIND": kind}
        return [self.keys, None, self.values, None], {"BITS": 0, "KIND": kind}

    def put(self, key: Tensor, value: Tensor, *places: Index) -> None:
        """Write new heads at an index of all dimensions but the last."""
        for part, new in zip(self, (key, value), strict=True):
            if isinstance(part, PackedHeads):
                part.put(new, *places)
            else:
                part[places] = new.to(part.dtype)

    def at(self, *places: Index) -> tuple[Tensor, Tensor]:
        """Return keys and values at such an index, as numbers."""
        keys, values = (
            dequantize_heads(part.at(*places)) if isinstance(part, PackedHeads) else part[places]
            for part in self
        )
        return keys, values


class Angles(NamedTuple):
    """Rotary angles by position; the halves of a head are rotated against each other."""

    cos: Tensor
    """`(N, D)` float32."""
    sin: Tensor
    """`(N, D)` float32."""


class Scoring(NamedTuple):
    """The scoring of one layer: scaling, and norms of queries and keys."""

    scaling: float
    """The factor of scores: `scaling * q @ k`."""
    q_norm: Tensor | None = None
    """`(D,)` gain of the RMS norm of every query, or None without one."""
    k_norm: Tensor | None = None
    eps: float = 0.0


EXPONENTS, BELOW = tl.constexpr(OFFSET), tl.constexpr(REST)
ALL_BELOW = tl.constexpr((1 << REST) - 1)
MOST = tl.constexpr(LARGEST)


@triton.jit
def scale_of(octet):
    """Decode a scale byte to float32; see `qat.quant.kv`."""
    return ((octet + EXPONENTS) << BELOW).to(tl.float32, bitcast=True)


@triton.jit
def _step(word, BITS: tl.constexpr):
    """Return scale and smallest number of a half head from the lower 16 bits of its step word."""
    scale = scale_of(word & 255)
    return scale, -(((word >> 8) & 255).to(tl.float32) * scale / 2 ** (8 - BITS))


@triton.jit
def _nearest(x, scale, zero):
    """Return the codes that `qat.quant.kv` defines, independent of how a division is rounded."""
    code = tl.floor(x / scale + zero + 0.5)
    code += ((code + 0.5 - zero) * scale <= x).to(tl.float32)
    return code - ((code - 0.5 - zero) * scale > x).to(tl.float32)


@triton.jit
def _step_for(x, BITS: tl.constexpr):
    """Return the 16-bit step of each half head, a row of `x`, which may be padded with zeros."""
    low = tl.minimum(tl.min(x, axis=1), 0.0)
    span = tl.maximum(tl.max(x, axis=1), 0.0) - low
    raw = (span / (2.0**BITS - 1)).to(tl.int32, bitcast=True)
    octet = ((raw + ALL_BELOW) >> BELOW) - EXPONENTS
    is_short = scale_of(octet) * (2.0**BITS - 1) < span
    is_long = scale_of(octet - 1) * (2.0**BITS - 1) >= span
    octet = tl.maximum(octet + is_short.to(tl.int32) - is_long.to(tl.int32), 0)
    zero = _nearest(low * -(2.0 ** (8 - BITS)), scale_of(octet), 0.0)
    zero -= (zero * scale_of(octet) > MOST * 2.0 ** (8 - BITS)).to(tl.float32)
    return octet | (zero.to(tl.int32) << 8)


@triton.jit
def _encoded(x, word, BITS: tl.constexpr):
    """Return the codes of `x` under a half head's step."""
    zero = ((word >> 8) & 255).to(tl.float32) / 2 ** (8 - BITS)
    scale = scale_of(word & 255)
    code = tl.minimum(tl.maximum(_nearest(x, scale, zero), 0.0), 2.0**BITS - 1)
    return (code - ((code - zero) * scale > MOST).to(tl.float32)).to(tl.int32)


@triton.jit
def put_packed(codes, steps, place, x1, x2, half, is_row, D: tl.constexpr, BITS: tl.constexpr):
    """Quantize heads, given as halves `(R, D/2)`, and store them at `place` `(R,)`."""
    x1 = tl.minimum(tl.maximum(x1, -MOST), MOST)
    x2 = tl.minimum(tl.maximum(x2, -MOST), MOST)
    word1, word2 = _step_for(x1, BITS), _step_for(x2, BITS)
    code1, code2 = _encoded(x1, word1[:, None], BITS), _encoded(x2, word2[:, None], BITS)
    out = codes + place[:, None] * (D * BITS // 8) + half[None, :]
    is_there = is_row[:, None] & (half < D // 2)[None, :]
    if BITS == 4:
        tl.store(out, (code1 | (code2 << 4)).to(tl.uint8), mask=is_there)
    else:
        tl.store(out, code1.to(tl.uint8), mask=is_there)
        tl.store(out + D // 2, code2.to(tl.uint8), mask=is_there)
    tl.store(steps + place, word1 | (word2 << 16), mask=is_row)


@triton.jit
def read_packed(
    codes, steps, seen, column, is_seen, is_column,
    KIND: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Load `(positions, columns)` of a head, bit-identical to `qat.quant.kv.dequantize_heads`."""
    WIDTH: tl.constexpr = D * BITS // 8
    is_second = column >= D // 2
    place = seen[:, None] * WIDTH + (column % WIDTH)[None, :]
    code = tl.load(codes + place, mask=is_seen[:, None] & is_column[None, :], other=0)
    if BITS == 4:
        code = (code >> tl.where(is_second, 4, 0).to(tl.uint8)[None, :]) & 15
    word = tl.load(steps + seen, mask=is_seen, other=0)
    scale1, low1 = _step(word, BITS)
    scale2, low2 = _step(word >> 16, BITS)
    scale = tl.where(is_second[None, :], scale2[:, None], scale1[:, None])
    low = tl.where(is_second[None, :], low2[:, None], low1[:, None])
    return (code.to(tl.float32) * scale + low).to(KIND)
