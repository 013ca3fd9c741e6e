"""Formats of a student's embedding and head.

Integers of a table that was rounded once are recovered, so that it is not rounded a second time
(`qat.quant.integers`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.convert.calibrate import TokenBatch, head_second_moment
from qat.convert.config import ConvertConfig
from qat.convert.shipping import Shipping
from qat.errors import ConfigError
from qat.kernels.column_sweep import COLUMN_OPS, nearest_vectors
from qat.models.language_model import LanguageModel
from qat.models.stored_state import narrowed
from qat.nn.lut_embedding import QuantTable
from qat.nn.swap import (
    FEW_BITS,
    holds_quantized_tables,
    is_tied,
    reads_input,
    table_names,
    table_spec,
    tables_read,
    weight_shape,
    with_tables,
)
from qat.quant.error_feedback import fit_all_to_inputs
from qat.quant.fit import fit_weight, with_zero_groups
from qat.quant.integers import exact_integers, integer_spec, is_integers, rounded_bits
from qat.quant.spec import LutSpec, PlanRule, QuantPlan
from qat.quant.weight import QuantizedWeight

BUDGET_BITS = (2, 3, 4, 8)
"""Bits that a budget tries for a table."""
LOOKED_UP = 0.3
"""The weight of an error in a tied table's rows, relative to the mean square of its head's inputs.

SmolLM2 with a table of 2 bits and float linears has a KL of 1.61 nats where the table is fitted to
its values, and 0.57, 0.49, 0.49 and 0.68 with 0, 0.1, 1 and 10 (96 x 128 tokens of instructions,
judged on others)."""
UNSEEN = 0.01
"""The weight of a row whose token is not in the text when codewords are fitted; the mean is 1."""
FLOAT_BITS = 16
"""Bits from which on a type is floating point; the value of `--embedding-bits` for that."""


class StoredTable(NamedTuple):
    """An embedding or a head as stored in the file of the source."""

    bits: float
    """Bits per weight, scales included."""
    sample: Tensor
    """Some rows, float32 `(n, D)`."""

    @property
    def index_bits(self) -> int:
        """Bits per weight without its share of scales: 4 for Q4_0, Q4_1 and Q4_K."""
        return math.ceil(self.bits - 1)


def plan_tables(
    plan: QuantPlan,
    model: PreTrainedModel,
    config: ConvertConfig,
    *,
    stored: Mapping[str, StoredTable],
    shipping: Shipping | None,
) -> QuantPlan:
    """Return `plan` with rules for the tables, as `config` says or by default.

    Raises:
        ConfigError: floating point is requested and a table is quantized already, or few bits and
            the model's own code reads the table.
    """
    bits, names = config.embedding_bits, table_names(model)
    if bits == FLOAT_BITS:
        return _in_floats(plan, model)
    if bits is not None or _has_default(plan, model, shipping):
        specs = {}
        for name in names:
            module = model.get_submodule(name)
            if bits is None and isinstance(module, QuantTable):
                specs[name] = module.spec  # it keeps its format
            else:
                most = bits or _usual_bits(plan)
                spec = table_format(model, name, most, stored.get(name))
                specs[name] = spec if isinstance(module, QuantTable) else _with_zeros(spec, module)
        plan = with_tables(plan, model, specs)
    for table in tables_read(model):
        # a tied head is read in place of the embedding, whose rule decides for both
        named = [name for name in names if is_tied(model) or model.get_submodule(name) is table]
        if any(plan.spec_for(name, is_table=True) for name in named):
            raise ConfigError(
                f"{named[0]} is to be quantized, but the code of model_type="
                f"{model.config.model_type} reads its weight, expected a table in floating point; "
                f"leave out --embedding-bits, or give it {FLOAT_BITS}"
            )
    return plan


def _with_zeros(spec: LutSpec, module: nn.Module) -> LutSpec:
    """Return a format of as many bits that holds rows of zeros, if the float table has some.

    The row of a padding token often is one. Scales of 8 bits hold no zero; those of 16, for twice
    as many weights, do.
    """
    weight = cast(Tensor, module.weight)
    if spec.scale_bits != 8 or weight.is_meta or weight.shape[1] % (2 * spec.group_size):
        return spec
    wide = {"group_size": 2 * spec.group_size, "scale_bits": 16}
    return spec if weight.any(1).all() else spec.model_copy(update=wide)


def _usual_bits(plan: QuantPlan) -> int:
    """Return the bits of tables by default: 4 beside linears of fewer, else 8.

    In 4 bits, fitted to its head's inputs, SmolLM2's table costs 0.024 nats of KL, and q2a4 0.5 as
    converted and 0.35 as trained (speedrun/records/2026-11-29_tables).
    """
    specs = [rule.spec for rule in plan.rules if rule.spec is not None]
    return FEW_BITS if any(spec.index_bits < FEW_BITS for spec in specs) else 2 * FEW_BITS


def tables_in_budget(
    plan: QuantPlan,
    model: PreTrainedModel,
    config: ConvertConfig,
    *,
    stored: Mapping[str, StoredTable],
    shipping: Shipping | None,
) -> dict[str, list[LutSpec]] | None:
    """Return the formats that a budget may give each table.

    None if the tables have theirs already, or stay in floating point: the budget is then over the
    linears alone.
    """
    modules = {name: model.get_submodule(name) for name in table_names(model)}
    is_quantized = any(isinstance(module, QuantTable) for module in modules.values())
    if config.embedding_bits or is_quantized or not _has_default(plan, model, shipping):
        return None
    tried = {n: [table_format(model, n, b, stored.get(n)) for b in BUDGET_BITS] for n in modules}
    return {name: list(dict.fromkeys(specs)) for name, specs in tried.items()}


class TableInputs(NamedTuple):
    """The statistics of a calibration text that a head, which may be tied, is fitted by."""

    mass: Tensor
    """The weight of each row when codewords are fitted, `(V,)`; the mean is 1."""
    metric: Tensor
    """The error is `tr((W - W_q) metric (W - W_q)^T)`, `(D, D)`."""


def fit_table(weight: Tensor, spec: LutSpec, inputs: TableInputs | None = None) -> QuantizedWeight:
    """Fit a table with the least error by `inputs`, or to its values without them.

    Integers of the source are recovered, not rounded again.
    """
    found = exact_integers(weight, spec.bits) if is_integers(spec) else None
    if found is not None:
        return found
    if inputs is None or not reads_inputs(spec):
        fitted = fit_weight(weight, spec, nearest=nearest_vectors)
    else:
        mass, metric = inputs
        (fit,) = fit_all_to_inputs([weight], spec, metric, COLUMN_OPS, mass=mass)
        fitted = fit.quantized
    return with_zero_groups(weight, fitted)


def reads_inputs(spec: LutSpec) -> bool:
    """Return whether a table in that format is fitted to inputs: 8 bits lose nothing worth it."""
    return spec.index_bits <= FEW_BITS


def table_inputs(
    model: LanguageModel, specs: Mapping[str, Sequence[LutSpec]], batches: Sequence[TokenBatch]
) -> dict[str, TableInputs]:
    """Return what `batches` say about the tables of `model`, by name, for the formats `specs`.

    A head errs by `mean(((W - W_q) h)^2)` on its inputs h, which run through `model` here, and its
    rows count by the number of their tokens. A tied table is looked up too: `LOOKED_UP` of the mean
    diagonal is added for all features alike. An embedding of its own is fitted to its values.
    """
    names = [n for n in table_names(model.model) if any(map(reads_inputs, specs.get(n, ())))]
    heads = [name for name in names if reads_input(model.model, name)]
    moment = head_second_moment(model, batches) if heads and batches else None
    if moment is None:
        return {}
    if is_tied(model.model):
        moment.diagonal().add_(LOOKED_UP * moment.diagonal().mean())
    V = weight_shape(model.model.get_submodule(heads[0]))[0]
    ids = torch.cat([batch.input_ids.flatten() for batch in batches]).to(model.device)
    counts = torch.bincount(ids, minlength=V).float()
    mass = (counts / counts.mean() + UNSEEN) / (1 + UNSEEN)
    return dict.fromkeys(heads, TableInputs(mass, moment))


def table_format(
    model: PreTrainedModel, name: str, bits: int, stored: StoredTable | None
) -> LutSpec:
    """Return the format of a table in at most `bits`.

    A table whose values are integers of few enough bits becomes these integers. Otherwise it gets
    no more bits than it has in the source.
    """
    found = None if stored is None else rounded_bits(stored.sample)
    if found is not None and found <= bits:
        return integer_spec(found)
    if stored is not None:
        bits = min(bits, max(FEW_BITS, stored.index_bits))
    return table_spec(bits, weight_shape(model.get_submodule(name))[1])


def _has_default(plan: QuantPlan, model: PreTrainedModel, shipping: Shipping | None) -> bool:
    """Return whether tables without a rule are quantized by default.

    Low-rank scales come from the reference system, which keeps its tables in floating point.
    """
    specs = [rule.spec for rule in plan.rules if rule.spec is not None]
    tables = table_names(model)
    return (
        bool(specs)
        and all(spec.scale == "group" for spec in specs)
        and not any(plan.rule_for(name, is_table=True) for name in tables)
        and holds_quantized_tables(model)
        and (shipping is None or shipping.holds_tables)
    )


def _in_floats(plan: QuantPlan, model: PreTrainedModel) -> QuantPlan:
    tables = table_names(model)
    for name in tables:
        if isinstance(model.get_submodule(name), QuantTable):
            raise ConfigError(
                f"embedding_bits={FLOAT_BITS}, but {name} is quantized already, expected a table "
                "in floating point; convert the float model"
            )
    rules = tuple(PlanRule(pattern=name) for name in tables)
    return plan.model_copy(update={"rules": (*rules, *plan.rules)})


def round_float_tables(model: PreTrainedModel, plan: QuantPlan) -> None:
    """Round tables that `plan` leaves in floating point to bfloat16 where 16 bits do not hold them.

    In float32 they would be most of a student's file, and of a source in blocks, whose products
    only float32 holds, four times the bytes. This rounding is small beside that of the linears. A
    plan that quantizes nothing rounds nothing.
    """
    if not any(rule.spec for rule in plan.rules):
        return
    for name in table_names(model):
        module = model.get_submodule(name)
        is_float = not isinstance(module, QuantTable)
        if is_float and plan.spec_for(name, is_table=True) is None:
            weight = module.weight
            if narrowed({name: weight.data})[name].dtype == torch.float32:
                weight.data = weight.data.bfloat16().to(weight.dtype)
