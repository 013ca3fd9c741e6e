"""Attention of one new position over a cache of fixed size, with the norms and rotary before it.

Nothing depends on the host: the position is read on the device, so that one recorded graph serves
every step.

The kernels: the cache in splits, then their softmaxes as one. Each program norms and rotates the
few heads of its group anew, which is less than a launch; the heads are the rows of small products,
so that a reduction serves them all: 5.7 us a layer at position 700 instead of 14.2 head by head
(one H200). The new key and value never come from the cache: the first split has them.

Shapes: B sequences, H query heads, J key heads, N positions of the cache, D width of a head.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.kernels.dispatch import (
    gdc_launch_dependents,
    gdc_wait,
    overlapping,
    tl,
    triton,
    use_triton,
)
from qat.kernels.lut_rows import empty_inputs, put_inputs, spread
from qat.quant.kv import OFFSET, REST, Index, PackedHeads, dequantize_heads

PROGRAMS, PACKED_PROGRAMS = 256, 512
"""Programs that share the cache: about two for each multiprocessor of a large GPU, and of packed
keys and values, of which each reads fewer bytes at a time, four."""
TILE, PACKED_TILE = 32, 64
"""Positions that a program reads at a time."""
LEAST = 16
"""Rows and columns of the smallest product that `tl.dot` takes."""
EVERY = slice(None)
"""Index of all along a dimension of a cache."""


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
        """Room for `shape` `(B, J, N, D)`, zeros so far; packed in so many bits if given."""
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
        """What a kernel is told: keys, their steps, values, theirs; and as constants, the bits (0
        where they are numbers) and the dtype that they are read as."""
        if isinstance(self.keys, PackedHeads):
            kind = str(self.keys.dtype).removeprefix("torch.")
            tensors = [tensor for part in self for tensor in (part.codes, part.steps)]
            return tensors, {"BITS": self.keys.bits, "KIND": getattr(tl, kind)}
        kind = str(self.keys.dtype).removeprefix("torch.")
        return [self.keys, None, self.values, None], {"BITS": 0, "KIND": getattr(tl, kind)}

    def put(self, key: Tensor, value: Tensor, *places: Index) -> None:
        """Write new heads to an index of all dimensions but the last."""
        for part, new in zip(self, (key, value), strict=True):
            if isinstance(part, PackedHeads):
                part.put(new, *places)
            else:
                part[places] = new.to(part.dtype)

    def at(self, *places: Index) -> tuple[Tensor, Tensor]:
        """Keys and values at such an index, as numbers."""
        keys, values = (
            dequantize_heads(part.at(*places)) if isinstance(part, PackedHeads) else part[places]
            for part in self
        )
        return keys, values


class Angles(NamedTuple):
    """What positions rotate queries and keys by: halves of a head against each other."""

    cos: Tensor
    """`(N, D)` float32."""
    sin: Tensor
    """`(N, D)` float32."""


class Scoring(NamedTuple):
    """How one layer's queries meet its keys."""

    scaling: float
    """Scores are `scaling * q @ k`."""
    q_norm: Tensor | None = None
    """`(D,)` gain of the RMS norm of every query, if there is one."""
    k_norm: Tensor | None = None
    eps: float = 0.0


def decode_attention(
    qkv: Tensor, cache: Cache, position: Tensor, angles: Angles, scoring: Scoring, *, order: int = 1
) -> Tensor:
    """What the heads say of positions up to `position`, `(B, H * D)` float32, spread by `order`.

    `qkv` `(B, (H + 2 J) D)` float32 holds queries, keys and values of the new `position` `(1,)`,
    which is the same for all sequences; its key and value are written into the cache.
    """
    if use_triton(qkv):
        return _decode_by_kernel(qkv, cache, position, angles, scoring, order=order)
    (B, J, _, D), at = cache.shape, int(position)
    query, key, value = qkv.view(B, -1, D).split([qkv.shape[1] // D - 2 * J, J, J], 1)
    turn = (angles.cos[at], angles.sin[at])
    query = _rotated(_normed(query, scoring.q_norm, scoring.eps), *turn)
    key = _rotated(_normed(key, scoring.k_norm, scoring.eps), *turn)
    cache.put(key, value, EVERY, EVERY, at)
    seen = (part.float() for part in cache.at(EVERY, EVERY, slice(at + 1)))
    out = F.scaled_dot_product_attention(
        query[:, :, None].float(), *seen, scale=scoring.scaling, enable_gqa=True
    )
    return spread(out.flatten(1), order)


def _normed(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    return x if gain is None else F.rms_norm(x, x.shape[-1:], gain.to(x.dtype), eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _decode_by_kernel(
    qkv: Tensor, cache: Cache, position: Tensor, angles: Angles, scoring: Scoring, *, order: int
) -> Tensor:
    """See `decode_attention`."""
    B, J, N, D = cache.shape
    H = qkv.shape[1] // D - 2 * J
    tensors, kept = cache.for_kernel()
    # in float32, twice the shared memory
    is_short = kept["BITS"] > 0 and kept["KIND"] != tl.float32
    programs, tile = (PACKED_PROGRAMS, PACKED_TILE) if is_short else (PROGRAMS, TILE)
    splits = max(1, min(triton.next_power_of_2(programs // (B * J)), triton.cdiv(N, tile)))
    splits = triton.next_power_of_2(splits)  # the merge reads them as one vector
    new = {"dtype": torch.float32, "device": qkv.device}
    parts = torch.empty(B * H, splits, D, **new)
    peaks, sums = torch.empty(2, B * H, splits, **new)
    out = empty_inputs(B, H * D, order, qkv.device)
    launch = {"num_warps": 4, **overlapping(qkv.device)}
    _split_kernel[(B * J, splits)](
        parts, peaks, sums, qkv, *tensors, position, *angles, scoring.q_norm, scoring.k_norm, N,
        scoring.eps, scoring.scaling,
        H=H, J=J, D=D, HALF=max(D // 2, LEAST), ROWS=max(triton.next_power_of_2(H // J + 1), LEAST),
        TILE=tile, SPLITS=splits, **kept, **launch,
    )  # fmt: skip
    _merge_kernel[(B * H,)](out, parts, peaks, sums, H=H, D=D, SPLITS=splits, ORDER=order, **launch)
    return out


EXPONENTS, BELOW = tl.constexpr(OFFSET), tl.constexpr(REST)
ALL_BELOW = tl.constexpr((1 << REST) - 1)


@triton.jit
def _scale_of(octet):
    return ((octet + EXPONENTS) << BELOW).to(tl.float32, bitcast=True)


@triton.jit
def _step(word, BITS: tl.constexpr):
    """Scale and smallest number of a half, from the lower 16 bits of what a cache keeps of it."""
    scale = _scale_of(word & 255)
    return scale, -(((word >> 8) & 255).to(tl.float32) * scale / 2 ** (8 - BITS))


@triton.jit
def _nearest(x, scale, zero):
    """As `qat.quant.kv` has it: the same codes, however a division is rounded."""
    code = tl.floor(x / scale + zero + 0.5)
    code += ((code + 0.5 - zero) * scale <= x).to(tl.float32)
    return code - ((code - 0.5 - zero) * scale > x).to(tl.float32)


@triton.jit
def _step_for(x, BITS: tl.constexpr):
    """The 16 bits that a cache keeps of each half head, a row of `x`, which may end in zeros."""
    low = tl.minimum(tl.min(x, axis=1), 0.0)
    span = tl.maximum(tl.max(x, axis=1), 0.0) - low
    raw = (span / (2.0**BITS - 1)).to(tl.int32, bitcast=True)
    octet = ((raw + ALL_BELOW) >> BELOW) - EXPONENTS
    is_short = _scale_of(octet) * (2.0**BITS - 1) < span
    is_long = _scale_of(octet - 1) * (2.0**BITS - 1) >= span
    octet = tl.minimum(tl.maximum(octet + is_short.to(tl.int32) - is_long.to(tl.int32), 0), 255)
    zero = _nearest(low * -(2.0 ** (8 - BITS)), _scale_of(octet), 0.0)
    return octet | (tl.minimum(zero, 255.0).to(tl.int32) << 8)


@triton.jit
def _encoded(x, word, BITS: tl.constexpr):
    """Codes of `x` in the steps of a half."""
    zero = ((word >> 8) & 255).to(tl.float32) / 2 ** (8 - BITS)
    code = _nearest(x, _scale_of(word & 255), zero)
    return tl.minimum(tl.maximum(code, 0.0), 2.0**BITS - 1).to(tl.int32)


@triton.jit
def put_packed(codes, steps, place, x1, x2, half, is_row, D: tl.constexpr, BITS: tl.constexpr):
    """Quantize heads, rows of halves `(R, D/2)`, and keep them at `place` `(R,)`; their steps."""
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
    return word1, word2


@triton.jit
def quantized(x, word1, word2, column, D: tl.constexpr, BITS: tl.constexpr):
    """`(R, C)` columns of heads, rounded to what is kept of them with such steps `(R,)`."""
    word = tl.where(column[None, :] < D // 2, word1[:, None], word2[:, None])
    scale, low = _step(word, BITS)
    return _encoded(x, word, BITS).to(tl.float32) * scale + low


@triton.jit
def read_packed(
    codes, steps, seen, column, is_seen, is_column,
    KIND: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """`(positions, columns)` of a head: what `qat.quant.kv.dequantize_heads` gives, to the bit."""
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


@triton.jit
def _split_kernel(
    parts, peaks, sums, qkv, keys, key_steps, values, value_steps, position, cos, sin,
    q_norm, k_norm, N, eps, scaling,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One split of the positions, for all query heads of a key head: rows of one small matrix."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = H // J
    b, j = tl.program_id(0) // J, tl.program_id(0) % J
    split = tl.program_id(1)
    is_first = split == 0
    at = tl.load(position).to(tl.int32)
    new = qkv + b * (H + 2 * J) * D
    row, half, whole = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    is_half, is_whole = half < D // 2, whole < D
    of_head = tl.program_id(0).to(tl.int64) * N
    if BITS:
        key_steps, value_steps = key_steps + of_head, value_steps + of_head
        of_head *= D * BITS // 8
    else:
        of_head *= D
    keys, values = keys + of_head, values + of_head
    # the queries, then the key
    head = tl.where(row < GROUP, j * GROUP + row, H + j)
    place = head[:, None] * D + half[None, :]
    is_there = (row <= GROUP)[:, None] & is_half[None, :]
    x1 = tl.load(new + place, mask=is_there, other=0.0)
    x2 = tl.load(new + place + D // 2, mask=is_there, other=0.0)
    if q_norm is not None:
        norm = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / D + eps)[:, None]
        is_query = (row < GROUP)[:, None]
        x1 *= norm * tl.where(is_query, _part(q_norm, half, D), _part(k_norm, half, D))
        x2 *= norm * tl.where(
            is_query, _part(q_norm + D // 2, half, D), _part(k_norm + D // 2, half, D)
        )
    cos, sin = cos + at * D, sin + at * D
    turned1 = x1 * _part(cos, half, D) - x2 * _part(sin, half, D)
    turned2 = x2 * _part(cos + D // 2, half, D) + x1 * _part(sin + D // 2, half, D)
    is_key = (row == GROUP)[:, None]
    key1 = tl.sum(tl.where(is_key, turned1, 0.0), axis=0).to(KIND)
    key2 = tl.sum(tl.where(is_key, turned2, 0.0), axis=0).to(KIND)
    new += (H + J + j) * D
    value = tl.load(new + whole, mask=is_whole, other=0.0).to(KIND)
    if BITS:
        one = at + tl.zeros([1], tl.int32)
        is_one = one < tl.where(is_first, N, 0)
        wide1, wide2 = key1.to(tl.float32)[None, :], key2.to(tl.float32)[None, :]
        word1, word2 = put_packed(keys, key_steps, one, wide1, wide2, half, is_one, D, BITS)
        key1 = _one_row(quantized(wide1, word1, word1, half, D, BITS)).to(KIND)
        key2 = _one_row(quantized(wide2, word2, word2, half, D, BITS)).to(KIND)
        wide1 = tl.load(new + half, mask=is_half, other=0.0).to(KIND).to(tl.float32)[None, :]
        wide2 = tl.load(new + D // 2 + half, mask=is_half, other=0.0).to(KIND)
        wide2 = wide2.to(tl.float32)[None, :]
        word1, word2 = put_packed(values, value_steps, one, wide1, wide2, half, is_one, D, BITS)
        wide = value.to(tl.float32)[None, :]
        value = _one_row(quantized(wide, word1, word2, whole, D, BITS)).to(KIND)
    elif is_first:
        tl.store(keys + at * D + half, key1, mask=is_half)
        tl.store(keys + at * D + D // 2 + half, key2, mask=is_half)
        tl.store(values + at * D + whole, value, mask=is_whole)
    query1, query2 = turned1 * scaling, turned2 * scaling
    own = query1 * key1.to(tl.float32)[None, :] + query2 * key2.to(tl.float32)[None, :]
    peak = tl.where(is_first, tl.sum(own, axis=1), float("-inf"))
    total = tl.where(is_first, tl.full([ROWS], 1.0, tl.float32), 0.0)
    out = tl.where(is_first, value.to(tl.float32), 0.0)[None, :] + tl.zeros([ROWS, 1], tl.float32)
    share = tl.cdiv(tl.cdiv(at, SPLITS), TILE) * TILE
    start, end = split * share, tl.minimum(at, (split + 1) * share)
    while start < end:
        seen = start + tl.arange(0, TILE)
        is_seen = seen < end
        if BITS:
            later = D // 2 + half
            K1 = read_packed(keys, key_steps, seen, half, is_seen, is_half, KIND, D, BITS)
            K2 = read_packed(keys, key_steps, seen, later, is_seen, is_half, KIND, D, BITS)
            V = read_packed(values, value_steps, seen, whole, is_seen, is_whole, KIND, D, BITS)
        else:
            rows = seen[:, None] * D
            K1 = _read(keys + rows + half[None, :], is_seen, is_half)
            K2 = _read(keys + rows + D // 2 + half[None, :], is_seen, is_half)
            V = _read(values + rows + whole[None, :], is_seen, is_whole)
        score = tl.zeros([ROWS, TILE], tl.float32)
        score = add_product(add_product(score, query1, tl.trans(K1)), query2, tl.trans(K2))
        score = tl.where(is_seen[None, :], score, float("-inf"))
        most = tl.maximum(peak, tl.max(score, axis=1))
        old, mass = tl.exp(peak - most), tl.exp(score - most[:, None])
        total = total * old + tl.sum(mass, axis=1)
        out = add_product(out * old[:, None], mass, V)
        peak = most
        start += TILE
    is_query = row < GROUP
    place = (b * H + j * GROUP + row) * SPLITS + split
    tl.store(peaks + place, peak, mask=is_query)
    tl.store(sums + place, total, mask=is_query)
    places = place[:, None] * D + whole[None, :]
    tl.store(parts + places, out, mask=is_query[:, None] & is_whole[None, :])


@triton.jit
def _one_row(x):
    """`(1, C)` as `(C,)`."""
    return tl.sum(x, axis=0)


@triton.jit
def _part(vector, half, D: tl.constexpr):
    """Half a head's numbers, for all rows."""
    return tl.load(vector + half, mask=half < D // 2, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _read(places, is_row, is_column):
    return tl.load(places, mask=is_row[:, None] & is_column[None, :], other=0.0)


@triton.jit
def add_product(total, A, B):
    """`total + A @ B` of A in float32: in 16 bits, as what B has room for and what that leaves."""
    if B.dtype == tl.float32:
        return tl.dot(A, B, total, input_precision="tf32x3")  # float32's digits, on tensor cores
    else:
        upper = A.to(B.dtype)
        rest = (A - upper.to(tl.float32)).to(B.dtype)
        return tl.dot(rest, B, tl.dot(upper, B, total))


@triton.jit
def _merge_kernel(
    out, parts, peaks, sums,
    H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, ORDER: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    split, whole = tl.arange(0, SPLITS), tl.arange(0, D)
    peak = tl.load(peaks + head * SPLITS + split)
    weight = tl.exp(peak - tl.max(peak, axis=0))
    total = tl.sum(weight * tl.load(sums + head * SPLITS + split), axis=0)
    found = tl.load(parts + (head * SPLITS + split[:, None]) * D + whole[None, :])
    y = tl.sum(found * weight[:, None], axis=0) / total
    column = head % H * D + whole
    put_inputs(out, head // H, column, y, column < H * D, H * D, ORDER)
