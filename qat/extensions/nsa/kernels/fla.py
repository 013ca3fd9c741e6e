"""Native Sparse Attention with fla-core's selected branch: a list of blocks for every query.

It pays off if lists are not shared (`select_tile=1`) and groups are large; the other two branches
use FlexAttention.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from qat.errors import ConfigError
from qat.extensions.nsa.kernels import flex
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.reference import combine
from qat.extensions.nsa.kernels.select import Inputs, select

LEAST_GROUP = 16
"""Rows of a tensor-core tile, which the heads of one query fill."""
MOST_WIDTH = 256  # of a head that fla-core's kernels keep on chip
IS_INSTALLED = find_spec("fla") is not None


def refusal(config: NSAConfig, *, group: int, head_dim: int) -> str | None:
    """Return why fla-core does not support this configuration, or None if it does."""
    if not IS_INSTALLED:
        return "fla-core is not installed"
    if group < LEAST_GROUP or not _is_power_of_two(group):
        return f"{group} query heads share keys, and it wants a power of two from {LEAST_GROUP} on"
    if head_dim > MOST_WIDTH:
        return f"head_dim={head_dim} is above {MOST_WIDTH}"
    if not _is_power_of_two(config.select_block):
        return f"select_block={config.select_block} is not a power of two"
    return flex.refusal(config, head_dim=head_dim)


def attend(inputs: Inputs, config: NSAConfig, selection: Tensor | None = None) -> Tensor:
    """Return attention `(B, S, H, D)` over the blocks in `selection`, or those `select` chooses.

    Raises:
        ConfigError: rows are packed: blocks would be read across documents.
    """
    if inputs.first is not None:
        raise ConfigError(
            "nsa backend=fla reads whole blocks, but rows hold several documents; use backend=flex"
        )
    from fla.ops.nsa.parallel import parallel_nsa

    inputs = flex.of_one_dtype(inputs)
    selection = select(inputs, config) if selection is None else selection
    query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in inputs[:3])
    chosen = parallel_nsa(
        query,
        key,
        value,
        block_indices=indices_of(selection, inputs.length, config),
        block_counts=min(config.num_selected, selection.shape[-1]),
        block_size=config.select_block,
        scale=inputs.scale,
    )
    if config.mode == "merged":
        return chosen
    compressed, window = flex.attend_other(inputs, config)
    return combine(inputs.gates, compressed, chosen, window)


def indices_of(selection: Tensor, length: int, config: NSAConfig) -> Tensor:
    """Return `(B, S, K, n)` int32: the blocks of every query, padded with -1."""
    count = min(config.num_selected, selection.shape[-1])
    order = selection.int().argsort(dim=-1, descending=True, stable=True)[..., :count]
    is_chosen = torch.arange(count, device=order.device) < selection.sum(-1, keepdim=True)
    indices = torch.where(is_chosen, order, -1).int()
    indices = indices.repeat_interleave(config.select_tile, 2)[:, :, :length]
    return indices.transpose(1, 2).contiguous()


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
