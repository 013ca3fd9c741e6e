"""Attention of short sequences: a program holds all of a sequence for one key-value head.

Both kernels read every tensor once and keep nothing between them: backward computes the weights
again, which costs less than reading them would.

Shapes: B sequences, H query heads, K key-value heads, S positions, D head width.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tile(base, offset_s, offset_d, stride_s, S):
    """`(S, D)` of one head, zero beyond S."""
    places = base + offset_s[:, None] * stride_s + offset_d[None, :]
    return tl.load(places, mask=offset_s[:, None] < S, other=0.0)


@triton.jit
def softmax(scores, allowed, scale):
    """Over the allowed keys, `(S, S)` float32."""
    scores = scores * (scale * 1.4426950408889634)
    scores = tl.where(allowed, scores, -1e30)
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def allowed_keys(positions, b, offset_s, S):
    """`(S, S)` bool; a row beyond S attends to itself, so that no row is empty."""
    position = tl.load(positions + b * S + offset_s, mask=offset_s < S, other=0)
    first = offset_s - position.to(tl.int32)
    column = offset_s[None, :]
    return (column <= offset_s[:, None]) & (column >= first[:, None])


@triton.jit
def head_gradients(do, q, k, v, allowed, scale, dk, dv):
    """The gradient of one head's q, and `dk` and `dv` with what this head adds; float32."""
    p = softmax(tl.dot(q, tl.trans(k)), allowed, scale)
    dv += tl.dot(tl.trans(p.to(do.dtype)), do)
    dp = tl.dot(do, tl.trans(v))
    ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * scale
    ds = ds.to(q.dtype)
    dk += tl.dot(tl.trans(ds), q)
    return tl.dot(ds, k), dk, dv


@triton.jit
def _forward_kernel(
    query, key, value, positions, out, scale, S,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, TILE), tl.arange(0, D)
    k = tile(key + b * k_b + h * k_h, s, d, k_s, S)
    v = tile(value + b * v_b + h * v_h, s, d, v_s, S)
    allowed = allowed_keys(positions, b, s, S)
    for g in range(GROUP):
        head = h * GROUP + g
        q = tile(query + b * q_b + head * q_h, s, d, q_s, S)
        p = softmax(tl.dot(q, tl.trans(k)), allowed, scale)
        o = tl.dot(p.to(v.dtype), v)
        places = out + ((b * S + s[:, None]) * HEADS + head) * D + d[None, :]
        tl.store(places, o.to(out.dtype.element_ty), mask=s[:, None] < S)


@triton.jit
def _backward_kernel(
    grad, query, key, value, positions, d_query, d_key, d_value, scale, S,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, TILE), tl.arange(0, D)
    inside = s[:, None] < S
    k = tile(key + b * k_b + h * k_h, s, d, k_s, S)
    v = tile(value + b * v_b + h * v_h, s, d, v_s, S)
    allowed = allowed_keys(positions, b, s, S)
    dk = tl.zeros((TILE, D), tl.float32)
    dv = tl.zeros((TILE, D), tl.float32)
    for g in range(GROUP):
        head = h * GROUP + g
        places = ((b * S + s[:, None]) * HEADS + head) * D + d[None, :]
        do = tl.load(grad + places, mask=inside, other=0.0)
        q = tile(query + b * q_b + head * q_h, s, d, q_s, S)
        dq, dk, dv = head_gradients(do, q, k, v, allowed, scale, dk, dv)
        tl.store(d_query + places, dq.to(d_query.dtype.element_ty), mask=inside)
    places = ((b * S + s[:, None]) * (HEADS // GROUP) + h) * D + d[None, :]
    tl.store(d_key + places, dk.to(d_key.dtype.element_ty), mask=inside)
    tl.store(d_value + places, dv.to(d_value.dtype.element_ty), mask=inside)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """`qat.kernels.attention.packed_attention` in one launch, `(B, S, H, D)` contiguous."""
    B, H, S, D = query.shape
    out = query.new_empty(B, S, H, D)
    tensors = (query, key, value)
    _forward_kernel[(B, key.shape[1])](
        *map(_dense_rows, tensors), positions.contiguous(), out, scale, S,
        *_strides(tensors), **_constants(query, key),
    )  # fmt: skip
    return out


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value for `grad` `(B, S, H, D)`, contiguous."""
    B, H, S, D = query.shape
    K = key.shape[1]
    d_query = query.new_empty(B, S, H, D)
    d_key, d_value = key.new_empty(B, S, K, D), value.new_empty(B, S, K, D)
    tensors = (query, key, value)
    _backward_kernel[(B, K)](
        grad, *map(_dense_rows, tensors), positions.contiguous(), d_query, d_key, d_value,
        scale, S, *_strides(tensors), **_constants(query, key),
    )  # fmt: skip
    return tuple(found.transpose(1, 2) for found in (d_query, d_key, d_value))


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _strides(tensors: tuple[Tensor, ...]) -> list[int]:
    return [stride for tensor in tensors for stride in _dense_rows(tensor).stride()[:3]]


def _constants(query: Tensor, key: Tensor) -> dict[str, int]:
    H, S, D = query.shape[1:]
    tile = max(16, triton.next_power_of_2(S))
    return {
        "HEADS": H,
        "GROUP": H // key.shape[1],
        "TILE": tile,
        "D": D,
        "num_warps": 4 if tile <= 64 else 8,
        "num_stages": 1,
    }
