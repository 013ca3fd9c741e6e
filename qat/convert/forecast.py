"""Forecast of a conversion's result and cost from a model's configuration alone.

The model is built without values, gets its formats in the same way as an opened checkpoint, and is
counted. The time is estimated from a matrix product and a fit that are timed on the device.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from qat.backend.base import GIB, Backend
from qat.backend.device import select
from qat.convert.bits_budget import JUDGED_TOKENS, formats_to_try
from qat.convert.config import ConvertConfig, read_kv, read_plan
from qat.convert.convert import budget_room
from qat.convert.quantize import FIT_BYTES, check_experts
from qat.convert.savings import Saving, savings
from qat.convert.shipping import FileSizes, Shipping
from qat.convert.stored_tables import join_tables, stored_tables
from qat.convert.tables import FLOAT_BITS, StoredTable, plan_tables
from qat.models.attention import change_attention, read_attention
from qat.models.checkpoint import is_packed, load_skeleton
from qat.models.cost import (
    Part,
    linear_bits,
    parameter_count,
    parts_of,
    quantized_parameter_count,
)
from qat.models.cost import stored_bits as bits_of
from qat.models.directory import GGUF, adapted, resolve
from qat.models.document_attention import set_kv
from qat.models.gguf_header import read_header
from qat.models.hf_quantizer import put_empty_formats
from qat.models.load import load_tokenizer
from qat.models.opening import auto_class, read_config
from qat.models.sizes import MEGABYTE, Sizes, checkpoint_sizes, source_megabytes, tensor_sizes
from qat.models.stored_state import PACKED, quantized_modules
from qat.nn.sites import open_sites
from qat.nn.swap import (
    decoder_layers,
    is_tied,
    linear_names,
    table_names,
    untie_head,
    weight_shape,
)
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec, PlanRule, by_group

SIDE = 1024
"""Rows and columns of the matrices whose product is timed."""
PRODUCTS = 8
"""Number of times that the product is computed; the fastest counts."""
FIT_ROWS, FIT_COLUMNS = 512, 1024
"""The shape of the weight whose fit is timed."""
READ_BYTES = 1e8
"""Bytes of a source that are read and converted to floats per second."""
COLUMN_S = 4e-5
"""Seconds of kernel launches per column of a weight that is fitted to inputs."""
BUDGET_BITS = 4
"""Bits of levels that stand in for the formats that a budget will choose."""
FLOAT = 4
"""Bytes per weight while a model is converted."""


class Forecast(NamedTuple):
    """The expected result, time and memory of a conversion."""

    model: PreTrainedModel
    """The student without values."""
    sizes: Sizes
    """The sizes of the packed checkpoint, or of the file of a target that counts it."""
    parts: list[Part]
    """Their parts; empty for a budget, which is yet to choose."""
    savings: list[Saving]
    """The flags that would make it smaller, and by how much."""
    minutes: float
    """An estimate for the device in its current state."""
    memory_gib: float
    """Peak host or device memory, an estimate."""


def forecast(source: str, config: ConvertConfig, shipping: Shipping | None = None) -> Forecast:
    """Forecast a conversion of `source` by `config`; only a few rows of weights are read.

    The calibration text need not exist yet.

    Raises:
        ConfigError, CheckpointError, ExportError: the conversion itself would fail in this way.
    """
    plan = read_plan(config)
    model, itemsize, stored = _skeleton(source, config)
    if config.attention is not None:
        change_attention(model, read_attention(config.attention))
    check_experts(plan, model)
    is_of_file, seconds = False, 0.0
    if config.bits_budget is not None:
        measured = model if config.base is None else _skeleton(config.base, config)[0]
        room = budget_room(plan, measured, config, stored=stored, shipping=shipping)
        tried = formats_to_try(measured, plan, config.bits_budget, room).formats
        seconds = _trial_seconds(select(config.device), measured, tried)
        is_of_file = room.tables is not None
        if config.to is None:  # levels stand in: most targets hold them
            spec = by_group(BUDGET_BITS, config.group_size or 16)
            plan = plan.model_copy(update={"rules": (PlanRule(pattern="*", spec=spec),)})
    plan = plan_tables(plan, model, config, stored=stored, shipping=shipping)
    if shipping is not None:
        plan = shipping.plan(plan, model, asked=config)
    names = table_names(model)
    specs = plan.assign(linear_names(model), names)
    for name, spec in specs.items():
        spec.check_shape(name, *weight_shape(model.get_submodule(name)))
    seconds += _seconds(model, specs, config)
    memory = _memory(source, model, specs, config)
    inputs = {n: plan.activation_for(n, is_table=n in names) for n in specs}
    put_empty_formats(model, specs, {n: each for n, each in inputs.items() if each is not None})
    if (kv := read_kv(config)) is not None:
        set_kv(model, kv)
    stored_sizes, of_linears = _bytes_by_name(model, itemsize), linear_bits(model)
    size = sum(stored_sizes.values())
    if is_of_file:  # what the linears get of it is measured
        size, of_linears = round(config.bits_budget * parameter_count(model) / 8), math.nan
    elif config.bits_budget is not None:
        size += round((config.bits_budget - of_linears) * quantized_parameter_count(model) / 8)
        of_linears = config.bits_budget
    sizes = Sizes(
        source_megabytes=source_megabytes(source),
        megabytes=size / MEGABYTE,
        bits_per_weight=8 * size / parameter_count(model),
        linear_bits=of_linears,
    )
    parts = [] if config.bits_budget is not None else parts_of(model, stored_sizes)
    if parts and shipping is not None and shipping.count_file is not None:
        stored_sizes, counted = shipping.count_file(
            model, stored_sizes, load_tokenizer(source, trust_remote_code=config.trust_remote_code)
        )
        sizes, parts = _beside(counted, sizes.source_megabytes), counted.parts
    return Forecast(
        model=model,
        sizes=sizes,
        parts=parts,
        savings=savings(model, config, sizes=stored_sizes, stored=stored, shipping=shipping),
        minutes=seconds / 60,
        memory_gib=memory / GIB,
    )


def shipped_sizes(directory: Path, source: str | None, shipping: Shipping) -> Sizes:
    """Return the sizes of the file that a packed checkpoint becomes, if a target counts it.

    Otherwise those of the checkpoint. Only its configuration and file sizes are read.

    Raises:
        CheckpointError: it is not a packed checkpoint.
    """
    sizes = checkpoint_sizes(directory, source)
    if shipping.count_file is None:
        return sizes
    tokenizer = load_tokenizer(str(directory))
    _, counted = shipping.count_file(load_skeleton(directory), tensor_sizes(directory), tokenizer)
    return _beside(counted, sizes.source_megabytes)


def _beside(counted: FileSizes, source_megabytes: float | None) -> Sizes:
    """Return the sizes of a target's file together with the size of its source."""
    return Sizes(source_megabytes, counted.megabytes, counted.bits_per_weight, counted.linear_bits)


def _skeleton(
    source: str, config: ConvertConfig
) -> tuple[PreTrainedModel, int, dict[str, StoredTable]]:
    """Return the model of `source` without values, bytes per float, and its tables in GGUF."""
    path = resolve(source)
    path = adapted(path) or path
    if is_packed(Path(path)):
        return load_skeleton(Path(path)), 2, {}
    settings = read_config(path, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        model = auto_class(settings).from_config(
            settings, trust_remote_code=config.trust_remote_code
        )
    open_sites(model)
    stored = join_tables(model, stored_tables(path, model))
    if config.rotate:
        stored = {}
        if is_tied(model):  # rotation folds the last norm's gains into the head
            untie_head(model)
    if path.endswith(GGUF):  # 16 bits do not hold the products of a block
        matrices = (each for each in read_header(Path(path)).values() if len(each.shape) > 1)
        is_wide = any(each.bits < FLOAT_BITS for each in matrices)
    else:
        is_wide = getattr(settings, "dtype", None) == torch.float32
    return model.eval(), 4 if is_wide else 2, stored


def _bytes_by_name(model: PreTrainedModel, itemsize: int) -> dict[str, int]:
    """Return the bytes of each weight in a model's checkpoint, with `itemsize` bytes per float.

    A table beside quantized weights has two (`round_float_tables`).
    """
    modules = quantized_modules(model)
    tables = [f"{name}.weight" for name in table_names(model)] if modules else []
    inside = {id(t) for m in modules.values() for t in (*m.parameters(), *m.buffers())}
    inside -= {id(m.bias) for m in modules.values() if getattr(m, "bias", None) is not None}
    floats = {
        name: (FLOAT_BITS // 8 if name in tables else itemsize) * p.numel()
        for name, p in model.named_parameters()
        if id(p) not in inside
    }
    return floats | {f"{name}.{PACKED}": bits_of(m) // 8 for name, m in modules.items()}


def _seconds(model: PreTrainedModel, specs: Mapping[str, LutSpec], config: ConvertConfig) -> float:
    """Estimate the seconds to read, fit and write a model with linears in floating point."""
    backend = select(config.device)
    shapes = {name: weight_shape(model.get_submodule(name)) for name in specs}
    tables = table_names(model)
    is_calibrated = config.calibration is not None
    alone = {n: s for n, s in specs.items() if n in tables or not is_calibrated}
    seconds = FLOAT * parameter_count(model) / READ_BYTES / 2
    rates: dict[LutSpec, float] = {}
    for name, spec in alone.items():
        if spec not in rates:
            rates[spec] = _fit_seconds(backend, spec)
        seconds += rates[spec] * math.prod(shapes[name]) / backend.workers()
    if is_calibrated and len(alone) < len(specs):
        seconds += _calibrated_seconds(
            backend, {n: shapes[n] for n in specs.keys() - alone}, config
        )
    return seconds


def _fit_seconds(backend: Backend, spec: LutSpec) -> float:
    """Return the seconds per weight of a fit to the weight alone, timed on random values."""
    columns = -(-FIT_COLUMNS // spec.group_size) * spec.group_size
    weight = torch.randn(FIT_ROWS, columns, device=backend.device)
    return backend.seconds_of(lambda: fit_weight(weight, spec)) / weight.numel()


def _calibrated_seconds(
    backend: Backend, shapes: Mapping[str, tuple[int, int]], config: ConvertConfig
) -> float:
    """Estimate the seconds to fit linears of these `(O, I)` to inputs.

    That is the forward of teacher and student, the products of inputs, their factor, and the sweep
    over columns.
    """
    tokens = config.calibration_sequences * config.calibration_length
    flops, columns = 0.0, 0
    for O, I in shapes.values():
        flops += 2 * 2 * tokens * O * I  # forward of teacher and student
        flops += 2 * 2 * tokens * I * I / 3  # products of inputs, shared by about three linears
        flops += 4 * I**3 + 4 * O * I * I
        columns += I
    return flops / product_flops(backend) + columns * COLUMN_S


def _trial_seconds(
    backend: Backend, model: PreTrainedModel, tried: Mapping[str, Sequence[LutSpec]]
) -> float:
    """Estimate the seconds of a budget's trials: each is fitted and judged alone.

    Judging runs the layers behind the weight, half of the model on average.
    """
    flops, columns = 0.0, 0
    for name, specs in tried.items():
        O, I = weight_shape(model.get_submodule(name))
        flops += len(specs) * (parameter_count(model) * JUDGED_TOKENS + 4 * O * I * I)
        columns += len(specs) * I
    return flops / product_flops(backend) + columns * COLUMN_S


def product_flops(backend: Backend, dtype: torch.dtype = torch.float32) -> float:
    """Return the FLOP/s of a large matrix product: the best of some, as other work disturbs."""
    one = torch.randn(SIDE, SIDE, device=backend.device, dtype=dtype)
    return 2 * SIDE**3 / min(backend.seconds_of(lambda: one @ one) for _ in range(PRODUCTS))


def _memory(
    source: str, model: PreTrainedModel, specs: Mapping[str, LutSpec], config: ConvertConfig
) -> float:
    """Estimate peak bytes: the model, or one layer if it stays in its files, and a fit."""
    path = resolve(source)
    sizes = [math.prod(weight_shape(model.get_submodule(name))) for name in specs]
    stays = not (path.endswith(GGUF) or adapted(path) or is_packed(Path(path)))
    stays &= not config.rotate and config.attention is None
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    shapes = [weight_shape(model.get_submodule(name)) for name in table_names(model)]
    tables = max(map(math.prod, shapes), default=0)
    held = max(*layers, tables) if stays else parameter_count(model)
    memory = FLOAT * held + FIT_BYTES * max(sizes, default=0)
    if config.calibration is not None:
        tokens = config.calibration_sequences * config.calibration_length
        width = model.config.get_text_config().hidden_size
        memory += 2 * FLOAT * tokens * width  # hidden states of teacher and student
        columns = (weight_shape(model.get_submodule(name))[1] for name in specs)
        memory += 3 * 8 * max(columns, default=0) ** 2
    return memory
