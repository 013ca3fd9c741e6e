"""Exchanges packed weights and weights that learn, without a change of the function."""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from qat.backend.device import on
from qat.errors import CheckpointError, ConfigError
from qat.nn.hosted import HostedLutEmbedding, HostedLutHead, HostedLutLinear, HostedWeight
from qat.nn.lut_embedding import (
    LutEmbedding,
    LutHead,
    QuantEmbedding,
    QuantHead,
    TiedLutHead,
)
from qat.nn.quant_linear import LutLinear, QuantLinear
from qat.nn.quant_weight import LatentWeight, QuantWeight
from qat.nn.sharded import ShardedLutEmbedding, ShardedLutHead, ShardedLutLinear, ShardedWeight
from qat.nn.swap import ascending, replace_module, weight_shape
from qat.quant.weight import dequantize
from qat.ranks import ALONE, Ranks


class Learning(NamedTuple):
    """The classes of a kind of module that learn."""

    latent: type[LatentWeight]
    hosted: type[HostedWeight]
    sharded: type[ShardedWeight]


LEARNING: dict[type[QuantWeight], Learning] = {
    QuantLinear: Learning(LutLinear, HostedLutLinear, ShardedLutLinear),
    QuantEmbedding: Learning(LutEmbedding, HostedLutEmbedding, ShardedLutEmbedding),
    QuantHead: Learning(LutHead, HostedLutHead, ShardedLutHead),
}


def to_latent(
    model: nn.Module,
    names: list[str],
    ranks: Ranks = ALONE,
    *,
    dtype: torch.dtype = torch.float32,
    is_spread: bool = False,
    is_hosted: bool = False,
) -> None:
    """Give the packed weights called `names` latent weights without changing the function.

    Each latent weight starts at the quantized value itself: in the middle of its cell, where noise
    flips no index (starting from the float weight was measured to be worse, speedrun/LOG.md). It is
    kept in `dtype`, and with `is_hosted` in host memory (`HostedWeight`). Each of several `ranks`
    keeps some of its rows (`ShardedWeight`), without communication here. With
    `is_spread` the rows are divided over the devices of a process that has several.

    Raises:
        CheckpointError: two levels of a codebook are too close to choose between.
        ConfigError: some rows have a codebook of their own, and there are several ranks.
    """
    _check_codebooks(model, names, ranks)
    rooms: list[Tensor] = []
    if is_hosted:
        shapes = [torch.Size(weight_shape(model.get_submodule(name))) for name in names]
        device = cast(QuantWeight, model.get_submodule(names[0])).codebook.device
        rooms = on(device).pinned_zeros(shapes, dtype)
    for name in names:
        frozen = cast(QuantWeight, model.get_submodule(name))
        kinds = next(kinds for kind, kinds in LEARNING.items() if isinstance(frozen, kind))
        quantized = ascending(frozen.quantized())
        made_of = dequantize(quantized), quantized, *frozen.own()
        latent = kinds.latent(*made_of)
        latent.set_lora(frozen.lora())
        weights = latent.quantized_weight(), frozen.quantized_weight()
        if not torch.equal(*weights):
            raise CheckpointError(
                f"{name}: two levels of its codebook are too close for a latent weight to choose "
                "between them; convert it anew or train it without weights"
            )
        if is_hosted:
            latent = kinds.hosted(*made_of, room=rooms.pop(0))
        elif ranks.size > 1:
            latent = kinds.sharded(*made_of, ranks=ranks)
        # one by one: a device that they fill in bfloat16 cannot hold them all in float32
        latent.weight.data = latent.weight.data.to(dtype)
        latent.set_lora(frozen.lora())
        latent.activation = frozen.activation
        if is_spread:
            on(latent.codebook.device).tracing.spread([latent.weight])
        if isinstance(latent, QuantEmbedding):
            for head in model.modules():
                if isinstance(head, TiedLutHead) and head.table is frozen:
                    head.tie(latent)
        replace_module(model, name, latent.train(frozen.training))


def _check_codebooks(model: nn.Module, names: list[str], ranks: Ranks) -> None:
    rows = max(cast(QuantWeight, model.get_submodule(name)).spec.table_rows for name in names)
    if rows and ranks.size > 1:
        raise ConfigError(
            f"some weights have a codebook for each {rows} rows, and {ranks.size} processes divide "
            "latent rows elsewhere, expected one process; train in one, or leave the weights out "
            "of --learn"
        )


def add_adapters(model: nn.Module, names: list[str], rank: int, seed: int) -> None:
    """Give each quantized linear of `names` an adapter that leaves the function unchanged.

    A linear that has one of that rank keeps it.

    Raises:
        ConfigError: `rank` exceeds a layer's smaller side, or an adapter has another rank; no layer
            was changed then.
    """
    linears = {name: cast(QuantLinear, model.get_submodule(name)) for name in names}
    for name, linear in linears.items():
        most = min(linear.out_features, linear.in_features)
        if rank > most:
            raise ConfigError(
                f"lora_rank={rank} is more than {name} has, whose sides are "
                f"{linear.out_features} and {linear.in_features}; use --lora-rank {most} or less, "
                "or leave it out with --mlp-only or --attention-only"
            )
        if linear.lora_rank not in (0, rank):
            raise ConfigError(
                f"lora_rank={rank}, but the adapter of {name} has rank {linear.lora_rank}, "
                f"expected the same; go on with --lora-rank {linear.lora_rank}, or start from a "
                "student without adapters"
            )
    generator = torch.Generator().manual_seed(seed)
    for linear in linears.values():
        if not linear.lora_rank:
            linear.add_lora(rank, generator)
