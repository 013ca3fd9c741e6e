"""Causal attention inside packed documents, for sequences of one tile.

A token attends to the tokens of its own document up to itself. Positions restart at 0 with each
document, so token i sees j exactly if `i - positions[i] <= j <= i`.

A program holds a whole sequence of one key-value head, `TILE` positions, and reads every tensor
once. At 64 positions, forward and backward of a layer took 0.45 ms, cuDNN's 1.25 (one H200, 512 x
64 tokens, 16 heads over 8).

Shapes: B sequences, H query heads, K key-value heads, S positions, D head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.backend.device import on
from qat.kernels.dispatch import tl, triton, use_triton

MAX_TILE = 128
"""The longest sequence of one tile; backward uses up to 197 kB of shared memory (`tile_bytes`)."""
BLOCK = 64  # positions of a tile of `qat.kernels.block_attention`, which takes longer sequences


def fits_tile(query: Tensor, value: Tensor) -> bool:
    """Return whether `tile_attention` has a kernel for these tensors; the reference takes any."""
    B, H, S, D = query.shape
    is_half = value.dtype in (torch.bfloat16, torch.float16)
    is_shape = S <= MAX_TILE and 16 <= D <= 128 and D & (D - 1) == 0
    return use_triton(query, __name__) and is_half and is_shape and value.shape[2] == S


def tile_bytes(length: int, width: int) -> int:
    """Return the bytes of shared memory that backward uses at most for this length and head width.

    These are five tiles of heads and one of weights, in half precision; a GeForce card may not have
    as much. Hopper needs one tile of heads less from 64 positions on.
    """
    tile = max(16, 1 << (length - 1).bit_length())  # `tl.dot` takes at least 16
    return 2 * (5 * tile * width + tile * tile)


def has_room(length: int, width: int, device: torch.device) -> bool:
    """Return whether a tile, or a block of longer rows, fits in the device's memories.

    Before Ampere, Triton (3.7) has no products on tensor cores and widens their factors in shared
    memory: on a T4, backward at 64 x 64 would take twice `tile_bytes`, and spill 3 KB a thread.
    """
    gpu, length = on(device), length if length <= MAX_TILE else BLOCK
    is_held = gpu.has_bf16() and tile_bytes(length, width) <= gpu.shared_memory_bytes()
    # the largest tile would take 704 of the 512 columns of a B200's tensor memory
    return is_held and (min(length, width) <= MAX_TILE // 2 or not gpu.has_tensor_memory())


def document_mask(positions: Tensor) -> Tensor:
    """Return `(B, 1, S, S)` bool: true if the token of a row attends to that of a column."""
    S = positions.shape[1]
    places = torch.arange(S, device=positions.device)
    first = places - positions
    return ((places <= places[:, None]) & (places >= first[..., None]))[:, None]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Return attention inside documents, `(B, S, H, D)`, in plain PyTorch with an `(S, S)` mask.

    Equals `F.scaled_dot_product_attention(query, key, value, document_mask(positions))` with its
    heads and positions transposed: queries `(B, H, S, D)`, keys and values `(B, K, S, D)` where K
    divides H, positions `(B, S)` int64.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    key, value, mask = in_whole_tiles(key, value, document_mask(positions))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(1, 2)


def in_whole_tiles(
    key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys, values and mask, on a GPU with unread keys at the end of a half-empty tile.

    There cuDNN's backward pass overflows under a mask: pytorch/pytorch#196678, torch 2.11 and 2.13.
    """
    if mask is None or not key.is_cuda or key.shape[2] % 128 != 64 or not torch.is_grad_enabled():
        return key, value, mask
    unread = False if mask.dtype == torch.bool else -torch.inf
    mask = F.pad(mask.expand(*mask.shape[:-1], key.shape[2]), (0, 64), value=unread)
    return F.pad(key, (0, 0, 0, 64)), F.pad(value, (0, 0, 0, 64)), mask


@torch.library.custom_op("qat::tile_attention", mutates_args=())
def tile_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Do what `packed_attention` does in one kernel; half precision only."""
    return attention_forward(query, key, value, positions, scale)


@tile_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float) -> Tensor:
    B, H, S, D = query.shape
    return query.new_empty(B, S, H, D)


@torch.library.custom_op("qat::tile_attention_backward", mutates_args=())
def _tile_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return attention_backward(grad, query, key, value, positions, scale)


@_tile_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(_heads_last(tensor) for tensor in (query, key, value))


def _heads_last(like: Tensor) -> Tensor:
    """Allocate a `(B, H, S, D)` tensor with the memory layout of `(B, S, H, D)`."""
    B, H, S, D = like.shape
    return like.new_empty(B, S, H, D).transpose(1, 2)


def _keep_inputs(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple:
    found = _tile_attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale)
    return *found, None, None


tile_attention.register_autograd(_gradients, setup_context=_keep_inputs)


@triton.jit
def tile(base, offset_s, offset_d, stride_s, S):
    """Load `(S, D)` of one head, zero beyond S."""
    places = base + offset_s[:, None] * stride_s + offset_d[None, :]
    return tl.load(places, mask=offset_s[:, None] < S, other=0.0)


@triton.jit
def store(base, value, offset_s, offset_d, stride_s, S):
    """Store `(S, D)` of one head."""
    places = base + offset_s[:, None] * stride_s + offset_d[None, :]
    tl.store(places, value.to(base.dtype.element_ty), mask=offset_s[:, None] < S)


@triton.jit
def _softmax(scores, allowed, scale):
    """Return the softmax over the allowed keys, `(S, S)` float32."""
    scores = scores * (scale * 1.4426950408889634)  # log2(e): the hardware has exp2
    scores = tl.where(allowed, scores, -1e30)  # finite, so that no difference is NaN
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def _allowed_keys(positions, b, offset_s, S):
    """Return an `(S, S)` mask; a row beyond S attends to itself, so that no row is empty."""
    position = tl.load(positions + b * S + offset_s, mask=offset_s < S, other=0)
    first = offset_s - position.to(tl.int32)
    column = offset_s[None, :]
    return (column <= offset_s[:, None]) & (column >= first[:, None])


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
    for g in range(GROUP):  # the query heads that share k and v
        head = h * GROUP + g
        q = tile(query + b * q_b + head * q_h, s, d, q_s, S)
        p = _softmax(tl.dot(q, tl.trans(k)), allowed, scale)
        o = tl.dot(p.to(v.dtype), v)
        store(out + (b * S * HEADS + head) * D, o, s, d, HEADS * D, S)


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
        # recomputed `(S, S)` weights cost less than reading stored ones would
        p = _softmax(tl.dot(q, tl.trans(k)), allowed, scale)
        dv += tl.dot(tl.trans(p.to(do.dtype)), do)
        dp = tl.dot(do, tl.trans(v))
        # sum(p * dp) equals sum(out * do), but needs no saved `out`
        ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * scale
        ds = ds.to(q.dtype)
        dk += tl.dot(tl.trans(ds), q)
        store(d_query + b * dq_b + head * dq_h, tl.dot(ds, k), s, d, dq_s, S)
    store(d_key + b * dk_b + h * dk_h, dk, s, d, dk_s, S)
    store(d_value + b * dv_b + h * dv_h, dv, s, d, dv_s, S)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Compute `packed_attention` in one launch, `(B, S, H, D)` contiguous."""
    B, H, S, D = query.shape
    out = query.new_empty(B, S, H, D)
    tensors = [*map(_dense_rows, (query, key, value))]
    with torch.cuda.device_of(query):
        _forward_kernel[(B, key.shape[1])](
            *tensors, positions.contiguous(), out, scale, S,
            *strides(tensors), **_constants(query, key),
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
    """Return the gradients of query, key and value for `grad` `(B, S, H, D)`, contiguous.

    They are written to `out`, three tensors with dense rows, or to new tensors with the layout of
    `(B, S, ., D)`.
    """
    tensors = [*map(_dense_rows, (query, key, value))]
    if out is None:
        out = [*map(_heads_last, tensors)]
    with torch.cuda.device_of(query):
        _backward_kernel[(query.shape[0], key.shape[1])](
            grad, *tensors, positions.contiguous(), *out, scale, query.shape[2],
            *strides(tensors), *strides(out), **_constants(query, key),
        )  # fmt: skip
    return tuple(out)


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def strides(tensors: Sequence[Tensor]) -> list[int]:
    """Return the strides of all tensors but that of the last dimension, which is 1."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _constants(query: Tensor, key: Tensor) -> dict[str, int]:
    H, S, D = query.shape[1:]
    tile = max(16, triton.next_power_of_2(S))
    return {
        "HEADS": H,
        "GROUP": H // key.shape[1],
        "TILE": tile,
        "D": D,
        # at S = 64 backward took 0.31 ms with 4 warps, 0.43 with 8, 0.69 with 16 (one H200)
        "num_warps": 4 if tile <= 64 else 8,
        "num_stages": 1,
    }
