"""Swap Native Sparse Attention into a dense model in place, or out again; intercept its calls.

Shapes: B rows, S positions, H query heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qat.errors import CheckpointError, ConfigError
from qat.extensions.nsa.attention import SWAPPED, Call, NSAAttention, NSAParts
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.models.attention import SPARSE
from qat.nn.swap import decoder_layers, embedding_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = {swapped: dense for dense, swapped in SWAPPED.items()}


def swap_attention(model: PreTrainedModel, config: NSAConfig) -> None:
    """Change the attention of `model` in place to the definition `config`.

    Weights stay; new parameters are initialized so that `residual` and `merged` equal dense
    attention for sequences up to `config.reach`.

    Raises:
        CheckpointError: the attention is of an unsupported kind, or sparse already.
        ConfigError: `config.layers` names layers that the model does not have.
    """
    if nsa_modules(model):
        raise CheckpointError(
            f"{type(model).__name__} has Native Sparse Attention already, expected dense "
            "attention; swap it out first, with --attention dense"
        )
    layers = decoder_layers(model)
    chosen = range(len(layers)) if config.layers is None else config.layers
    for index in chosen:
        if not 0 <= index < len(layers):
            raise ConfigError(
                f"layers names {index}, but the model's layers are 0 ... {len(layers) - 1}; mend it"
            )
    if not chosen or len(set(chosen)) < len(chosen):
        raise ConfigError(
            f"layers={list(chosen)} names no layer or one twice, expected some, once each; mend it"
        )
    modules = [_attention_of(model, layers[index]) for index in chosen]
    for module in modules:
        settings, device = module.config, next(module.parameters()).device
        parts = NSAParts(
            config,
            hidden_size=settings.hidden_size,
            num_heads=settings.num_attention_heads,
            num_key_heads=settings.num_key_value_heads,
        )
        module.nsa = parts.to(device, embedding_dtype(model)).train(module.training)
        module.__class__ = SWAPPED[type(module)]
    setattr(model.config, SPARSE, config.model_dump(mode="json"))


def unswap_attention(model: PreTrainedModel) -> None:
    """Change the attention of `model` back to dense attention and drop the NSA parameters."""
    for module in nsa_modules(model).values():
        module.__class__ = DENSE[type(module)]
        del module.nsa
    if nsa_config(model) is not None:
        delattr(model.config, SPARSE)


def nsa_modules(model: nn.Module) -> dict[str, NSAAttention]:
    """Return the model's sparse attention modules by name, in order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, NSAAttention)}


def nsa_config(model: PreTrainedModel | PreTrainedConfig) -> NSAConfig | None:
    """Return the definition in the configuration of a model; None: dense.

    Raises:
        CheckpointError: the definition is invalid.
    """
    values = getattr(getattr(model, "config", model), SPARSE, None)
    if values is None:
        return None
    try:
        return NSAConfig.parse(values, f"{SPARSE!r} of config.json")
    except ConfigError as error:
        raise CheckpointError(f"{error}; convert the model anew") from None


def log_route(model: PreTrainedModel, length: int, device: torch.device) -> str:
    """Choose, log and return the backend for rows of `length`: compiled layers log nothing.

    Raises:
        ConfigError: the requested backend does not support them.
    """
    layers = (getattr(layer, "self_attn", None) for layer in decoder_layers(model))
    sparse = next((module for module in layers if isinstance(module, NSAAttention)), None)
    return "dense" if sparse is None else sparse.route(length, device).backend


def _attention_of(model: PreTrainedModel, layer: nn.Module) -> nn.Module:
    """Return the attention module of a decoder layer, if it can be swapped."""
    name, found = type(model).__name__, getattr(layer, "self_attn", None)
    missing = [part for part in PROJECTIONS if not hasattr(found, part)]
    if missing:
        raise CheckpointError(
            f"the attention of {name} has no {', '.join(missing)}, expected separate query, key, "
            "value and output projections; choose another model"
        )
    settings = model.config.get_text_config()
    kinds = set(getattr(settings, "layer_types", None) or {"full_attention"})
    if type(found) not in SWAPPED or kinds != {"full_attention"}:
        known = ", ".join(dense.__name__ for dense in SWAPPED)
        raise CheckpointError(
            f"{name} has {type(found).__name__} in layers of {', '.join(sorted(kinds))}, expected "
            f"one of {known} in layers of full_attention; choose another model"
        )
    return found


Attend = Callable[[NSAAttention, Call], Tensor]
"""A function as `NSAAttention.attend`."""


@contextmanager
def attending_with(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Replace every sparse attention of `model` by `attend` inside the block.

    Compiled layers are not affected: see `qat.models.regions.as_written`.
    """
    modules = nsa_modules(model).values()
    for module in modules:
        module.attend = partial(attend, module)
    try:
        yield
    finally:
        for module in modules:
            del module.attend
