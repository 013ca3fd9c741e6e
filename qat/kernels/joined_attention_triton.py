"""Attention of joined queries, keys and values: a program holds a sequence's one key-value head.

A head is loaded as two halves, which rotary embedding turns against each other; `low` and `high`
are columns `[:D/2]` and `[D/2:]`. A program owns the columns of its heads, so forward and backward
read and write device memory once. Backward has three phases with its own part of the gradient as
scratch: rotated queries and keys, then their gradients, then those of what came before rotary
embedding and norm. Each phase rereads what this program just touched, which the caches still hold;
all at once would not fit into registers.

Shapes: B sequences, S positions, H query heads, K key-value heads, D head width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat.kernels.attention_triton import allowed_keys, head_gradients, softmax, tile

CHUNK = tl.constexpr(32)
"""Positions of a head that backward turns at a time."""


@triton.jit
def _halves(base, s, stride_s, S, D: tl.constexpr):
    """Columns `[:D/2]` and `[D/2:]` of one head at positions `s`, float32."""
    half = tl.arange(0, D // 2)
    low = tile(base, s, half, stride_s, S)
    high = tile(base + D // 2, s, half, stride_s, S)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _store_halves(base, low, high, s, stride_s, S, D: tl.constexpr):
    places = base + s[:, None] * stride_s + tl.arange(0, D // 2)[None, :]
    inside = s[:, None] < S
    tl.store(places, low.to(base.dtype.element_ty), mask=inside)
    tl.store(places + D // 2, high.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _angles(cos, sin, s, S, D: tl.constexpr):
    """Cosine and sine of each pair's angle, `(S, D/2)`: the second half repeats them."""
    half = tl.arange(0, D // 2)
    return tile(cos, s, half, D, S).to(tl.float32), tile(sin, s, half, D, S).to(tl.float32)


@triton.jit
def _norm_weight(norm, D: tl.constexpr):
    half = tl.arange(0, D // 2)
    low, high = tl.load(norm + half), tl.load(norm + D // 2 + half)
    return low.to(tl.float32)[None, :], high.to(tl.float32)[None, :]


@triton.jit
def _inverse_size(low, high, eps, D: tl.constexpr):
    return tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]


@triton.jit
def _turned(base, norm, cos, sin, s, stride_s, S, eps, HAS_NORM: tl.constexpr, D: tl.constexpr):
    """One head after norm and rotary embedding."""
    low, high = _halves(base, s, stride_s, S, D)
    if HAS_NORM:
        inverse = _inverse_size(low, high, eps, D)
        w_low, w_high = _norm_weight(norm, D)
        low, high = low * inverse * w_low, high * inverse * w_high
    c, z = _angles(cos, sin, s, S, D)
    return low * c - high * z, high * c + low * z


@triton.jit
def _turned_back(
    low, high, base, norm, cos, sin, s, stride_s, S, eps, HAS_NORM: tl.constexpr, D: tl.constexpr
):
    """The gradient before norm and rotary embedding of the head at `base`, and of the norm."""
    c, z = _angles(cos, sin, s, S, D)
    low, high = low * c + high * z, high * c - low * z
    d_low = tl.zeros((D // 2,), tl.float32)
    d_high = tl.zeros((D // 2,), tl.float32)
    if HAS_NORM:
        x_low, x_high = _halves(base, s, stride_s, S, D)
        inverse = _inverse_size(x_low, x_high, eps, D)
        x_low, x_high = x_low * inverse, x_high * inverse
        d_low, d_high = tl.sum(low * x_low, 0), tl.sum(high * x_high, 0)
        w_low, w_high = _norm_weight(norm, D)
        low, high = low * w_low, high * w_high
        along = ((tl.sum(low * x_low, 1) + tl.sum(high * x_high, 1)) / D)[:, None]
        low, high = (low - x_low * along) * inverse, (high - x_high * along) * inverse
    return low, high, d_low, d_high


@triton.jit
def _turn_head(
    source, out, norm, cos, sin, stride_s, S, eps,
    HAS_NORM: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    for start in range(0, TILE, min(TILE, CHUNK)):
        s = start + tl.arange(0, min(TILE, CHUNK))
        low, high = _turned(source, norm, cos, sin, s, stride_s, S, eps, HAS_NORM, D)
        _store_halves(out, low, high, s, stride_s, S, D)


@triton.jit
def _turn_head_back(
    source, gradient, norm, cos, sin, stride_s, S, eps,
    HAS_NORM: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """In place in `gradient`; returns the gradient of the norm's weight, in halves."""
    d_low = tl.zeros((D // 2,), tl.float32)
    d_high = tl.zeros((D // 2,), tl.float32)
    for start in range(0, TILE, min(TILE, CHUNK)):
        s = start + tl.arange(0, min(TILE, CHUNK))
        low, high = _halves(gradient, s, stride_s, S, D)
        low, high, more_low, more_high = _turned_back(
            low, high, source, norm, cos, sin, s, stride_s, S, eps, HAS_NORM, D
        )
        _store_halves(gradient, low, high, s, stride_s, S, D)
        d_low += more_low
        d_high += more_high
    return d_low, d_high


@triton.jit
def _forward_kernel(
    qkv, cos, sin, query_norm, key_norm, positions, out, scale, eps, S,
    H: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ROW: tl.constexpr = (H + 2 * K) * D
    kind: tl.constexpr = qkv.dtype.element_ty
    s, d = tl.arange(0, TILE), tl.arange(0, D)
    qkv, cos, sin, out = qkv + b * S * ROW, cos + b * S * D, sin + b * S * D, out + b * S * H * D
    key = qkv + (H + h) * D
    k_low, k_high = _turned(key, key_norm, cos, sin, s, ROW, S, eps, HAS_NORM, D)
    k_low, k_high = tl.trans(k_low.to(kind)), tl.trans(k_high.to(kind))
    v = tile(key + K * D, s, d, ROW, S)
    allowed = allowed_keys(positions, b, s, S)
    for g in range(H // K):
        head = h * (H // K) + g
        query = qkv + head * D
        q_low, q_high = _turned(query, query_norm, cos, sin, s, ROW, S, eps, HAS_NORM, D)
        scores = tl.dot(q_low.to(kind), k_low)
        scores = tl.dot(q_high.to(kind), k_high, scores)
        p = softmax(scores, allowed, scale)
        o = tl.dot(p.to(kind), v)
        places = out + s[:, None] * (H * D) + head * D + d[None, :]
        tl.store(places, o.to(kind), mask=s[:, None] < S)


@triton.jit
def _backward_kernel(
    grad, qkv, cos, sin, query_norm, key_norm, positions, d_qkv, d_norms, scale, eps, S,
    H: tl.constexpr, K: tl.constexpr, HAS_NORM: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    WANT_NORMS: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ROW: tl.constexpr = (H + 2 * K) * D
    kind: tl.constexpr = qkv.dtype.element_ty
    s, d = tl.arange(0, TILE), tl.arange(0, D)
    inside = s[:, None] < S
    qkv, cos, sin, grad = qkv + b * S * ROW, cos + b * S * D, sin + b * S * D, grad + b * S * H * D
    d_qkv += b * S * ROW
    first, key = h * (H // K) * D, (H + h) * D
    # rotated queries and keys, where their gradients will be
    for g in range(H // K):
        at = first + g * D
        _turn_head(qkv + at, d_qkv + at, query_norm, cos, sin, ROW, S, eps, HAS_NORM, TILE, D)
    _turn_head(qkv + key, d_qkv + key, key_norm, cos, sin, ROW, S, eps, HAS_NORM, TILE, D)
    tl.debug_barrier()  # one thread reads what another wrote
    # their gradients, one head's queries after the other
    k = tile(d_qkv + key, s, d, ROW, S)
    v = tile(qkv + key + K * D, s, d, ROW, S)
    allowed = allowed_keys(positions, b, s, S)
    dk = tl.zeros((TILE, D), tl.float32)
    dv = tl.zeros((TILE, D), tl.float32)
    places = s[:, None] * ROW + d[None, :]
    for g in range(H // K):
        at = first + g * D
        q = tile(d_qkv + at, s, d, ROW, S)
        do = tile(grad + at, s, d, H * D, S)
        dq, dk, dv = head_gradients(do, q, k, v, allowed, scale, dk, dv)
        tl.store(d_qkv + at + places, dq.to(kind), mask=inside)
    tl.store(d_qkv + key + places, dk.to(kind), mask=inside)
    tl.store(d_qkv + key + K * D + places, dv.to(kind), mask=inside)
    tl.debug_barrier()
    # back through rotary embedding and norm
    q_low = tl.zeros((D // 2,), tl.float32)
    q_high = tl.zeros((D // 2,), tl.float32)
    for g in range(H // K):
        at = first + g * D
        more_low, more_high = _turn_head_back(
            qkv + at, d_qkv + at, query_norm, cos, sin, ROW, S, eps, HAS_NORM, TILE, D
        )
        q_low += more_low
        q_high += more_high
    k_low, k_high = _turn_head_back(
        qkv + key, d_qkv + key, key_norm, cos, sin, ROW, S, eps, HAS_NORM, TILE, D
    )
    if WANT_NORMS:
        out = d_norms + (b * K + h) * 2 * D + tl.arange(0, D // 2)
        tl.store(out, q_low)
        tl.store(out + D // 2, q_high)
        tl.store(out + D, k_low)
        tl.store(out + D + D // 2, k_high)


def joined_forward(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    positions: Tensor,
    scale: float,
    eps: float,
    heads: int,
) -> Tensor:
    """See `qat.kernels.joined_attention.joined_attention`; contiguous, in one launch."""
    B, S, _ = qkv.shape
    out = qkv.new_empty(B, S, heads, cos.shape[-1])
    shape = _shape(qkv, cos, heads)
    with torch.cuda.device_of(qkv):
        _forward_kernel[(B, shape["K"])](
            *_inputs(qkv, cos, sin, query_norm, key_norm, positions), out, scale, eps, S,
            **shape, HAS_NORM=query_norm is not None,
        )  # fmt: skip
    return out


def joined_backward(
    grad: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    positions: Tensor,
    scale: float,
    eps: float,
    want_norms: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of qkv, contiguous, and of both norms, `(2, D)` float32 or empty."""
    B, S, H, D = grad.shape
    shape = _shape(qkv, cos, H)
    d_qkv = qkv.new_empty(qkv.shape)
    parts = qkv.new_empty(B * shape["K"], 2 if want_norms else 0, D, dtype=torch.float32)
    with torch.cuda.device_of(qkv):
        _backward_kernel[(B, shape["K"])](
            grad.contiguous(), *_inputs(qkv, cos, sin, query_norm, key_norm, positions),
            d_qkv, parts, scale, eps, S,
            **shape, HAS_NORM=query_norm is not None, WANT_NORMS=want_norms,
        )  # fmt: skip
    return d_qkv, parts.sum(0)


def _inputs(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    positions: Tensor,
) -> list[Tensor | None]:
    cos, sin = (angle.expand(*qkv.shape[:2], -1).contiguous() for angle in (cos, sin))
    return [qkv.contiguous(), cos, sin, query_norm, key_norm, positions.contiguous()]


def _shape(qkv: Tensor, cos: Tensor, heads: int) -> dict[str, int]:
    S, D = cos.shape[1:]
    tile_size = max(16, triton.next_power_of_2(S))
    return {
        "H": heads,
        "K": (qkv.shape[2] // D - heads) // 2,
        "TILE": tile_size,
        "D": D,
        "num_warps": 4 if tile_size <= 64 else 8,
        "num_stages": 1,
    }
