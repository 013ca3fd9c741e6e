"""Native Sparse Attention with a choice for each query, at the cost of what is chosen.

FlexAttention reads what any of 128 queries chose, so a choice for each costs it its speed. Here
each block of keys gathers the queries that chose it (`qat.kernels.nsa.gather_triton`); the other
two branches are FlexAttention's.

Shapes as in `qat.kernels.nsa.inputs`.
"""

import torch
from torch import Tensor

from qat.kernels.nsa import flex
from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.inputs import Inputs
from qat.kernels.nsa.reference import combine
from qat.kernels.nsa.select import judged_keys, select

LEAST_BLOCK, MOST_BLOCK = 16, 128
MOST_WIDTH, MOST_SELECTED, MOST_GROUP = 256, 255, 32
TILES = 7.2
"""Bytes of shared memory that backward takes for each number of a block's keys, in bfloat16."""


def refusal(config: NSAConfig, *, group: int, head_dim: int, device: torch.device) -> str | None:
    """Why these kernels cannot compute this; None: they can."""
    block = config.select_block
    if not LEAST_BLOCK <= block <= MOST_BLOCK or block & (block - 1):
        return f"select_block={block} is no power of two from {LEAST_BLOCK} to {MOST_BLOCK}"
    for name, value, most in (
        ("head_dim", head_dim, MOST_WIDTH),
        ("num_selected", config.num_selected, MOST_SELECTED),
        ("the group", group, MOST_GROUP),
    ):
        if value > most:
            return f"{name}={value} is above {most}"
    needed, room = int(TILES * block * head_dim), shared_memory(device)
    if needed > room:
        return f"a block of {block} keys takes {needed:,} bytes of shared memory of {room:,}"
    return None if config.mode == "merged" else flex.refusal(config, head_dim=head_dim)


def shared_memory(device: torch.device) -> int:
    """Bytes that a program on `device` may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def attend(inputs: Inputs, config: NSAConfig, selection: Tensor | None = None) -> Tensor:
    """`(B, S, H, D)`; the blocks are those of `selection`, or those that `select` chooses."""
    inputs = flex.of_one_dtype(inputs)
    ranks = chosen(inputs, config) if selection is None else ranks_of(selection, inputs, config)
    group, first = inputs.group, inputs.first
    query = inputs.query.unflatten(1, (-1, group)).flatten(0, 1)
    key, value = inputs.key.flatten(0, 1), inputs.value.flatten(0, 1)
    sizes = config.num_selected, config.select_block
    found = _attend(query, key, value, first, ranks, *sizes, inputs.scale)[0]
    found = found.unflatten(0, (len(inputs.query), -1)).transpose(1, 2).flatten(2, 3)
    if config.mode == "merged":
        return found
    compressed, window = flex.attend_other(inputs, config)
    return combine(inputs.gates, compressed, found, window)


@torch.no_grad()
def chosen(inputs: Inputs, config: NSAConfig) -> Tensor:
    """`(R, N, S)` uint8: the place of each block among those that a query selects; 0: it does not.

    By a kernel where pooled blocks lie side by side and each query chooses, else by `select`.
    """
    is_apart = config.compress_block == config.compress_stride
    is_power = not config.compress_stride & (config.compress_stride - 1)
    if not (is_apart and is_power and config.select_tile == 1):
        return ranks_of(select(inputs, config), inputs, config)
    judged = judged_keys(inputs.key, inputs.pooled_key, config).flatten(0, 1)
    query = inputs.query.unflatten(1, (-1, inputs.group)).flatten(0, 1)
    numbers = (config.num_selected, config.select_block, config.compress_stride)
    forced = (config.init_blocks, config.local_blocks)
    return _choose(query, judged, inputs.first, *numbers, *forced, config.bound > 0, inputs.scale)


def ranks_of(selection: Tensor, inputs: Inputs, config: NSAConfig) -> Tensor:
    """`chosen`, of `selection` `(B, K, T, N)`."""
    each = selection.repeat_interleave(config.select_tile, 2)[:, :, : inputs.length]
    each = each[..., : -(-inputs.length // config.select_block)]
    own = torch.arange(inputs.length, device=each.device)[:, None] // config.select_block
    each = each & (torch.arange(each.shape[-1], device=each.device) <= own)
    ranks = (each.cumsum(-1) * each).to(torch.uint8)
    return ranks.flatten(0, 1).transpose(1, 2).contiguous()


@torch.library.custom_op("qat::nsa_choose", mutates_args=())
def _choose(
    query: Tensor,
    judged: Tensor,
    first: Tensor | None,
    count: int,
    block: int,
    stride: int,
    init: int,
    local: int,
    has_bound: bool,
    scale: float,
) -> Tensor:
    from qat.kernels.nsa import gather_triton

    sizes = gather_triton.Sizes(count, block, stride, init, local, has_bound)
    return gather_triton.choose(query.contiguous(), judged.contiguous(), first, sizes, scale)


@_choose.register_fake
def _(
    query: Tensor,
    judged: Tensor,
    first: Tensor | None,
    count: int,
    block: int,
    *_: object,
) -> Tensor:
    R, _, S, _ = query.shape
    return query.new_empty(R, -(-S // block), S, dtype=torch.uint8)


@torch.library.custom_op("qat::nsa_gather", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    ranks: Tensor,
    count: int,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`(R, S, G, D)` of query `(R, G, S, D)`, key and value `(R, S, D)`; and sums for backward."""
    from qat.kernels.nsa import gather_triton

    pairs = gather_triton.pairs_of(ranks, count, block)
    tensors = (tensor.contiguous() for tensor in (query, key, value))
    return gather_triton.forward(*tensors, first, pairs, block, scale)


@_attend.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    R, G, S, D = query.shape
    return query.new_empty(R, S, G, D), query.new_empty(R, G, S, dtype=torch.float32)


@torch.library.custom_op("qat::nsa_gather_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    out: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    ranks: Tensor,
    count: int,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from qat.kernels.nsa import gather_triton

    pairs = gather_triton.pairs_of(ranks, count, block)
    tensors = (tensor.contiguous() for tensor in (grad, out, sums, query, key, value))
    return gather_triton.backward(*tensors, first, pairs, block, scale)


@_attend_backward.register_fake
def _(
    grad: Tensor, out: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    R, G, S, D = query.shape
    d_query = query.new_empty(R, S, G, D).transpose(1, 2)
    return d_query, key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.count, ctx.block, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)


def _gradients(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: None) -> tuple:
    sizes = ctx.count, ctx.block, ctx.scale
    return (*_attend_backward(grad, *ctx.saved_tensors, *sizes), None, None, None, None, None)


_attend.register_autograd(_gradients, setup_context=_keep)
