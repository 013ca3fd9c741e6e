"""Costs of a model: its parameters, bits per weight, and bytes of tensors."""

import math

from torch import nn
from transformers import PreTrainedModel

from qat.models.stored_state import packed_state_dict
from qat.nn.lut_embedding import FrozenLutTable, lut_tables
from qat.nn.quant_linear import QuantLinear, quant_linears
from qat.nn.swap import table_names
from qat.quant.weight import STORED_DTYPES, dtype_as_stored, packed_width


def parameter_count(model: nn.Module) -> int:
    """Count the parameters of the model without quantization; a tied head counts once.

    A quantized linear counts as its `O * I` weights and its bias, a quantized table as `V * D`.
    """
    linears = quant_linears(model)
    inside = {id(p) for linear in linears.values() for p in linear.parameters()}
    plain = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    plain += sum(num_weights(table) for table in lut_tables(model).values())
    biases = sum(m.bias.numel() for m in linears.values() if m.bias is not None)
    return plain + biases + sum(map(num_weights, linears.values()))


def quantized_parameter_count(model: nn.Module) -> int:
    """Count the weights of the linears that are stored as indices."""
    return sum(num_weights(linear) for linear in quant_linears(model).values())


def stored_bits(module: QuantLinear | FrozenLutTable) -> int:
    """Return the bits of this weight in a checkpoint: packed indices, scales, codebook, adapter."""
    spec, bits = module.spec, 8 * packed_bytes(module)
    is_table = isinstance(module, FrozenLutTable)
    tensors = module.weight_tensors() if is_table else module.weight_parameters()
    for name in tensors.keys() & STORED_DTYPES.keys():
        itemsize = dtype_as_stored(name, spec.stored_bits(name)).itemsize
        bits += 8 * itemsize * tensors[name].numel()
    return bits


def bits_per_weight(module: QuantLinear | FrozenLutTable) -> float:
    """Return the bits per weight including scales, codebook and adapter."""
    return stored_bits(module) / num_weights(module)


def linear_bits(model: nn.Module) -> float:
    """Return the bits per weight over all quantized linears, without tables; NaN if none."""
    linears = quant_linears(model).values()
    weights = sum(num_weights(linear) for linear in linears)
    return sum(map(stored_bits, linears)) / weights if weights else math.nan


def whole_model_bits(model: nn.Module) -> float:
    """Return the bits per weight over the whole model, with tables, norms and all else stored."""
    return 8 * tensor_bytes(model) / parameter_count(model)


def tensor_bytes(model: nn.Module) -> int:
    """Return the bytes of the tensors in a checkpoint of this model; a tied head counts once."""
    tensors = {t.data_ptr(): t for t in packed_state_dict(model).values()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def float_table_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of floating-point tables in a checkpoint of this model."""
    stored = packed_state_dict(model)
    tables = {
        t.data_ptr(): t for n in table_names(model) if (t := stored.get(f"{n}.weight")) is not None
    }
    return sum(t.numel() * t.element_size() for t in tables.values())


def num_weights(module: QuantLinear | FrozenLutTable) -> int:
    """Return the number of weights of a quantized linear or table."""
    return module.out_features * module.in_features


def packed_bytes(module: QuantLinear | FrozenLutTable) -> int:
    """Return the bytes of its packed indices."""
    spec, count = module.spec, module.in_features // module.spec.vector_size
    return module.out_features * packed_width(count, spec.bits)
