"""What a model weighs: parameters, bits per weight, bytes on disk."""

import math
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from qat.models.stored_state import packed_state_dict
from qat.nn.lut_embedding import FrozenLutTable, lut_tables
from qat.nn.quant_linear import QuantLinear
from qat.nn.step import quant_linears
from qat.nn.swap import table_names
from qat.quant.pack import packed_width
from qat.quant.weight import STORED_DTYPES, dtype_as_stored


def parameter_count(model: nn.Module) -> int:
    """Parameters of the model as it is without quantization; a tied head counts once.

    A quantized linear counts as its `O * I` weights and its bias, a quantized table as `V * D`.
    """
    linears = quant_linears(model)
    inside = {id(p) for linear in linears.values() for p in linear.parameters()}
    plain = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    plain += sum(_num_weights(table) for table in lut_tables(model).values())
    return plain + sum(_num_weights(m) + _num_biases(m) for m in linears.values())


def quantized_parameter_count(model: nn.Module) -> int:
    """Weights of the linears that are stored as indices."""
    return sum(_num_weights(linear) for linear in quant_linears(model).values())


def stored_bits(module: QuantLinear | FrozenLutTable) -> int:
    """Bits that a checkpoint spends on this weight: packed indices, scales, codebook, adapter."""
    bits = 8 * module.out_features * packed_width(module.in_features, module.spec.bits)
    is_table = isinstance(module, FrozenLutTable)
    tensors = module.weight_tensors() if is_table else module.weight_parameters()
    for name in tensors.keys() & STORED_DTYPES.keys():
        itemsize = dtype_as_stored(name, module.spec.scale_bits).itemsize
        bits += 8 * itemsize * tensors[name].numel()
    return bits


def bits_per_weight(module: QuantLinear | FrozenLutTable) -> float:
    """Bits a weight including scales, codebook and adapter."""
    return stored_bits(module) / _num_weights(module)


def model_bits_per_weight(model: nn.Module) -> float:
    """Bits a weight over all quantized linears together, without tables; NaN without linears."""
    linears = quant_linears(model).values()
    weights = sum(_num_weights(linear) for linear in linears)
    return sum(map(stored_bits, linears)) / weights if weights else math.nan


def whole_model_bits(model: nn.Module) -> float:
    """Bits a weight over the whole model: tables, norms and all else that a checkpoint stores."""
    return 8 * tensor_bytes(model) / parameter_count(model)


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that a checkpoint of this model would hold; a tied head counts once."""
    tensors = {t.data_ptr(): t for t in packed_state_dict(model).values()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def float_table_bytes(model: PreTrainedModel) -> int:
    """Bytes that a checkpoint of this model would spend on tables in floating point."""
    stored = packed_state_dict(model)
    tables = {
        t.data_ptr(): t for n in table_names(model) if (t := stored.get(f"{n}.weight")) is not None
    }
    return sum(t.numel() * t.element_size() for t in tables.values())


def model_bytes(path: Path) -> int:
    """Bytes of the safetensors files of a model directory."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _num_weights(module: QuantLinear | FrozenLutTable) -> int:
    return module.out_features * module.in_features


def _num_biases(linear: QuantLinear) -> int:
    return 0 if linear.bias is None else linear.bias.numel()
