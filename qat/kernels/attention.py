"""Causal attention inside packed documents, for sequences of one tile.

A token attends to the tokens of its own document up to itself. Positions restart at 0 with each
document, so token i sees j exactly if `i - positions[i] <= j <= i`.

Shapes: B sequences, H query heads, K key-value heads, S positions, D head width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.kernels.dispatch import use_triton

MAX_TILE = 128
"""Longest sequence that one tile holds."""


def fits_tile(query: Tensor, value: Tensor) -> bool:
    """Whether `tile_attention` has a kernel for such tensors; the reference takes any."""
    B, H, S, D = query.shape
    is_half = value.dtype in (torch.bfloat16, torch.float16)
    is_shape = S <= MAX_TILE and 16 <= D <= 128 and D & (D - 1) == 0
    return use_triton(query) and is_half and is_shape and value.shape[2] == S


def tile_bytes(length: int, width: int) -> int:
    """Shared memory that backward takes for sequences of `length` and heads of `width`.

    Four tiles of heads and one of weights, in half precision: what a T4 or a GeForce card may lack.
    """
    tile = max(16, 1 << (length - 1).bit_length())
    return 2 * (4 * tile * width + tile * tile)


def document_mask(positions: Tensor) -> Tensor:
    """`(B, 1, S, S)` bool: true where the token of a row attends to that of a column."""
    S = positions.shape[1]
    places = torch.arange(S, device=positions.device)
    first = places - positions
    return ((places <= places[:, None]) & (places >= first[..., None]))[:, None]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Attention inside documents, `(B, S, H, D)`: plain PyTorch over the whole `(S, S)` mask.

    Equals `F.scaled_dot_product_attention(query, key, value, document_mask(positions))` with its
    heads and positions transposed.

    Args:
        query: `(B, H, S, D)`.
        key: `(B, K, S, D)`; K divides H.
        value: `(B, K, S, D)`.
        positions: `(B, S)` int64.
        scale: multiplies `query @ key.T`.
    """
    mask = document_mask(positions)
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(1, 2)


@torch.library.custom_op("qat::tile_attention", mutates_args=())
def tile_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """As `packed_attention`, by one kernel that reads each tensor once; half precision only."""
    from qat.kernels.attention_triton import attention_forward

    return attention_forward(query, key, value, positions, scale)


@tile_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float) -> Tensor:
    B, H, S, D = query.shape
    return query.new_empty(B, S, H, D)


@torch.library.custom_op("qat::tile_attention_backward", mutates_args=())
def _tile_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from qat.kernels.attention_triton import attention_backward

    return attention_backward(grad, query, key, value, positions, scale)


@_tile_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(_heads_last(tensor) for tensor in (query, key, value))


def _heads_last(like: Tensor) -> Tensor:
    """An empty `(B, H, S, D)` tensor that lies as `(B, S, H, D)`."""
    B, H, S, D = like.shape
    return like.new_empty(B, S, H, D).transpose(1, 2)


def _keep_inputs(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple:
    # the (S, S) weights are computed again: nothing but the inputs is kept
    found = _tile_attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale)
    return *found, None, None


tile_attention.register_autograd(_gradients, setup_context=_keep_inputs)
