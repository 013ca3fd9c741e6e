"""Conversion of a model in memory to fewer bits per weight."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.backend.device import select
from qat.config import Settings
from qat.convert.activations import inputs_to_quantize
from qat.convert.bits_budget import Room, formats_to_try, plan_within_budget
from qat.convert.calibrate import TokenBatch
from qat.convert.config import FLOAT, ConvertConfig, check_asked, load_rotate, read_kv
from qat.convert.quantize import QuantizeReport, check_experts, quantize_model
from qat.convert.savings import savings
from qat.convert.shipping import Shipping
from qat.convert.tables import StoredTable, plan_tables, round_float_tables, tables_in_budget
from qat.errors import ConfigError
from qat.models.attention import (
    LayerFit,
    change_attention,
    kv_spec,
    load_sparse_attention,
    read_attention,
)
from qat.models.cost import bytes_by_name
from qat.models.document_attention import quantize_kv
from qat.models.language_model import LanguageModel
from qat.models.stored_state import quantized_modules
from qat.nn.swap import linear_names, table_names, weight_shape
from qat.quant.spec import QuantPlan, by_group


class Converted(NamedTuple):
    """The results of converting a model in memory."""

    report: QuantizeReport
    plan: QuantPlan
    """The plan with the formats that a budget or a target chose."""
    fits: list[LayerFit]
    """The fits of new sparse attention."""
    rotation: dict[str, float] | None
    """The measures of the rotation; None if the model was not rotated."""


def convert_model(
    student: LanguageModel,
    config: ConvertConfig,
    *,
    base: LanguageModel | None = None,
    calibration: Sequence[TokenBatch] = (),
    shipping: Shipping | None = None,
    stored: Mapping[str, StoredTable] = MappingProxyType({}),
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Converted:
    """Convert `student` by `config`, in memory and in float32; nothing is read or written.

    `stored` are its tables as a quantized file holds them. The `tokenizer` counts in a file that
    holds it.
    """
    plan, attention = read_settings(config)
    _check_floats(student, config)
    check_experts(plan, student.model)
    rotation = load_rotate()(student)._asdict() if config.rotate else None
    if config.attention is not None:
        change_attention(student.model, attention)
    kv = read_kv(config) or kv_spec(student.model.config)
    if kv is not None:
        quantize_kv(student.model, kv, student.device)
    if rotation is not None:  # rotated tables no longer match those of the file
        stored = {}
    tables = {"config": config, "stored": stored, "shipping": shipping}
    measured = base or student
    room = budget_room(plan, measured.model, **tables)
    if shipping is not None:  # adapt the plan now, so that a refusal comes before any work
        asked = plan
        if room.levels is not None:  # levels stand in for vectors where a target has none
            change = {"spec": room.levels}
            rules = tuple(rule.model_copy(update=change) for rule in plan.rules)
            asked = plan.model_copy(update={"rules": rules})
        shipping.plan(plan_tables(asked, student.model, **tables), student.model)
    fits = []
    if attention is not None:
        steps = config.attention_steps
        fits = load_sparse_attention().fit(student, calibration, steps=steps)
    budget = None
    if config.bits_budget is not None:
        plan, budget = plan_within_budget(
            measured, plan, config.bits_budget, calibration, room=room
        )
    plan = plan_tables(plan, student.model, **tables)
    if shipping is not None:
        plan = shipping.plan(plan, student.model, asked=config)
    round_float_tables(student.model, plan)
    report = quantize_model(
        student, plan, base=base, calibration=calibration, workers=config.workers
    )
    model, sizes = student.model, bytes_by_name(student.model)
    if shipping is not None and shipping.count_file is not None:
        sizes, counted = shipping.count_file(model, sizes, tokenizer)
        report = replace(report, file=counted)
    saved = savings(model, sizes=sizes, **tables)
    return Converted(replace(report, budget=budget, savings=saved), plan, fits, rotation)


def _check_floats(model: LanguageModel, config: ConvertConfig) -> None:
    """Refuse a quantized model where one in floats is to be made."""
    quantized = next(iter(quantized_modules(model.model)), None)
    if config.to == FLOAT and quantized is not None:
        raise ConfigError(
            f"to={FLOAT}, but {quantized} is quantized already, expected a float model; run 'qat "
            "export MODEL --to dense', which writes floats of a student"
        )


def check_conversion(model: LanguageModel, config: ConvertConfig) -> None:
    """Refuse formats and budgets that do not fit the shapes of `model`; no weight is read."""
    plan, _ = read_settings(config)
    if config.bits_budget is not None:
        room = budget_room(plan, model.model, config, stored={}, shipping=None)
        formats_to_try(model.model, plan, config.bits_budget, room)
        return
    linears = linear_names(model.model)
    specs = plan.assign(linears, table_names(model.model))
    inputs_to_quantize(model.model, plan, specs)
    for name, spec in specs.items():
        if name in linears:
            spec.check_shape(name, *weight_shape(model.model.get_submodule(name)))


def budget_room(
    plan: QuantPlan,
    model: PreTrainedModel,
    config: ConvertConfig,
    *,
    stored: Mapping[str, StoredTable],
    shipping: Shipping | None,
) -> Room:
    """Return what a budget may be spent on, for these settings and targets."""
    room = Room(
        tables=tables_in_budget(plan, model, config, stored=stored, shipping=shipping),
        levels=by_group(4, config.group_size or 16) if config.to is None else None,
        wider_groups=config.group_size is None,
    )
    if shipping is None:
        return room
    return room._replace(bend=shipping.bend, size=shipping.stored_bits)


def read_settings(config: ConvertConfig) -> tuple[QuantPlan, Settings | None]:
    """Return the plan and the new sparse attention; None for dense or unchanged attention.

    Raises:
        ConfigError: nothing is named to do, a budget lacks what it needs, or the device cannot do
            it.
    """
    plan = check_asked(config)
    if select(config.device).is_traced:
        raise ConfigError(
            f"device={config.device}, but fitting reads values after every few operators, expected "
            "a device that does not compile for that; use --device cpu"
        )
    attention = None if config.attention is None else read_attention(config.attention)
    return plan, attention
