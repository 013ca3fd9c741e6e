"""The tensors of a packed checkpoint, from a model on any device or from host copies."""

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qat.errors import CheckpointError
from qat.nn.lut_embedding import quant_tables
from qat.nn.quant_linear import quant_linears
from qat.nn.quant_weight import LatentWeight, QuantWeight
from qat.quant.activation import static_scale
from qat.quant.spec import ActivationKind
from qat.quant.weight import (
    STORED_DTYPES,
    dtype_as_stored,
    pack,
    round_as_stored,
    round_levels,
    to_stored,
    unpack,
)

PACKED = "packed"
"""Name of the packed indices among a weight's tensors."""
INPUT_SCALE = "activation.scale"
"""Name of the static scale of a module's input: one float32 number."""


class RawState(NamedTuple):
    """The tensors that a packed checkpoint is computed from, by their names in the checkpoint."""

    own: dict[str, Tensor]
    """Tensors of the model, without latent weights."""
    made: dict[str, Tensor]
    """Packed indices of the current latent weights, in the order of their codebook."""


def raw_state(model: nn.Module) -> RawState:
    """Return the model's state on its device with little computation and no synchronization."""
    own, made = dict(model.state_dict()), {}
    for name, module in quantized_modules(model).items():
        if isinstance(module, LatentWeight):
            del own[f"{name}.weight"]
            made[f"{name}.{PACKED}"] = pack(module.indices(), module.spec.bits)
    return RawState(own, made)


def packed_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state as a packed checkpoint stores it.

    For each quantized linear or table: `packed` (uint8), `codebook` (levels in float32, ascending,
    or codewords in int8 or float16), its scales (float16, or uint8 for 8 bits; `rank_gain`
    float32), the factors of its adapter (float16), the static scale of its input (float32; linears
    that share one each have a copy) and the bias. All other tensors are unchanged, or in 16 bits if
    that is lossless: a student with float32 masters does not become larger than its teacher.

    Raises:
        CheckpointError: a scale or level is not finite in its stored dtype.
    """
    raw = raw_state(model)
    return stored_state(model, raw.own | raw.made)


def stored_state(model: nn.Module, raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the `packed_state_dict` of the moment at which `raw`, the whole raw state, was taken.

    Reads no weight of `model`, so that another thread may continue training.

    Raises:
        CheckpointError: see `packed_state_dict`.
    """
    rest, stored = dict(raw), {}
    finite: dict[str, Tensor] = {}
    for name, module in quantized_modules(model).items():
        parts = {key: rest.pop(f"{name}.{key}") for key in (PACKED, *weight_parts(module))}
        for key, tensor in _stored_parts(name, module, parts, finite).items():
            stored[f"{name}.{key}"] = tensor
        if has_input_scale(module):
            scale, bits = rest.pop(f"{name}.{INPUT_SCALE}"), module.activation.spec.scale_bits
            stored[f"{name}.{INPUT_SCALE}"] = static_scale(scale, bits).clone()
    _check_finite(model, finite)
    return narrowed(rest) | stored


def state_as_read(model: nn.Module) -> dict[str, Tensor]:
    """Return `packed_state_dict` of a model whose quantized weights are still as stored."""
    state, quantized = dict(model.state_dict()), {}
    for prefix, module in quantized_modules(model).items():
        quantized[f"{prefix}.{PACKED}"] = state.pop(f"{prefix}.{PACKED}")
        for key in weight_parts(module):  # transformers reads 16-bit parts as float32
            stored = dtype_as_stored(key, module.spec.stored_bits(key))
            quantized[f"{prefix}.{key}"] = state.pop(f"{prefix}.{key}").to(stored)
        if has_input_scale(module):
            quantized[f"{prefix}.{INPUT_SCALE}"] = state.pop(f"{prefix}.{INPUT_SCALE}")
    return narrowed(state) | quantized


def stored_dtype(state: dict[str, Tensor]) -> torch.dtype:
    """Return the dtype of all tensors outside of quantized weights; float32 if they differ."""
    special = tuple(f".{part}" for part in (*STORED_DTYPES, PACKED, INPUT_SCALE))
    dtypes = {tensor.dtype for name, tensor in state.items() if not name.endswith(special)}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def quantized_modules(model: nn.Module) -> dict[str, QuantWeight]:
    """Return the model's quantized tables and linears by name."""
    return {**quant_tables(model), **quant_linears(model)}


def activation_counts(model: nn.Module) -> dict[ActivationKind, int]:
    """Count the quantized tables and linears that quantize their input, by kind."""
    quantizers = (module.activation for module in quantized_modules(model).values())
    return dict(Counter(each.spec.kind for each in quantizers if each is not None))


def has_input_scale(module: QuantWeight) -> bool:
    """Return whether the scale of its input is stored."""
    return module.activation is not None and module.activation.spec.is_static


def weight_parts(module: QuantWeight) -> dict[str, Tensor]:
    """Return the stored tensors of a weight except its indices, by name, as they are now."""
    return {key: p for key, p in module.weight_parameters().items() if key in STORED_DTYPES}


def _stored_parts(
    name: str,
    module: QuantWeight,
    parts: dict[str, Tensor],
    finite: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Return the stored tensors of a module; adds to `finite` a flag for each."""
    spec, parts, stored = module.spec, dict(parts), {}
    packed, codebook = parts.pop(PACKED), parts["codebook"]
    parts["codebook"] = codebook = round_levels(codebook, spec.level_bits)
    if codebook.dim() == 1:
        parts["codebook"], order = codebook.sort(stable=True)
        if not torch.equal(order, torch.arange(len(order), device=order.device)):
            rank = order.argsort().to(torch.uint8)
            packed = pack(rank[unpack(packed, spec.bits, module.in_features).int()], spec.bits)
    for key, tensor in parts.items():
        rounded = round_as_stored(key, tensor, spec.stored_bits(key))
        finite[f"{name}.{key}"] = rounded.isfinite().all()
        stored[key] = to_stored(key, rounded, spec.stored_bits(key))
    return {PACKED: packed, **stored}


def narrowed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors to 16 bits where that is exact; tied tensors stay tied.

    All become bfloat16 or all float16 if one of these holds all, else each gets the one that holds
    it. Tensors that are mixed in 16 and 32 bits are judged by their values alone, as a reader has
    all of them in one dtype. Synchronizes a few times, not once per tensor.
    """
    floats = (torch.float32, torch.float16, torch.bfloat16)
    wide = {t.data_ptr(): t for t in state.values() if t.dtype in floats and t.numel()}
    dtypes = {t.dtype for t in wide.values()}
    if len(dtypes) == 1 and torch.float32 not in dtypes:
        return state
    brain = _held(wide, wide, torch.bfloat16)
    half = _held(wide, wide.keys() - brain, torch.float16)
    if half and len(half | brain) == len(wide):
        half |= _held(wide, brain, torch.float16)
        if len(half) == len(wide):
            brain = set()
    found = {p: wide[p].to(torch.float16) for p in half - brain}
    found |= {p: wide[p].to(torch.bfloat16) for p in brain}
    return {name: found.get(t.data_ptr(), t) for name, t in state.items()}


def _held(tensors: dict[int, Tensor], some: Collection[int], dtype: torch.dtype) -> set[int]:
    """Return the keys among `some` whose tensors `dtype` holds exactly."""
    flags = [(tensors[p].to(dtype).float() == tensors[p]).all() for p in some]
    return {p for p, is_held in zip(some, _read(flags), strict=True) if is_held}


def _read(flags: list[Tensor]) -> list[bool]:
    """Copy scalars on one or several devices to the host; one device is synchronized only once."""
    is_one = len({flag.device for flag in flags}) == 1
    return torch.stack(flags).tolist() if is_one else [bool(flag) for flag in flags]


def _check_finite(model: nn.Module, finite: dict[str, Tensor]) -> None:
    for full_name, is_finite in zip(finite, _read(list(finite.values())), strict=True):
        if not is_finite:
            name, _, key = full_name.rpartition(".")
            dtype = dtype_as_stored(key, model.get_submodule(name).spec.stored_bits(key))
            raise CheckpointError(
                f"{full_name} holds values that are not finite in {dtype}, expected finite ones; "
                "lower the learning rate of that kind of parameter"
            )
