"""Attention inside packed documents, from contiguous (joined) queries, keys and values.

    y = x / rms(x) * weight                                 of each query and key head
    out = [y_low cos - y_high sin, y_high cos + y_low sin]  columns [:D/2] and [D/2:]
    attention(queries, keys, values)                        `qat.kernels.attention`

This is everything between the two matmuls of an attention block; some families have no norm. The
gradient of all three inputs is joined too, as the matmul before them expects it. On a GPU norms and
rotary embedding are a kernel of their own, bound by memory (0.99 of the copy bandwidth of an H200):
fused into the attention kernels they spill registers, 1.03 ms per layer instead of 0.45 + 0.32.
Rows longer than one tile are attended to block by block (`qat.kernels.block_attention`).

Shapes: B sequences, S positions, T = B*S, H query heads, K key-value heads, D head width.
"""

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.kernels.attention import (
    MAX_TILE,
    attention_backward,
    attention_forward,
    packed_attention,
    tile,
)
from qat.kernels.dispatch import tl, triton, use_triton

TILE_SIZE = 2048
"""Elements per tile of a head: 16 bytes of each half for each of 128 threads."""
MAX_ROW = 1024
"""The longest row that is attended to block by block: backward reads all positions of its row."""
MAX_WIDTH = 128
"""The widest head: in such, forward and backward of a layer take about half the time of PyTorch's
attention with a mask (16 heads over 8, 64 x 512 tokens, one H200)."""
MAX_HEADS = 4
"""The most heads that a program rotates, either all queries or all keys.

They share one load of the angles, and one row of the norm's gradient.
"""


def joined_fits_tile(qkv: Tensor, head_dim: int) -> bool:
    """Return whether `joined_tile_attention` supports this tensor; the reference takes any."""
    is_half = qkv.dtype in (torch.bfloat16, torch.float16)
    is_head = 32 <= head_dim <= MAX_WIDTH and head_dim & (head_dim - 1) == 0
    return use_triton(qkv, __name__) and is_half and is_head and qkv.shape[1] <= MAX_ROW


def joined_attention(
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
    """Return norms, rotary embedding and attention, `(B, S, H, D)`, in plain PyTorch.

    It computes what transformers does.

    Args:
        qkv: `(B, S, (H + 2 K) * D)`: queries, keys, values.
        cos: `(B, S, D)`, whose second half repeats the first.
        sin: like `cos`.
        query_norm: `(D,)` weight of the queries' RMS norm, None for families without one.
        key_norm: the same for keys; both or none.
        positions: `(B, S)` int64, see `qat.kernels.attention`.
        scale: factor of `query @ key.T`.
        eps: epsilon of the norms.
        heads: H.
    """
    D = cos.shape[-1]
    every = qkv.unflatten(-1, (-1, D)).transpose(1, 2)
    keys = (every.shape[1] - heads) // 2
    query, key, value = every.split([heads, keys, keys], dim=1)
    query = _rotated(_normed(query, query_norm, eps), cos, sin)
    key = _rotated(_normed(key, key_norm, eps), cos, sin)
    query, key = query.to(value.dtype), key.to(value.dtype)
    return packed_attention(query, key, value, positions, scale)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    exact = x if x.dtype == torch.float64 else x.float()
    return weight * F.rms_norm(exact, x.shape[-1:], eps=eps).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]


def joined_tile_attention(*arguments: Tensor | float | None) -> Tensor:
    """Do what `joined_attention` does, with its arguments, in Triton kernels; half precision only.

    Intermediate results are float32, rounded once before each product.
    """
    return joined_tile_operator(*arguments)[0]


@torch.library.custom_op("qat::joined_tile_attention", mutates_args=())
def joined_tile_operator(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    positions: Tensor,
    scale: float,
    eps: float,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `joined_tile_attention`, and for its backward the rotated heads and `lse`.

    These are queries and keys after norm and rotary embedding, `(B, S, (H + K) * D)`, and what
    `block_forward` returns, empty for rows of one tile; none has a gradient of its own.
    """
    qkv, D = qkv.contiguous(), cos.shape[-1]
    shape = _shape(qkv, cos, heads)
    turned = qkv.new_empty(*qkv.shape[:2], (heads + shape["K"]) * D)
    with torch.cuda.device_of(qkv):
        _turn_kernel[_grid(qkv, shape)](
            qkv, *_expanded(qkv, cos, sin), query_norm, key_norm, turned, eps,
            qkv.shape[:2].numel(), **shape, HAS_NORM=query_norm is not None,
        )  # fmt: skip
    parts = _parts(turned, qkv, heads, D)
    if qkv.shape[1] > MAX_TILE:
        from qat.kernels.block_attention import block_forward  # only where rows are long

        out, lse = block_forward(parts, positions.contiguous(), scale)
        return out, turned, lse
    return attention_forward(*parts, positions, scale), turned, _empty_lse(qkv, heads)


@joined_tile_operator.register_fake
def _(qkv: Tensor, cos: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    (B, S, width), D, heads = qkv.shape, cos.shape[-1], rest[-1]
    turned = qkv.new_empty(B, S, (width + heads * D) // 2)
    return qkv.new_empty(B, S, heads, D), turned, _empty_lse(qkv, heads)


def _empty_lse(qkv: Tensor, heads: int) -> Tensor:
    B, S = qkv.shape[:2]
    return qkv.new_empty(B, heads, S if S > MAX_TILE else 0, dtype=torch.float32)


@torch.library.custom_op("qat::joined_tile_attention_backward", mutates_args=())
def _joined_tile_attention_backward(
    grad: Tensor,
    out: Tensor | None,
    turned: Tensor,
    lse: Tensor,
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
    """Return the gradients of qkv, contiguous, and of both norms, `(2, D)` float32 or empty.

    `out` and `lse` are those of the forward pass; rows of one tile need no `out`.
    """
    H, D = grad.shape[2:]
    qkv = qkv.contiguous()
    d_qkv = torch.empty_like(qkv)
    # gradients of rotated heads are written to the memory of d_qkv, then rotated back in place
    parts, d_parts = _parts(turned, qkv, H, D), _parts(d_qkv, d_qkv, H, D)
    grad, positions = grad.contiguous(), positions.contiguous()
    if lse.numel():
        from qat.kernels.block_attention import block_backward  # only where rows are long

        block_backward(grad, parts, positions, (cast(Tensor, out), lse), scale, d_parts)
    else:
        attention_backward(grad, *parts, positions, scale, out=d_parts)
    shape = _shape(qkv, cos, H)
    (programs,) = grid = _grid(qkv, shape)
    # one row per program, summed afterwards
    sums = torch.empty(programs if want_norms else 0, D, device=qkv.device, dtype=torch.float32)
    with torch.cuda.device_of(qkv):
        _turn_back_kernel[grid](
            qkv, *_expanded(qkv, cos, sin), query_norm, key_norm, d_qkv, sums, eps,
            qkv.shape[:2].numel(), **shape, HAS_NORM=query_norm is not None, WANT_NORMS=want_norms,
        )  # fmt: skip
    if not want_norms:
        return d_qkv, sums
    queries, keys = H // shape["HEADS"], shape["K"] // shape["HEADS"]
    of_query, of_key = sums.unflatten(0, (-1, queries + keys)).split([queries, keys], dim=1)
    return d_qkv, torch.stack([of_query.sum((0, 1)), of_key.sum((0, 1))])


@_joined_tile_attention_backward.register_fake
def _(
    grad: Tensor, out: Tensor | None, turned: Tensor, lse: Tensor, qkv: Tensor, cos: Tensor,
    *rest: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    norms = qkv.new_empty(2 if rest[-1] else 0, cos.shape[-1], dtype=torch.float32)
    return qkv.new_empty(qkv.shape), norms


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scale, ctx.eps, _ = inputs
    out, *inner = output
    ctx.mark_non_differentiable(*inner)
    ctx.set_materialize_grads(False)  # otherwise `turned` would get a gradient of zeros
    ctx.save_for_backward(out if out.shape[1] > MAX_TILE else None, *inner, *tensors)


def _gradients(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, *_: None) -> tuple:
    wanted = ctx.needs_input_grad[3:5]
    tensors = ctx.saved_tensors
    d_qkv, d_norms = _joined_tile_attention_backward(
        grad, *tensors, ctx.scale, ctx.eps, any(wanted)
    )
    found = (
        d_norms[row].to(norm.dtype) if is_wanted else None
        for row, (norm, is_wanted) in enumerate(zip(tensors[6:8], wanted, strict=True))
    )
    return d_qkv, None, None, *found, None, None, None, None


joined_tile_operator.register_autograd(_gradients, setup_context=_keep)


@triton.jit
def _place(T, PARTS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    # a program's first token (int64: offsets may exceed 2**31), the tokens left, its first head
    first = (tl.program_id(0) // PARTS).to(tl.int64) * TOKENS
    return first, (T - first).to(tl.int32), tl.program_id(0) % PARTS * HEADS


@triton.jit
def _halves(base, t, stride_t, T, D: tl.constexpr):
    # columns [:D/2] and [D/2:] of one head, each `(TOKENS, D/2)` float32
    half = tl.arange(0, D // 2)
    low = tile(base, t, half, stride_t, T)
    high = tile(base + D // 2, t, half, stride_t, T)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _store_halves(base, low, high, t, stride_t, T, D: tl.constexpr):
    places = base + t[:, None] * stride_t + tl.arange(0, D // 2)[None, :]
    inside = t[:, None] < T
    tl.store(places, low.to(base.dtype.element_ty), mask=inside)
    tl.store(places + D // 2, high.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _angles(cos, sin, t, T, D: tl.constexpr):
    # cosine and sine of each pair's angle, `(TOKENS, D/2)`; the second half repeats the first
    half = tl.arange(0, D // 2)
    return tile(cos, t, half, D, T).to(tl.float32), tile(sin, t, half, D, T).to(tl.float32)


@triton.jit
def _norm_weight(query_norm, key_norm, is_key, D: tl.constexpr):
    norm = key_norm if is_key else query_norm
    half = tl.arange(0, D // 2)
    low, high = tl.load(norm + half), tl.load(norm + D // 2 + half)
    return low.to(tl.float32)[None, :], high.to(tl.float32)[None, :]


@triton.jit
def _inverse_size(low, high, eps, D: tl.constexpr):
    return tl.rsqrt(tl.sum(low * low + high * high, 1) / D + eps)[:, None]


@triton.jit
def _turn_kernel(
    qkv, cos, sin, query_norm, key_norm, out, eps, T,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = (H + 2 * K) * D
    OUT_ROW: tl.constexpr = (H + K) * D
    first, left, head = _place(T, (H + K) // HEADS, HEADS, TOKENS)
    t = tl.arange(0, TOKENS)
    qkv += first * ROW + head * D
    out += first * OUT_ROW + head * D
    c, z = _angles(cos + first * D, sin + first * D, t, left, D)
    if HAS_NORM:
        w_low, w_high = _norm_weight(query_norm, key_norm, head >= H, D)
    for h in tl.static_range(HEADS):
        low, high = _halves(qkv + h * D, t, ROW, left, D)
        if HAS_NORM:
            inverse = _inverse_size(low, high, eps, D)
            low, high = low * inverse * w_low, high * inverse * w_high
        _store_halves(out + h * D, low * c - high * z, high * c + low * z, t, OUT_ROW, left, D)


@triton.jit
def _turn_back_kernel(
    qkv, cos, sin, query_norm, key_norm, d_qkv, d_norms, eps, T,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, WANT_NORMS: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = (H + 2 * K) * D
    first, left, head = _place(T, (H + K) // HEADS, HEADS, TOKENS)
    t = tl.arange(0, TOKENS)
    qkv += first * ROW + head * D
    d_qkv += first * ROW + head * D
    c, z = _angles(cos + first * D, sin + first * D, t, left, D)
    d_low = tl.zeros((TOKENS, D // 2), tl.float32)
    d_high = tl.zeros((TOKENS, D // 2), tl.float32)
    if HAS_NORM:
        w_low, w_high = _norm_weight(query_norm, key_norm, head >= H, D)
    for h in tl.static_range(HEADS):
        low, high = _halves(d_qkv + h * D, t, ROW, left, D)
        low, high = low * c + high * z, high * c - low * z
        if HAS_NORM:
            x_low, x_high = _halves(qkv + h * D, t, ROW, left, D)
            inverse = _inverse_size(x_low, x_high, eps, D)
            x_low, x_high = x_low * inverse, x_high * inverse
            if WANT_NORMS:
                d_low += low * x_low
                d_high += high * x_high
            low, high = low * w_low, high * w_high
            # remove the component along x: it only changes the size, which the norm cancels
            along = (tl.sum(low * x_low + high * x_high, 1) / D)[:, None]
            low, high = (low - x_low * along) * inverse, (high - x_high * along) * inverse
        _store_halves(d_qkv + h * D, low, high, t, ROW, left, D)
    if WANT_NORMS:
        places = d_norms + tl.program_id(0).to(tl.int64) * D + tl.arange(0, D // 2)
        tl.store(places, tl.sum(d_low, 0))
        tl.store(places + D // 2, tl.sum(d_high, 0))


def _grid(qkv: Tensor, shape: dict[str, int]) -> tuple[int]:
    # a program takes HEADS heads, all queries or all keys, of TOKENS tokens
    parts = (shape["H"] + shape["K"]) // shape["HEADS"]
    return (triton.cdiv(qkv.shape[:2].numel(), shape["TOKENS"]) * parts,)


def _shape(qkv: Tensor, cos: Tensor, heads: int) -> dict[str, int]:
    D = cos.shape[-1]
    keys = (qkv.shape[2] // D - heads) // 2
    per_program = {"HEADS": math.gcd(keys, MAX_HEADS), "TOKENS": TILE_SIZE // D, "num_warps": 4}
    return {"H": heads, "K": keys, "D": D, **per_program}


def _parts(turned: Tensor, qkv: Tensor, heads: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys of `turned` and values of `qkv`, `(B, ., S, D)`."""
    turned, qkv = (joined.unflatten(-1, (-1, D)).transpose(1, 2) for joined in (turned, qkv))
    keys = (qkv.shape[1] - heads) // 2
    return turned[:, :heads], turned[:, heads : heads + keys], qkv[:, heads + keys :]


def _expanded(qkv: Tensor, *angles: Tensor) -> list[Tensor]:
    return [angle.expand(*qkv.shape[:2], -1).contiguous() for angle in angles]
