"""Attention of short sequences: a program holds all of a sequence for one key-value head.

Both kernels read every tensor once and keep nothing between them: backward computes the weights
again, which costs less than reading them would.

Shapes: B sequences, H query heads, K key-value heads, S positions, D head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton


@triton.jit
def tile(base, offset_s, offset_d, stride_s, S):
    """`(S, D)` of one head, zero beyond S."""
    places = base + offset_s[:, None] * stride_s + offset_d[None, :]
    return tl.load(places, mask=offset_s[:, None] < S, other=0.0)


@triton.jit
def _store(base, value, offset_s, offset_d, stride_s, S):
    places = base + offset_s[:, None] * stride_s + offset_d[None, :]
    tl.store(places, value.to(base.dtype.element_ty), mask=offset_s[:, None] < S)


@triton.jit
def _softmax(scores, allowed, scale):
    """Over the allowed keys, `(S, S)` float32."""
    scores = scores * (scale * 1.4426950408889634)
    scores = tl.where(allowed, scores, -1e30)
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def _allowed_keys(positions, b, offset_s, S):
    """`(S, S)` bool; a row beyond S attends to itself, so that no row is empty."""
    position = tl.load(positions + b * S + offset_s, mask=offset_s < S, other=0)
    first = offset_s - position.to(tl.int32)
    column = offset_s[None, :]
    return (column <= offset_s[:, None]) & (column >= first[:, None])


@triton.jit
def _head_gradients(do, q, k, v, allowed, scale, dk, dv):
    """The gradient of one head's q, and `dk` and `dv` with what this head adds; float32."""
    p = _softmax(tl.dot(q, tl.trans(k)), allowed, scale)
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
    allowed = _allowed_keys(positions, b, s, S)
    for g in range(GROUP):
        head = h * GROUP + g
        q = tile(query + b * q_b + head * q_h, s, d, q_s, S)
        p = _softmax(tl.dot(q, tl.trans(k)), allowed, scale)
        o = tl.dot(p.to(v.dtype), v)
        _store(out + (b * S * HEADS + head) * D, o, s, d, HEADS * D, S)


@triton.jit
def _backward_kernel(
    grad, query, key, value, positions, d_query, d_key, d_value, scale, S,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    dq_b, dq_h, dq_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, TILE), tl.arange(0, D)
    k = tile(key + b * k_b + h * k_h, s, d, k_s, S)
    v = tile(value + b * v_b + h * v_h, s, d, v_s, S)
    allowed = _allowed_keys(positions, b, s, S)
    dk = tl.zeros((TILE, D), tl.float32)
    dv = tl.zeros((TILE, D), tl.float32)
    for g in range(GROUP):
        head = h * GROUP + g
        do = tile(grad + (b * S * HEADS + head) * D, s, d, HEADS * D, S)
        q = tile(query + b * q_b + head * q_h, s, d, q_s, S)
        dq, dk, dv = _head_gradients(do, q, k, v, allowed, scale, dk, dv)
        _store(d_query + b * dq_b + head * dq_h, dq, s, d, dq_s, S)
    _store(d_key + b * dk_b + h * dk_h, dk, s, d, dk_s, S)
    _store(d_value + b * dv_b + h * dv_h, dv, s, d, dv_s, S)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """`qat.kernels.attention.packed_attention` in one launch, `(B, S, H, D)` contiguous."""
    B, H, S, D = query.shape
    out = query.new_empty(B, S, H, D)
    tensors = [*map(_dense_rows, (query, key, value))]
    with torch.cuda.device_of(query):
        _forward_kernel[(B, key.shape[1])](
            *tensors, positions.contiguous(), out, scale, S,
            *_strides(tensors), **_constants(query, key),
        )  # fmt: skip
    return out


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scale: float,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value for `grad` `(B, S, H, D)`, contiguous.

    They are written to `out`, three tensors with dense rows; without, to new ones that lie as
    `(B, S, ., D)`.
    """
    tensors = [*map(_dense_rows, (query, key, value))]
    if out is None:
        out = [t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in tensors]
    with torch.cuda.device_of(query):
        _backward_kernel[(query.shape[0], key.shape[1])](
            grad, *tensors, positions.contiguous(), *out, scale, query.shape[2],
            *_strides(tensors), *_strides(out), **_constants(query, key),
        )  # fmt: skip
    return tuple(out)


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _strides(tensors: Sequence[Tensor]) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


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
