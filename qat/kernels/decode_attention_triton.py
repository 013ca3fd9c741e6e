"""The Triton side of `decode_attention`: the cache in splits, then their softmaxes as one.

Each program rotates the few heads of its group anew, which is less than a launch. The new key and
value never come from the cache: the first split has them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qat.kernels.decode_attention import Angles, Cache, Heads
from qat.kernels.overlap import overlaps

PROGRAMS = 128
"""Programs that share the cache, about one for each multiprocessor of a large GPU."""
TILE = 32
"""Positions that a program reads at a time."""


def decode_attention(
    qkv: Tensor, cache: Cache, position: Tensor, angles: Angles, heads: Heads, *, order: int
) -> Tensor:
    """See `qat.kernels.decode_attention`."""
    B, J, N, D = cache.keys.shape
    H = qkv.shape[1] // D - 2 * J
    splits = max(1, min(triton.next_power_of_2(PROGRAMS // (B * J)), triton.cdiv(N, TILE)))
    splits = triton.next_power_of_2(splits)
    new = {"dtype": torch.float32, "device": qkv.device}
    parts = torch.empty(B * H, splits, D, **new)
    peaks, sums = torch.empty(2, B * H, splits, **new)
    out = torch.empty(B, H * D, **new)
    overlap = overlaps(qkv.device)
    launch = {"OVERLAP": overlap, "num_warps": 4, **({"launch_pdl": True} if overlap else {})}
    _split_kernel[(B * J, splits)](
        parts,
        peaks,
        sums,
        qkv,
        *cache,
        position,
        *angles,
        heads.q_norm,
        heads.k_norm,
        N,
        heads.eps,
        heads.scaling,
        H=H,
        J=J,
        D=D,
        TILE=TILE,
        SPLITS=splits,
        **launch,
    )
    _merge_kernel[(B * H,)](out, parts, peaks, sums, H=H, D=D, SPLITS=splits, ORDER=order, **launch)
    return out


@triton.jit
def _split_kernel(
    parts,
    peaks,
    sums,
    qkv,
    keys,
    values,
    position,
    cos,
    sin,
    q_norm,
    k_norm,
    N,
    eps,
    scaling,
    H: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    b, j = tl.program_id(0) // J, tl.program_id(0) % J
    split = tl.program_id(1)
    is_first = split == 0
    at = tl.load(position).to(tl.int32)
    new = qkv + b * (H + 2 * J) * D
    first, whole = tl.arange(0, D // 2), tl.arange(0, D)
    cos, sin = cos + at * D, sin + at * D
    of_head = tl.program_id(0).to(tl.int64) * N * D
    keys, values = keys + of_head, values + of_head
    kind = keys.dtype.element_ty
    key1, key2 = _rotated(new + (H + j) * D, cos, sin, k_norm, eps, D)
    value = tl.load(new + (H + J + j) * D + whole).to(kind)
    if is_first:
        tl.store(keys + at * D + first, key1.to(kind))
        tl.store(keys + at * D + D // 2 + first, key2.to(kind))
        tl.store(values + at * D + whole, value)
    key1, key2 = key1.to(kind).to(tl.float32), key2.to(kind).to(tl.float32)
    queries, peak, total, out = (), (), (), ()
    for g in tl.static_range(H // J):
        query1, query2 = _rotated(new + (j * (H // J) + g) * D, cos, sin, q_norm, eps, D)
        query1, query2 = query1 * scaling, query2 * scaling
        own = tl.sum(query1 * key1 + query2 * key2, axis=0)
        queries = queries + ((query1, query2),)
        peak = peak + (tl.where(is_first, own, float("-inf")),)
        total = total + (tl.where(is_first, 1.0, 0.0),)
        out = out + (tl.where(is_first, value.to(tl.float32), 0.0),)
    share = tl.cdiv(tl.cdiv(at, SPLITS), TILE) * TILE
    start, end = split * share, tl.minimum(at, (split + 1) * share)
    while start < end:
        place = start + tl.arange(0, TILE)
        is_seen = place < end
        rows = place[:, None] * D
        K1 = tl.load(keys + rows + first[None, :], mask=is_seen[:, None], other=0).to(tl.float32)
        K2 = tl.load(keys + rows + D // 2 + first[None, :], mask=is_seen[:, None], other=0)
        K2 = K2.to(tl.float32)
        V = tl.load(values + rows + whole[None, :], mask=is_seen[:, None], other=0).to(tl.float32)
        peak2, total2, out2 = (), (), ()
        for g in tl.static_range(H // J):
            dots = K1 * queries[g][0][None, :] + K2 * queries[g][1][None, :]
            score = tl.sum(dots, axis=1)
            score = tl.where(is_seen, score, float("-inf"))
            most = tl.maximum(peak[g], tl.max(score, axis=0))
            old, mass = tl.exp(peak[g] - most), tl.exp(score - most)
            peak2 = peak2 + (most,)
            total2 = total2 + (total[g] * old + tl.sum(mass, axis=0),)
            out2 = out2 + (out[g] * old + tl.sum(mass[:, None] * V, axis=0),)
        peak, total, out = peak2, total2, out2
        start += TILE
    for g in tl.static_range(H // J):
        head = (b * H + j * (H // J) + g) * SPLITS + split
        tl.store(peaks + head, peak[g])
        tl.store(sums + head, total[g])
        tl.store(parts + head * D + whole, out[g])


@triton.jit
def _rotated(x, cos, sin, gain, eps, D: tl.constexpr):
    """Both halves of a head, normed if there is a gain, and rotated."""
    half = tl.arange(0, D // 2)
    x1, x2 = tl.load(x + half), tl.load(x + D // 2 + half)
    if gain is not None:
        norm = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=0) / D + eps)
        x1 = x1 * norm * tl.load(gain + half).to(tl.float32)
        x2 = x2 * norm * tl.load(gain + D // 2 + half).to(tl.float32)
    cos1, cos2 = tl.load(cos + half), tl.load(cos + D // 2 + half)
    sin1, sin2 = tl.load(sin + half), tl.load(sin + D // 2 + half)
    return x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2


@triton.jit
def _merge_kernel(
    out,
    parts,
    peaks,
    sums,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    ORDER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
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
    place = column % ORDER * (H * D // ORDER) + column // ORDER
    tl.store(out + head // H * (H * D) + place, y)
