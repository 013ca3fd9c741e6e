"""Attention of one new token for each of many sequences, each at its own position.

A cache has a slot for every sequence. `place_heads` norms and rotates the heads of new tokens and
stores their keys and values in the cache; `slot_attention` then reads only the part of each slot
that is in use. Positions are on the device, so that one captured graph serves sequences of all
lengths.

The attention kernel: one program per slot and key head. Its query heads are the rows of one small
matrix, which is multiplied by tiles of keys and values with an online softmax. It is bound by the
bytes of the cache. Packed keys and values use `packed_attention`, except for float32
and narrow heads.

Shapes: B slots, T new tokens, H query heads, J key heads, N positions of a slot, D width of a head.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.backend.device import on
from qat.extensions.decode.kernels.cache import (
    EVERY,
    Angles,
    Cache,
    Scoring,
    put_packed,
    read_packed,
)
from qat.extensions.decode.kernels.launch import gdc_launch_dependents, gdc_wait, overlapping
from qat.extensions.decode.kernels.lut_rows import empty_inputs, spread
from qat.extensions.decode.kernels.packed_attention import LOG2_E, is_read_packed, packed_attention
from qat.kernels.dispatch import tl, triton, use_triton

TILE, WARPS, STAGES = 64, 4, 3
"""Positions of 16-bit numbers that a program reads at a time, its warps, and its prefetch depth.

Fewer positions where shared memory is short (`_tile`).
"""
LEAST = 16
"""The fewest rows and columns that `tl.dot` takes."""


def place_heads(
    qkv: Tensor,
    cache: Cache,
    slots: Tensor | None,
    positions: Tensor,
    angles: Angles,
    scoring: Scoring,
    *,
    has_keys: bool = False,
) -> Tensor:
    """Return rotated queries `(T, H, D)` in the dtype of `qkv`; put keys and values into the cache.

    `qkv` `(T, (H + 2 J) D)` holds queries, keys and values. `slots` and `positions`, both `(T,)`
    int64, are the place of each token: without `slots`, token t has slot t, and a single position
    applies to all. No two tokens may have the same place. With `has_keys` the rotated keys are
    returned behind the queries, `(T, H + J, D)`.
    """
    if use_triton(qkv, __name__):
        return _place_by_kernel(qkv, cache, slots, positions, angles, scoring, has_keys)
    _, J, _, D = cache.shape
    heads = qkv.unflatten(1, (-1, D))
    if slots is None:
        slots = torch.arange(len(qkv), device=qkv.device)
    query, key, value = heads.split([heads.shape[1] - 2 * J, J, J], 1)
    turn = (angles.cos[positions, None], angles.sin[positions, None])
    query = _rotated(_normed(query.float(), scoring.q_norm, scoring.eps), *turn)
    key = _rotated(_normed(key.float(), scoring.k_norm, scoring.eps), *turn)
    cache.put(key, value, slots, EVERY, positions)
    return (torch.cat([query, key], 1) if has_keys else query).to(qkv.dtype)


def slot_attention(
    query: Tensor, cache: Cache, positions: Tensor, scaling: float, *, order: int = 1
) -> Tensor:
    """Return `softmax(scaling * q @ k) @ v` over positions 0 ... `positions[b]`, `(B, H D)`.

    `query` is `(B, H, D)`; `positions` is `(B,)` int64, or `(1,)` for all. The result is in the
    dtype of `query`, or spread by `order`. On a GPU the weights are rounded to the dtype of the
    values before the product, unless these are packed; sums are float32.
    """
    if use_triton(query, __name__):
        return _attend_by_kernel(query, cache, positions, scaling, order)
    longest = int(positions.max()) + 1
    seen = None  # one position for all: they see all that is read
    if len(positions) > 1:
        seen = torch.arange(longest, device=query.device) <= positions[:, None]
        seen = seen[:, None, None]  # (B, 1, 1, longest)
    kept = (part.to(query.dtype) for part in cache.at(EVERY, EVERY, slice(longest)))
    out = F.scaled_dot_product_attention(
        query[:, :, None], *kept, attn_mask=seen, scale=scaling, enable_gqa=True
    ).flatten(1)
    return out if order == 1 else spread(out, order)


def _normed(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    return x if gain is None else F.rms_norm(x, x.shape[-1:], gain.to(x.dtype), eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _place_by_kernel(
    qkv: Tensor,
    cache: Cache,
    slots: Tensor | None,
    positions: Tensor,
    angles: Angles,
    scoring: Scoring,
    has_keys: bool,
) -> Tensor:
    _, J, N, D = cache.shape
    tensors, kept = cache.for_kernel()
    T, H = len(qkv), qkv.shape[1] // D - 2 * J
    heads = qkv.new_empty(T, H + J * has_keys, D)
    _place_kernel[(T, J)](
        heads, qkv, *tensors, slots, positions, *angles, scoring.q_norm, scoring.k_norm, N,
        scoring.eps,
        H=H, J=J, D=D, KEYS=int(has_keys), ROWS=triton.next_power_of_2(H // J + 2),
        STRIDE=int(len(positions) > 1), **kept, num_warps=4, **overlapping(qkv.device),
    )  # fmt: skip
    return heads


@triton.jit
def _place_kernel(
    heads, qkv, keys, key_steps, values, value_steps, slots, positions, cos, sin,
    q_norm, k_norm, N, eps,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    STRIDE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Place the queries of a key head of one token, its key and its value.

    They are rows of a matrix in two halves, which are rotated into each other.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = H // J
    token, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = token if slots is None else tl.load(slots + token).to(tl.int64)
    at = tl.load(positions + token * STRIDE).to(tl.int64)
    rows, halves = tl.arange(0, ROWS), tl.arange(0, D // 2)
    row, half = rows[:, None], halves[None, :]
    head = tl.where(row < GROUP, j * GROUP + row, H + j + (row - GROUP) * J)
    new = qkv + (token * (H + 2 * J) + head) * D + half
    is_there = row < GROUP + 2
    x1 = tl.load(new, mask=is_there, other=0.0).to(tl.float32)
    x2 = tl.load(new + D // 2, mask=is_there, other=0.0).to(tl.float32)
    v1, v2 = x1, x2
    if q_norm is not None:
        norm = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / D + eps)[:, None]
        x1 *= norm * tl.where(row < GROUP, tl.load(q_norm + half), tl.load(k_norm + half))
        later = D // 2 + half
        x2 *= norm * tl.where(row < GROUP, tl.load(q_norm + later), tl.load(k_norm + later))
    cos, sin = cos + at * D + half, sin + at * D + half
    y1 = x1 * tl.load(cos) - x2 * tl.load(sin)
    y2 = x2 * tl.load(cos + D // 2) + x1 * tl.load(sin + D // 2)
    out = heads + (token * (H + KEYS * J) + head) * D + half
    tl.store(out, y1.to(heads.dtype.element_ty), mask=row < GROUP + KEYS)
    tl.store(out + D // 2, y2.to(heads.dtype.element_ty), mask=row < GROUP + KEYS)
    y1, y2, v1, v2 = y1.to(KIND), y2.to(KIND), v1.to(KIND), v2.to(KIND)
    place, is_key, is_value = (slot * J + j) * N + at, rows == GROUP, rows == GROUP + 1
    if BITS:
        y1, y2, v1, v2 = y1.to(tl.float32), y2.to(tl.float32), v1.to(tl.float32), v2.to(tl.float32)
        places = place + rows * 0
        put_packed(keys, key_steps, places, y1, y2, halves, is_key, D, BITS)
        put_packed(values, value_steps, places, v1, v2, halves, is_value, D, BITS)
    else:
        keys, values = keys + place * D + half + row * 0, values + place * D + half + row * 0
        tl.store(keys, y1, mask=is_key[:, None])
        tl.store(keys + D // 2, y2, mask=is_key[:, None])
        tl.store(values, v1, mask=is_value[:, None])
        tl.store(values + D // 2, v2, mask=is_value[:, None])


def _attend_by_kernel(
    query: Tensor, cache: Cache, positions: Tensor, scaling: float, order: int
) -> Tensor:
    B, H, D = query.shape
    _, J, N, _ = cache.shape
    out = query.new_empty(B, H * D)
    if is_read_packed(cache, H // J):
        out = out if order == 1 else empty_inputs(B, H * D, order, query.device)
        return packed_attention(out, query, cache, positions, scaling, order=order)
    tensors, kept = cache.for_kernel()
    rows = max(triton.next_power_of_2(H // J), LEAST)
    tile = _tile(rows, max(D, LEAST), query.element_size(), query.device)
    _attend_kernel[(B * J,)](
        out, query, *tensors, positions.expand(B).contiguous(), N,
        scaling * LOG2_E,  # exp2 is used
        H=H, J=J, D=D, WIDTH=max(D, LEAST), ROWS=rows, TILE=tile, STAGES=STAGES, **kept,
        num_warps=WARPS,
    )  # fmt: skip
    return out if order == 1 else spread(out, order)


def _tile(rows: int, width: int, size: int, device: torch.device) -> int:
    """Return the positions that a program reads at a time, for heads with numbers of `size` bytes.

    Shared memory holds two tiles of keys and values, the queries, and the weights of one tile: for
    heads of 256 numbers more than a T4 or a GeForce card has, if tiles are not made smaller.
    """
    room, tile = on(device).shared_memory_bytes(), TILE * 2 // size
    held = (STAGES - 1) * 2 * width + rows  # of one position
    while room and tile > LEAST and size * (tile * held + rows * width) > room:
        tile //= 2
    return tile


@triton.jit
def _attend_kernel(
    out, query, keys, key_steps, values, value_steps, positions, N, scaling,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = H // J
    pair = tl.program_id(0).to(tl.int64)
    slot, j = pair // J, pair % J
    end = tl.load(positions + slot).to(tl.int32) + 1
    row, whole, tile = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    is_whole = whole < D
    place = (slot * H + j * GROUP + row[:, None]) * D + whole[None, :]
    is_query = (row < GROUP)[:, None] & is_whole[None, :]
    Q = tl.load(query + place, mask=is_query, other=0.0)
    if BITS:
        key_steps, value_steps = key_steps + pair * N, value_steps + pair * N
        pair *= D * BITS // 8
    else:
        pair *= D
    keys, values = keys + pair * N, values + pair * N
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(0, end, TILE, num_stages=STAGES):
        seen = start + tile
        is_seen = seen < end
        if BITS:
            K = read_packed(keys, key_steps, seen, whole, is_seen, is_whole, KIND, D, BITS)
            V = read_packed(values, value_steps, seen, whole, is_seen, is_whole, KIND, D, BITS)
            K, V = tl.trans(K).to(Q.dtype), V.to(Q.dtype)
        else:
            K = tl.load(
                keys + seen[None, :] * D + whole[:, None],
                mask=is_seen[None, :] & is_whole[:, None],
                other=0.0,
            )
            V = tl.load(
                values + seen[:, None] * D + whole[None, :],
                mask=is_seen[:, None] & is_whole[None, :],
                other=0.0,
            )
        score = tl.dot(Q, K, input_precision="ieee") * scaling
        score = tl.where(is_seen[None, :], score, float("-inf"))
        most = tl.maximum(peak, tl.max(score, axis=1))
        old, mass = tl.exp2(peak - most), tl.exp2(score - most[:, None])
        total = total * old + tl.sum(mass, axis=1)
        found = tl.dot(mass.to(V.dtype), V, found * old[:, None], input_precision="ieee")
        peak = most
    y = found / total[:, None]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=is_query)
