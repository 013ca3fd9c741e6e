"""Pack a student after training in a user's own loop."""

import torch
from torch import nn
from transformers import PreTrainedModel

from qat.errors import ConfigError
from qat.extensions.integrations.modules import take_out
from qat.extensions.integrations.student import has_adapter, unwrapped
from qat.extensions.publish.student import let_push
from qat.models.decoding import read_packed
from qat.nn.lut_embedding import (
    FrozenLutEmbedding,
    FrozenLutHead,
    QuantEmbedding,
    QuantHead,
    TiedLutHead,
)
from qat.nn.quant_linear import FrozenLutLinear, QuantLinear
from qat.nn.quant_weight import QuantWeight, quant_weights
from qat.nn.swap import ascending, replace_module

PACKED: dict[type[QuantWeight], type[QuantWeight]] = {
    QuantLinear: FrozenLutLinear,
    QuantEmbedding: FrozenLutEmbedding,
    QuantHead: FrozenLutHead,
}
"""The class with packed indices of each kind of weight."""


def check_whole(model: nn.Module) -> None:
    """Check that this process holds all of a student.

    Raises:
        ConfigError: `fully_shard` divides it over ranks.
    """
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ConfigError(
            "the student is divided over ranks by fully_shard, expected a whole one; load the full "
            "state dict (torch.distributed.checkpoint.state_dict.get_model_state_dict) into a "
            "student that was prepared alike, and finish that"
        )


@torch.no_grad()
def finish(student: nn.Module) -> PreTrainedModel:
    """Return the packed model of a prepared student, which is changed in place and used up.

    Save it by `qat.save`, or push it by its `push_to_hub`. Its weights are those that the student's
    forward computed with.

    Raises:
        ConfigError: `student` was not prepared, or `fully_shard` divides it over ranks.
    """
    if has_adapter(student):
        from qat.extensions.integrations.adapters import adapter_taken  # peft is optional

        student = adapter_taken(student)
    model = unwrapped(student)
    check_whole(model)
    model.prepared.end_precision()
    take_out(model)
    for name, weight in quant_weights(model).items():
        kind = next(packed for kind, packed in PACKED.items() if isinstance(weight, kind))
        packed = kind(ascending(weight.quantized()), *weight.own())
        packed.set_lora(weight.lora())
        packed.activation = weight.activation
        if packed.activation is not None and packed.activation.scale is not None:
            packed.activation.scale.copy_(packed.activation.stored_scale())
        _retie(model, weight, packed)
        replace_module(model, name, packed)
    del model.prepared
    model.__class__ = model.own_class
    model.requires_grad_(False)
    read_packed(nn.Module.float(model.eval()))
    let_push()
    return model


def _retie(model: nn.Module, old: QuantWeight, new: QuantWeight) -> None:
    """Let a head that reads the table `old` read `new`."""
    for head in model.modules():
        if isinstance(head, TiedLutHead) and head.table is old:
            head.tie(new)
