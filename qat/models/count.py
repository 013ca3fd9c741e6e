"""What a model weighs: parameters, bits per weight, bytes on disk."""

import math
from pathlib import Path

from torch import nn

from qat.models.hf_quantizer import packed_state_dict
from qat.nn.quant_linear import QuantLinear
from qat.nn.step import quant_linears
from qat.quant.pack import packed_width
from qat.quant.weight import STORED_DTYPES


def parameter_count(model: nn.Module) -> int:
    """Parameters of the model as it is without quantization; a tied head counts once.

    A quantized linear counts as its `O * I` weights and its bias.
    """
    linears = quant_linears(model)
    inside = {id(p) for linear in linears.values() for p in linear.parameters()}
    plain = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    return plain + sum(_num_weights(m) + _num_biases(m) for m in linears.values())


def quantized_parameter_count(model: nn.Module) -> int:
    """Weights that are stored as indices."""
    return sum(_num_weights(linear) for linear in quant_linears(model).values())


def stored_bits(linear: QuantLinear) -> int:
    """Bits that a checkpoint spends on this weight: packed indices, scales, codebook, adapter."""
    bits = 8 * linear.out_features * packed_width(linear.in_features, linear.spec.bits)
    tensors = {"codebook": linear.codebook, **linear.scale_parameters(), **linear.lora_parameters()}
    for name, tensor in tensors.items():
        bits += 8 * STORED_DTYPES[name].itemsize * tensor.numel()
    return bits


def bits_per_weight(linear: QuantLinear) -> float:
    """Bits a weight including scales, codebook and adapter."""
    return stored_bits(linear) / _num_weights(linear)


def model_bits_per_weight(model: nn.Module) -> float:
    """Bits a weight over all quantized linears together; NaN for a model without any."""
    linears = quant_linears(model).values()
    weights = sum(_num_weights(linear) for linear in linears)
    return sum(map(stored_bits, linears)) / weights if weights else math.nan


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that a checkpoint of this model would hold; a tied head counts once."""
    tensors = {t.data_ptr(): t for t in packed_state_dict(model).values()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def model_bytes(path: Path) -> int:
    """Bytes of the safetensors files of a model directory."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _num_weights(linear: QuantLinear) -> int:
    return linear.out_features * linear.in_features


def _num_biases(linear: QuantLinear) -> int:
    return 0 if linear.bias is None else linear.bias.numel()
