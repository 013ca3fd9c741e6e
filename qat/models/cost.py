"""Costs of a model: its parameters, bits per weight, and bytes of tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from transformers import PreTrainedModel

from qat.models.stored_state import packed_state_dict, quantized_modules
from qat.nn.quant_linear import FrozenLutLinear, quant_linears
from qat.nn.quant_weight import QuantWeight
from qat.nn.swap import is_tied, linear_names, table_names, weight_shape
from qat.quant.spec import LutSpec, role_of
from qat.quant.weight import STORED_DTYPES, dtype_as_stored, empty_weight, packed_width


def parameter_count(model: nn.Module) -> int:
    """Count the parameters of the model without quantization; a tied head counts once.

    A quantized linear counts as its `O * I` weights and its bias, a quantized table as `V * D`.
    """
    quantized = quantized_modules(model).values()
    inside = {id(p) for module in quantized for p in module.parameters()}
    plain = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    biases = (getattr(module, "bias", None) for module in quantized)
    plain += sum(bias.numel() for bias in biases if bias is not None)
    return plain + sum(map(num_weights, quantized))


def quantized_parameter_count(model: nn.Module) -> int:
    """Count the weights of the linears that are stored as indices."""
    return sum(num_weights(linear) for linear in quant_linears(model).values())


def stored_bits(module: QuantWeight) -> int:
    """Return the bits of this weight in a checkpoint: packed indices, scales, codebook, adapter."""
    spec, bits = module.spec, 8 * packed_bytes(module)
    tensors = module.weight_parameters()
    for name in tensors.keys() & STORED_DTYPES.keys():
        itemsize = dtype_as_stored(name, spec.stored_bits(name)).itemsize
        bits += 8 * itemsize * tensors[name].numel()
    return bits


def format_bits(spec: LutSpec, shape: tuple[int, int]) -> int:
    """Return the `stored_bits` of an `(O, I)` weight in that format."""
    with torch.device("meta"):
        return stored_bits(FrozenLutLinear(empty_weight(spec, *shape), None, spec))


def bits_per_weight(module: QuantWeight) -> float:
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
    return sum(bytes_by_name(model).values())


def bytes_by_name(model: nn.Module) -> dict[str, int]:
    """Return the bytes of each tensor in a checkpoint of this model; a tied head has none."""
    stored = packed_state_dict(model)
    once = {tensor.data_ptr(): name for name, tensor in reversed(stored.items())}
    return {name: stored[name].numel() * stored[name].element_size() for name in once.values()}


@dataclass(frozen=True)
class Part:
    """A part of a model's weights and its size in the file."""

    name: str
    num_weights: int
    megabytes: float
    """In 10**6 bytes."""

    @property
    def bits(self) -> float:
        """Bits per weight, scales and codebooks included."""
        return 8e6 * self.megabytes / self.num_weights


def parts_of(model: PreTrainedModel, stored: Mapping[str, int]) -> list[Part]:
    """Return the parts of a file whose tensors take the bytes `stored`, by name of the tensor.

    The parts are the linears by role, the tables, and the rest.
    """
    tables, linears = table_names(model), linear_names(model)
    kinds = {name: f"{role_of(name)} linears" for name in sorted(linears, key=role_of)}
    names = ("embedding and head",) if is_tied(model) else ("embedding", "head")
    kinds |= dict(zip(tables, names, strict=False))  # a model may have no head
    rest = "norms and others"
    sizes = dict.fromkeys([*kinds.values(), rest], 0)
    counts = dict.fromkeys(sizes, 0)
    for key, size in stored.items():
        # a bias is no weight of its linear's format
        owners = () if key.endswith(".bias") else accumulate(key.split("."), "{}.{}".format)
        sizes[next((kinds[name] for name in owners if name in kinds), rest)] += size
    for name, kind in kinds.items():
        counts[kind] += math.prod(weight_shape(model.get_submodule(name)))
    counts[rest] = parameter_count(model) - sum(counts.values())
    return [Part(kind, counts[kind], sizes[kind] / 1e6) for kind in sizes if counts[kind]]


def num_weights(module: QuantWeight) -> int:
    """Return the number of weights of a quantized linear or table."""
    return module.out_features * module.in_features


def packed_bytes(module: QuantWeight) -> int:
    """Return the bytes of its packed indices."""
    spec, count = module.spec, module.in_features // module.spec.vector_size
    return module.out_features * packed_width(count, spec.bits)
