"""Finds a model's linear layers and puts others in their place.

Shapes: O out_features, I in_features, C codebook entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qat.errors import CheckpointError
from qat.nn.frozen_lut_linear import FrozenLutLinear
from qat.nn.lut_linear import LutLinear
from qat.nn.quant_linear import QuantLinear
from qat.nn.step import quant_linears
from qat.quant.weight import QuantizedWeight, dequantize, expand_scales

if TYPE_CHECKING:  # hf_quantizer needs this file while transformers is still being imported
    from transformers import PreTrainedModel

CELL_MARGIN = 2**-10
"""How far inside its cell a latent weight is moved, as a fraction of the way to the level."""


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks of the model's text part.

    Raises:
        CheckpointError: the model has no list of as many blocks as its configuration names.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise CheckpointError(
        f"{type(model).__name__} has no list of {num_layers} decoder blocks; expected a causal "
        "language model made of such blocks; choose another model"
    )


def linear_names(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers in the decoder blocks: never embeddings nor the head.

    Raises:
        CheckpointError: the blocks hold no `nn.Linear` at all.
    """
    inside = {id(module) for module in decoder_layers(model).modules()}
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
            replace_module(model, name, frozen.train(module.training))


def to_latent(
    model: nn.Module, names: list[str], base_weights: Mapping[str, Tensor] | None = None
) -> None:
    """Replace the `FrozenLutLinear` called `names` by `LutLinear` without changing the function.

    The latent weight is the base weight of that name moved into the cell of its stored index, or
    the quantized value itself where there are no `base_weights`.

    Raises:
        CheckpointError: a base weight is missing, or its shape is another.
    """
    for name in names:
        frozen = model.get_submodule(name)
        base = None if base_weights is None else _base_weight(name, frozen, base_weights)
        quantized = ascending(frozen.quantized())
        weight = latent_weight(quantized, dequantize(quantized) if base is None else base)
        latent = LutLinear(weight, quantized, frozen.bias, frozen.spec)
        if not torch.equal(latent.quantized_weight(), frozen.quantized_weight()):
            raise CheckpointError(
                f"{name}: two levels of its codebook are too close for a latent weight to choose "
                "between them; convert it anew or train it without weights"
            )
        replace_module(model, name, latent.train(frozen.training))


def latent_weight(quantized: QuantizedWeight, base: Tensor) -> Tensor:
    """`base` `(O, I)` moved, where needed, to where the nearest level is the stored one.

    `base / S` is clamped to the cell between the midpoints around the stored level, and by
    `CELL_MARGIN` inside it, so that rounding flips no index. Where `S` is 0, `base` stays.
    `quantized.codebook` ascends.
    """
    levels = quantized.codebook
    middle = (levels[1:] + levels[:-1]) / 2
    inward_lower = middle + CELL_MARGIN * (levels[1:] - middle)
    inward_upper = middle - CELL_MARGIN * (middle - levels[:-1])
    infinity = levels.new_full((1,), torch.inf)
    lower = torch.cat([-infinity, inward_lower])
    upper = torch.cat([inward_upper, infinity])
    S = expand_scales(quantized.scales, base.shape[1])
    index = quantized.indices.int()
    base = base.to(levels)
    scaled = base / S
    clamped = torch.clamp(scaled, lower[index], upper[index])
    return torch.where((clamped == scaled) | (S == 0), base, clamped * S)


def _base_weight(name: str, frozen: FrozenLutLinear, base_weights: Mapping[str, Tensor]) -> Tensor:
    base = base_weights.get(name)
    expected = (frozen.out_features, frozen.in_features)
    if base is None or tuple(base.shape) != expected:
        found = "no weight" if base is None else f"shape {tuple(base.shape)}"
        raise CheckpointError(
            f"{name}: the base model has {found} there, expected {expected}; give the float model "
            "that this one was converted from"
        )
    return base.detach()
