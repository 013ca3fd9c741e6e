"""Attention of joined queries, keys and values: norms and rotary embedding, then attention.

A kernel each, so that each is bound by its bytes; one that does all is bound by its registers.

Shapes: B sequences, S positions, H query heads, K key-value heads, D head width.
"""

import torch
from torch import Tensor

from qat.kernels.attention import attention_backward, attention_forward
from qat.kernels.rotary_triton import turn_heads, turn_heads_back


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
) -> tuple[Tensor, Tensor]:
    """See `qat.kernels.joined_attention.joined_tile_attention`, whose operator this is."""
    qkv, D = qkv.contiguous(), cos.shape[-1]
    turned = turn_heads(qkv, *_expanded(qkv, cos, sin), query_norm, key_norm, eps, heads)
    query, key, value = _parts(turned, qkv, heads, D)
    return attention_forward(query, key, value, positions, scale), turned


def joined_backward(
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
    """The gradients of qkv, contiguous, and of both norms, `(2, D)` float32 or empty."""
    H, D = grad.shape[2:]
    qkv = qkv.contiguous()
    d_qkv = torch.empty_like(qkv)
    # the gradients of what is turned lie where those of qkv will, until they are turned back
    parts, d_parts = _parts(turned, qkv, H, D), _parts(d_qkv, d_qkv, H, D)
    attention_backward(grad.contiguous(), *parts, positions, scale, out=d_parts)
    d_norms = turn_heads_back(
        d_qkv, qkv, *_expanded(qkv, cos, sin), query_norm, key_norm, eps, H, want_norms
    )
    return d_qkv, d_norms


def _parts(turned: Tensor, qkv: Tensor, heads: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of `turned`, values of `qkv`, as attention takes them: `(B, ., S, D)`."""
    turned, qkv = (joined.unflatten(-1, (-1, D)).transpose(1, 2) for joined in (turned, qkv))
    keys = (qkv.shape[1] - heads) // 2
    return turned[:, :heads], turned[:, heads : heads + keys], qkv[:, heads + keys :]


def _expanded(qkv: Tensor, *angles: Tensor) -> list[Tensor]:
    return [angle.expand(*qkv.shape[:2], -1).contiguous() for angle in angles]
