"""LoRA adapters by peft on a packed model, whose codes stay as they are.

    student = prepare_lora(qat.load("students/q2"), LoraConfig(r=16))
    ...
    qat.save(qat.finish(student), "students/q2-lora")

`qat.finish` makes the adapter that of the packed checkpoint, as 'qat train --learn lora' has it.
"""

import warnings
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear
from transformers import PreTrainedModel

from qat.errors import ConfigError
from qat.extensions.integrations.student import as_teacher
from qat.nn.quant_linear import QuantLinear, quant_linears
from qat.quant.lora import Lora


class LoraOnCodes(Linear):
    """A quantized linear with a LoRA adapter: `y = x @ W.T + x @ A.T @ B.T * scaling`."""

    def merge(self, *_: Any, **__: Any) -> None:
        """Refuse: a sum has no codes.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "an adapter on codes is to be merged, but the sum would need codes of its own, "
            "expected it beside them; use qat.finish(student), which keeps it so"
        )


def prepare_lora(
    model: PreTrainedModel, config: LoraConfig | None = None, *, dtype: str = "auto"
) -> PeftModel:
    """Return a quantized model with an adapter of peft, of which the adapter alone learns.

    Args:
        model: a packed model, as `qat.load` or `qat.quantize` returns it.
        config: peft's settings; by default it adapts all quantized linears.
        dtype: dtype that forward computes in: auto, fp32, bf16.

    Raises:
        ConfigError: nothing is quantized, has an adapter already or rounds its inputs.
    """
    linears = quant_linears(model)
    if not linears:
        raise ConfigError(
            f"{type(model).__name__} has no quantized linears, expected some for the adapter to "
            "stand beside; quantize it first with qat.quantize"
        )
    for name, linear in linears.items():
        if linear.lora_rank or linear.activation is not None:
            found = "has an adapter" if linear.lora_rank else "rounds its inputs"
            raise ConfigError(
                f"{name} {found}, expected a plain quantized linear; use qat.prepare(model, None, "
                "learn='lora'), whose adapters are part of the weight"
            )
    config = LoraConfig() if config is None else config
    if config.target_modules is None:
        config.target_modules = {*linears}
    config._register_custom_module({QuantLinear: LoraOnCodes})
    with warnings.catch_warnings():
        # peft says so of every class of linears that is not its own
        warnings.filterwarnings("ignore", "Unsupported layer type", UserWarning)
        return get_peft_model(as_teacher(model, dtype=dtype), config)


@torch.no_grad()
def adapter_taken(student: PeftModel) -> PreTrainedModel:
    """Return the model below peft's adapter, whose linears have the factors of the active one."""
    factors = {}
    for layer in student.modules():
        if isinstance(layer, LoraOnCodes):
            (name,) = layer.active_adapters
            lora_in, lora_out = layer.lora_A[name].weight, layer.lora_B[name].weight
            factors[layer.get_base_layer()] = Lora(lora_out * layer.scaling[name], lora_in)
    model = student.unload()
    for linear, lora in factors.items():
        linear.set_lora(lora)
    return model
