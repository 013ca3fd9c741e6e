"""Finds a model's linear layers and puts others in their place.

Shapes: O out_features, I in_features, C codebook entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from qat.backend.device import on
from qat.errors import CheckpointError
from qat.nn.frozen_lut_linear import FrozenLutLinear
from qat.nn.lut_linear import LutLinear
from qat.nn.nsa import NSAParts
from qat.nn.quant_linear import QuantLinear
from qat.nn.sharded_lut_linear import ShardedLutLinear
from qat.nn.step import quant_linears
from qat.quant.weight import QuantizedWeight, dequantize
from qat.ranks import ALONE, Ranks

if TYPE_CHECKING:  # hf_quantizer needs this file while transformers is still being imported
    from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks of the model's text part.

    Raises:
        CheckpointError: the model has no list of as many blocks as its configuration names.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():  # a vision tower may have as many blocks
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise CheckpointError(
        f"{type(model).__name__} has no list of {num_layers} decoder blocks; expected a causal "
        "language model made of such blocks; choose another model"
    )


def linear_names(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers in the decoder blocks: never embeddings nor the head.

    Nor the gates of sparse attention, which are few and stay in floating point.

    Raises:
        CheckpointError: the blocks hold no `nn.Linear` at all.
    """
    inside = {id(module) for module in decoder_layers(model).modules()}
    for module in model.modules():
        if isinstance(module, NSAParts):
            inside -= {id(part) for part in module.modules()}
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantLinear) and id(module) in inside
    ]
    if not names:
        raise CheckpointError(
            f"the decoder blocks of {type(model).__name__} hold no nn.Linear, so there is nothing "
            "to quantize; choose a model whose blocks are made of nn.Linear"
        )
    return names


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `name` is."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def ascending(quantized: QuantizedWeight) -> QuantizedWeight:
    """The same weight, bit for bit, with its codebook in ascending order."""
    codebook, order = quantized.codebook.sort(stable=True)
    rank = order.argsort().to(torch.uint8)
    return quantized._replace(codebook=codebook, indices=rank[quantized.indices.int()])


def to_frozen(model: nn.Module) -> None:
    """Replace every `LutLinear` by the `FrozenLutLinear` of the same weight, bit for bit."""
    for name, module in quant_linears(model).items():
        if isinstance(module, LutLinear):
            frozen = FrozenLutLinear(ascending(module.quantized()), module.bias, module.spec)
            frozen.set_lora(module.lora())
            replace_module(model, name, frozen.train(module.training))


def to_latent(
    model: nn.Module, names: list[str], ranks: Ranks = ALONE, *, is_spread: bool = False
) -> None:
    """Replace the `FrozenLutLinear` called `names` by `LutLinear` without changing the function.

    Each latent weight starts at the quantized value itself: in the middle of its cell, where noise
    flips no index (starting from the float weight was measured to be worse, speedrun/LOG.md).
    Each of several `ranks` keeps some of its rows (`ShardedLutLinear`); they exchange nothing here.
    With `is_spread` so does each device, where the process has several.

    Raises:
        CheckpointError: two levels of a codebook are too close to choose between.
    """
    for name in names:
        frozen = model.get_submodule(name)
        quantized = ascending(frozen.quantized())
        made_of = dequantize(quantized), quantized, frozen.bias, frozen.spec
        latent = LutLinear(*made_of)
        latent.set_lora(frozen.lora())
        weights = latent.quantized_weight(), frozen.quantized_weight()
        if not on(latent.codebook.device).equal(*weights):
            raise CheckpointError(
                f"{name}: two levels of its codebook are too close for a latent weight to choose "
                "between them; convert it anew or train it without weights"
            )
        if ranks.size > 1:
            latent = ShardedLutLinear(*made_of, ranks=ranks)
            latent.set_lora(frozen.lora())
        if is_spread:
            on(latent.codebook.device).spread([latent.weight])
        replace_module(model, name, latent.train(frozen.training))
