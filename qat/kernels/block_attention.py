"""Causal attention inside packed documents, block by block, for rows longer than one tile.

    out = softmax(scale * query @ key.T) @ value      over the keys that `first <= j <= i` allows
    lse = log2(sum(exp2(scale * log2(e) * query @ key.T)))

Token i of a row sees the tokens of its own document up to itself, as in `qat.kernels.attention`. A
program of the forward pass takes `BLOCK` queries of one head and walks over the keys from the first
of its documents to the diagonal; blocks of other documents and of later tokens cost nothing, where
a kernel with a mask computes all of them. Key-value heads are read as they are, by the whole group
of query heads that share them.

A program of the backward pass takes the same block twice, once as keys and once as queries: the
fewer blocks see it, the more it sees, so that all programs have equally much to do. Sums are in
registers, no program adds to another's results, and the same input gives the same gradient.

Shapes: B sequences, H query heads, K key-value heads, S positions, D head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qat.kernels.attention import BLOCK, store, strides, tile
from qat.kernels.dispatch import tl, triton

WARPS, STAGES = 4, 2
"""Warps of a program, and tiles of its walk that are in shared memory at a time."""


@triton.jit
def _first_keys(positions, b, s, S):
    # a row beyond S is a document of its own, so that no row is empty
    position = tl.load(positions + b * S + s, mask=s < S, other=0)
    return s - position.to(tl.int32)


@triton.jit
def _allowed(first, query, key):
    return (key <= query) & (key >= first)


@triton.jit
def _forward_kernel(
    query, key, value, positions, out, lse, scale, S,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    block, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    h = head // GROUP
    one, d = tl.arange(0, BLOCK), tl.arange(0, D)
    s = block * BLOCK + one
    first = _first_keys(positions, b, s, S)
    q = tile(query + b * q_b + head * q_h, s, d, q_s, S)
    peak = tl.full((BLOCK,), -1e30, tl.float32)  # finite, so that no difference is NaN
    total = tl.zeros((BLOCK,), tl.float32)
    o = tl.zeros((BLOCK, D), tl.float32)
    for start in range(tl.min(first, 0) // BLOCK * BLOCK, (block + 1) * BLOCK, BLOCK):
        j = start + one
        k = tile(key + b * k_b + h * k_h, j, d, k_s, S)
        v = tile(value + b * v_b + h * v_h, j, d, v_s, S)
        # log2(e): the hardware has exp2
        scores = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
        scores = tl.where(_allowed(first[:, None], s[:, None], j[None, :]), scores, -1e30)
        # what a row sums while nothing is allowed is multiplied by 0 at its own document
        higher = tl.maximum(peak, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(peak - higher)
        total = total * rescale + tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v, o * rescale[:, None])
        peak = higher
    store(out + (b * S * HEADS + head) * D, o / total[:, None], s, d, HEADS * D, S)
    tl.store(lse + (b * HEADS + head) * S + s, peak + tl.log2(total), mask=s < S)


@triton.jit
def _delta_kernel(
    grad, out, delta, S, HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Write `sum(out * grad)` of each head's rows, which equals `sum(p * dp)`."""
    head, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    s, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    do = tile(grad + (b * S * HEADS + head) * D, s, d, HEADS * D, S).to(tl.float32)
    o = tile(out + (b * S * HEADS + head) * D, s, d, HEADS * D, S).to(tl.float32)
    tl.store(delta + (b * HEADS + head) * S + s, tl.sum(do * o, 1), mask=s < S)


@triton.jit
def _backward_kernel(
    grad, query, key, value, positions, lse, delta, d_query, d_key, d_value, scale, S,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    dq_b, dq_h, dq_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    one, d = tl.arange(0, BLOCK), tl.arange(0, D)
    rate = scale * 1.4426950408889634
    s = block * BLOCK + one
    k = tile(key + b * k_b + h * k_h, s, d, k_s, S)
    v = tile(value + b * v_b + h * v_h, s, d, v_s, S)

    # as keys: `first` never falls along a row, so the queries that see a block are neighbours
    row = tl.arange(0, ROW)
    is_seeing = (_first_keys(positions, b, row, S) < (block + 1) * BLOCK) & (row < S)
    stop = tl.sum(is_seeing.to(tl.int32), 0)
    dk = tl.zeros((BLOCK, D), tl.float32)
    dv = tl.zeros((BLOCK, D), tl.float32)
    # one loop over the query heads that share k and v, so that loads run ahead across heads
    count = tl.cdiv(stop - block * BLOCK, BLOCK)
    for step in range(GROUP * count):
        head = h * GROUP + step // count
        i = (block + step % count) * BLOCK + one
        first = _first_keys(positions, b, i, S)
        q = tile(query + b * q_b + head * q_h, i, d, q_s, S)
        do = tile(grad + (b * S * HEADS + head) * D, i, d, HEADS * D, S)
        peak = tl.load(lse + (b * HEADS + head) * S + i, mask=i < S, other=0.0)
        sums = tl.load(delta + (b * HEADS + head) * S + i, mask=i < S, other=0.0)
        # transposed, so that the weights are a product's left factor from registers
        scores = tl.dot(k, tl.trans(q)) * rate - peak[None, :]
        allowed = _allowed(first[None, :], i[None, :], s[:, None])
        p = tl.exp2(tl.where(allowed, scores, -1e30))
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - sums[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    store(d_key + b * dk_b + h * dk_h, dk * scale, s, d, dk_s, S)
    store(d_value + b * dv_b + h * dv_h, dv, s, d, dv_s, S)

    # as queries
    first = _first_keys(positions, b, s, S)
    begin = tl.min(first, 0) // BLOCK * BLOCK
    for g in range(GROUP):
        head = h * GROUP + g
        q = tile(query + b * q_b + head * q_h, s, d, q_s, S)
        do = tile(grad + (b * S * HEADS + head) * D, s, d, HEADS * D, S)
        peak = tl.load(lse + (b * HEADS + head) * S + s, mask=s < S, other=0.0)
        sums = tl.load(delta + (b * HEADS + head) * S + s, mask=s < S, other=0.0)
        dq = tl.zeros((BLOCK, D), tl.float32)
        for start in range(begin, (block + 1) * BLOCK, BLOCK):
            j = start + one
            k = tile(key + b * k_b + h * k_h, j, d, k_s, S)
            v = tile(value + b * v_b + h * v_h, j, d, v_s, S)
            scores = tl.dot(q, tl.trans(k)) * rate - peak[:, None]
            allowed = _allowed(first[:, None], s[:, None], j[None, :])
            p = tl.exp2(tl.where(allowed, scores, -1e30))
            ds = p * (tl.dot(do, tl.trans(v)) - sums[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq)
        store(d_query + b * dq_b + head * dq_h, dq * scale, s, d, dq_s, S)


def block_forward(
    tensors: Sequence[Tensor], positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention `(B, S, H, D)` contiguous, and `lse` `(B, H, S)` float32.

    Args:
        tensors: queries `(B, H, S, D)`, keys and values `(B, K, S, D)`, with dense rows.
        positions: `(B, S)` int64, contiguous.
        scale: factor of `query @ key.T`.
    """
    query, key, _ = tensors
    B, H, S, D = query.shape
    out = query.new_empty(B, S, H, D)
    lse = query.new_empty(B, H, S, dtype=torch.float32)
    with torch.cuda.device_of(query):
        _forward_kernel[(triton.cdiv(S, BLOCK), H, B)](
            *tensors, positions, out, lse, scale, S, *strides(tensors),
            HEADS=H, GROUP=H // key.shape[1], BLOCK=BLOCK, D=D, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out, lse


def block_backward(
    grad: Tensor,
    tensors: Sequence[Tensor],
    positions: Tensor,
    forward: tuple[Tensor, Tensor],
    scale: float,
    found: Sequence[Tensor],
) -> None:
    """Write the gradients of queries, keys and values for `grad` `(B, S, H, D)`, contiguous.

    They go to `found`, three tensors with dense rows. `forward` is what `block_forward` returned.
    """
    query, key, _ = tensors
    B, H, S, D = query.shape
    out, lse = forward
    delta = torch.empty_like(lse)
    blocks, K, row = triton.cdiv(S, BLOCK), key.shape[1], triton.next_power_of_2(S)
    sizes = {"HEADS": H, "BLOCK": BLOCK, "D": D, "num_warps": WARPS}
    with torch.cuda.device_of(query):
        _delta_kernel[(blocks, H, B)](grad, out, delta, S, **sizes)
        _backward_kernel[(blocks, K, B)](
            grad, *tensors, positions, lse, delta, *found, scale, S, *strides(tensors),
            *strides(found), GROUP=H // K, ROW=row, num_stages=STAGES, **sizes,
        )  # fmt: skip
