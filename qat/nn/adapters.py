"""Gives quantized linears the low-rank adapters that `--learn lora` trains."""

import torch
from torch import nn

from qat.errors import ConfigError
from qat.nn.quant_linear import QuantLinear


def add_adapters(model: nn.Module, names: list[str], rank: int, seed: int) -> None:
    """Give each quantized linear of `names` an adapter that does not change the function yet.

    A linear that has one of that rank keeps it.

    Raises:
        ConfigError: `rank` is above a layer's smaller side, or an adapter has another rank; then no
            layer was changed.
    """
    linears: dict[str, QuantLinear] = {name: model.get_submodule(name) for name in names}
    for name, linear in linears.items():
        _check_rank(name, linear, rank)
    generator = torch.Generator().manual_seed(seed)
    for linear in linears.values():
        if not linear.lora_rank:
            linear.add_lora(rank, generator)


def _check_rank(name: str, linear: QuantLinear, rank: int) -> None:
    O, I = linear.out_features, linear.in_features
    if rank > min(O, I):
        raise ConfigError(
            f"lora_rank={rank} is more than {name} has, whose sides are {O} and {I}; use "
            f"--lora-rank {min(O, I)} or less, or leave it out with --mlp-only or --attention-only"
        )
    if linear.lora_rank not in (0, rank):
        raise ConfigError(
            f"lora_rank={rank}, but the adapter of {name} has rank {linear.lora_rank}, expected "
            f"the same; go on with --lora-rank {linear.lora_rank}, or start from a student without "
            "adapters"
        )
