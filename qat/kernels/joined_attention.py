"""Attention inside packed documents, from queries, keys and values that lie side by side.

What lies between the two matmuls of an attention block: the RMS norm of each query and key head (in
families that have it), rotary embedding, and `qat.kernels.attention`. The gradient of all three
lies side by side too, as the matmul before them takes it.

Shapes: B sequences, S positions, H query heads, K key-value heads, D head width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.kernels.attention import MAX_TILE, packed_attention
from qat.kernels.dispatch import use_triton


def joined_fits_tile(qkv: Tensor, head_dim: int) -> bool:
    """Whether `joined_tile_attention` has a kernel for such a tensor; the reference takes any."""
    is_half = qkv.dtype in (torch.bfloat16, torch.float16)
    is_head = 32 <= head_dim <= 128 and head_dim & (head_dim - 1) == 0
    return use_triton(qkv) and is_half and is_head and qkv.shape[1] <= MAX_TILE


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
    """Norms, rotary embedding and attention, `(B, S, H, D)`: plain PyTorch, as transformers does.

    Args:
        qkv: `(B, S, (H + 2 K) * D)`: queries, keys, values.
        cos: `(B, S, D)`, whose second half repeats the first.
        sin: likewise.
        query_norm: `(D,)` weight of the queries' RMS norm, None for families without.
        key_norm: likewise for keys; both or none.
        positions: `(B, S)` int64, see `qat.kernels.attention`.
        scale: multiplies `query @ key.T`.
        eps: of the norms.
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


def joined_tile_attention(
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
    """`joined_attention` in Triton kernels; half precision only.

    What lies between is float32, rounded once before each product.
    """
    return joined_tile_operator(qkv, cos, sin, query_norm, key_norm, positions, scale, eps, heads)[
        0
    ]


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
) -> tuple[Tensor, Tensor]:
    """`joined_tile_attention`, and for its backward the heads that were turned.

    The latter are queries and keys after norm and rotary embedding, `(B, S, (H + K) * D)`; they
    have no gradient of their own.
    """
    from qat.kernels.joined_attention_triton import joined_forward

    return joined_forward(qkv, cos, sin, query_norm, key_norm, positions, scale, eps, heads)


@joined_tile_operator.register_fake
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    positions: Tensor,
    scale: float,
    eps: float,
    heads: int,
) -> tuple[Tensor, Tensor]:
    B, S, width = qkv.shape
    D = cos.shape[-1]
    return qkv.new_empty(B, S, heads, D), qkv.new_empty(B, S, (width + heads * D) // 2)


@torch.library.custom_op("qat::joined_tile_attention_backward", mutates_args=())
def _joined_tile_attention_backward(
    grad: Tensor,
    turned: Tensor,
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
    from qat.kernels.joined_attention_triton import joined_backward

    return joined_backward(
        grad, turned, qkv, cos, sin, query_norm, key_norm, positions, scale, eps, want_norms
    )


@_joined_tile_attention_backward.register_fake
def _(
    grad: Tensor,
    turned: Tensor,
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
    norms = qkv.new_empty(2 if want_norms else 0, cos.shape[-1], dtype=torch.float32)
    return qkv.new_empty(qkv.shape), norms


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scale, ctx.eps, _ = inputs
    turned = output[1]
    ctx.mark_non_differentiable(turned)
    ctx.set_materialize_grads(False)  # or turned would get one, of zeros
    ctx.save_for_backward(turned, *tensors)


def _gradients(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: None) -> tuple:
    wanted = ctx.needs_input_grad[3:5]
    turned, *tensors = ctx.saved_tensors
    d_qkv, d_norms = _joined_tile_attention_backward(
        grad, turned, *tensors, ctx.scale, ctx.eps, any(wanted)
    )
    found = (
        d_norms[row].to(norm.dtype) if is_wanted else None
        for row, (norm, is_wanted) in enumerate(zip(tensors[3:5], wanted, strict=True))
    )
    return d_qkv, None, None, *found, None, None, None, None


joined_tile_operator.register_autograd(_gradients, setup_context=_keep)
