"""Attention of one new position over a cache of fixed size, fused with the norms and rotary before.

Nothing depends on the host: the position is read on the device, so that one captured graph serves
every step.

The kernels: one over splits of the cache, then one that merges their softmaxes. Each program norms
and rotates the few heads of its group again, which costs less than a launch. The heads are the rows
of small products, so that one reduction serves all of them: 5.7 us per layer at position 700
instead of 14.2 head by head (one H200). The new key and value are never read from the cache: the
first split holds them in registers. Packed keys and values are placed and read as in slots.

Shapes: B sequences, H query heads, J key heads, N positions of the cache, D width of a head.
"""

from torch import Tensor

from qat.extensions.decode.kernels.cache import Angles, Cache, Scoring
from qat.extensions.decode.kernels.launch import gdc_launch_dependents, gdc_wait, overlapping
from qat.extensions.decode.kernels.lut_rows import empty_inputs
from qat.extensions.decode.kernels.packed_attention import empty_parts, merge
from qat.extensions.decode.kernels.slot_attention import place_heads, slot_attention
from qat.kernels.dispatch import tl, triton, use_triton
from qat.quant.kv import PackedHeads

PROGRAMS = 256
"""The most programs that share the cache: about two per multiprocessor of a large GPU."""
TILE = 32
"""Positions that a program reads at a time."""
LEAST = 16
"""The fewest rows and columns that `tl.dot` takes."""


def decode_attention(
    qkv: Tensor, cache: Cache, position: Tensor, angles: Angles, scoring: Scoring, *, order: int = 1
) -> Tensor:
    """Return attention over positions up to `position`, `(B, H * D)` float32, spread by `order`.

    `qkv` `(B, (H + 2 J) D)` float32 holds queries, keys and values of the new `position` `(1,)`,
    which is the same for all sequences; its key and value are written into the cache.
    """
    if not use_triton(qkv, __name__) or isinstance(cache.keys, PackedHeads):
        query = place_heads(qkv, cache, None, position, angles, scoring)
        return slot_attention(query, cache, position, scoring.scaling, order=order)
    return split_attention(qkv, cache, position, angles, scoring, order=order)


def split_attention(
    qkv: Tensor,
    cache: Cache,
    position: Tensor,
    angles: Angles,
    scoring: Scoring,
    *,
    order: int,
    is_row: bool = False,
) -> Tensor:
    """Do what `decode_attention` does by the kernels, over a cache of numbers.

    If `is_row`, the B queries are consecutive positions of one sequence, the first at `position`,
    and `place_heads` has written their keys and values.
    """
    B, (_, J, N, D) = len(qkv), cache.shape
    H = qkv.shape[1] // D - 2 * J
    splits = max(1, min(triton.next_power_of_2(PROGRAMS // (B * J)), triton.cdiv(N, TILE)))
    parts, peaks, sums = empty_parts(B * H, splits, D, qkv.device)
    out = empty_inputs(B, H * D, order, qkv.device)
    _split_kernel[(B * J, splits)](
        parts, peaks, sums, qkv, *cache, position, *angles, scoring.q_norm, scoring.k_norm, N,
        scoring.eps, scoring.scaling,
        H=H, J=J, D=D, HALF=max(D // 2, LEAST), ROWS=max(triton.next_power_of_2(H // J + 1), LEAST),
        TILE=TILE, SPLITS=splits, IS_ROW=is_row, num_warps=4, **overlapping(qkv.device),
    )  # fmt: skip
    return merge(out, parts, peaks, sums, order=order)


@triton.jit
def _split_kernel(
    parts, peaks, sums, qkv, keys, values, position, cos, sin, q_norm, k_norm, N, eps, scaling,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, IS_ROW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute one split for all query heads of a key head, which are rows of one small matrix."""
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
    of_head = tl.program_id(0).to(tl.int64)
    if IS_ROW:  # query b is b positions later, over the one sequence of the cache
        at += b
        of_head = j.to(tl.int64)
    of_head *= N * D
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
    key1 = tl.sum(tl.where(is_key, turned1, 0.0), axis=0).to(keys.dtype.element_ty)
    key2 = tl.sum(tl.where(is_key, turned2, 0.0), axis=0).to(keys.dtype.element_ty)
    new += (H + J + j) * D
    value = tl.load(new + whole, mask=is_whole, other=0.0).to(keys.dtype.element_ty)
    if not IS_ROW:
        if is_first:
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
def _part(vector, half, D: tl.constexpr):
    """Load half of a head's numbers, broadcast to all rows."""
    return tl.load(vector + half, mask=half < D // 2, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _read(places, is_row, is_column):
    return tl.load(places, mask=is_row[:, None] & is_column[None, :], other=0.0)


@triton.jit
def add_product(total, A, B):
    """Return `total + A @ B` for float32 A, split into two 16-bit parts if B has 16 bits."""
    if B.dtype == tl.float32:
        return tl.dot(A, B, total, input_precision="tf32x3")  # float32 precision on tensor cores
    else:
        upper = A.to(B.dtype)
        rest = (A - upper.to(tl.float32)).to(B.dtype)
        return tl.dot(rest, B, tl.dot(upper, B, total))
