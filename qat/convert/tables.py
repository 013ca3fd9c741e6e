"""Formats of a student's embedding and head, and the formats that they have in the source.

A llama.cpp file may hold one table twice, rounded to different types; the finer one is used for
both. Its integers are recovered, so that a table that was rounded once is not rounded a second time
(`qat.quant.integers`).
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from qat.convert.config import ConvertConfig
from qat.convert.shipping import Shipping
from qat.errors import ConfigError
from qat.models.directory import GGUF, resolve
from qat.models.gguf_header import read_header, read_rows
from qat.nn.lut_embedding import FrozenLutTable
from qat.nn.swap import (
    FEW_BITS,
    holds_quantized_tables,
    table_names,
    table_spec,
    tie_head,
    weight_shape,
    with_tables,
)
from qat.quant.integers import integer_spec, rounded_bits
from qat.quant.spec import LutSpec, PlanRule, QuantPlan

logger = logging.getLogger(__name__)

USUAL_BITS = 8
"""Bits of tables by default."""
FLOAT_BITS = 16
"""Bits from which on a type is floating point; the value of `--embedding-bits` for that."""
SAMPLE = 256
"""Rows of a table that are inspected before it is read."""
GGUF_TABLES = ("token_embd.weight", "output.weight")
"""Names of the embedding and the head in llama.cpp."""


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


def stored_tables(source: str, model: PreTrainedModel) -> dict[str, StoredTable]:
    """Return the tables of `model` in the GGUF file `source`, by the model's names; else nothing.

    Only a few rows are read.
    """
    path = Path(resolve(source))
    if path.suffix != GGUF:
        return {}
    header, found = read_header(path), {}
    for name, stored in zip(table_names(model), GGUF_TABLES, strict=False):  # a tied head has none
        if (tensor := header.get(stored)) is not None:
            rows = range(0, tensor.shape[0], max(1, tensor.shape[0] // SAMPLE))
            found[name] = StoredTable(tensor.bits, read_rows(path, tensor, rows))
    return found


def join_tables(
    model: PreTrainedModel, stored: Mapping[str, StoredTable]
) -> dict[str, StoredTable]:
    """Tie the head of `model` to its embedding if both are roundings of one table; return the rest.

    The finer one of the two is kept. A table rounded to b bits has a relative error of about two
    thirds of `2**(1 - b)`: two tables that are further apart are different ones.
    """
    if len(stored) != 2 or max(table.bits for table in stored.values()) >= FLOAT_BITS:
        return dict(stored)
    coarse, fine = sorted(stored, key=lambda name: stored[name].bits)
    samples = stored[coarse].sample, stored[fine].sample
    if samples[0].shape != samples[1].shape:
        return dict(stored)
    distance = ((samples[0] - samples[1]).norm() / samples[1].norm()).item()
    if not distance <= 2.0 ** (1 - stored[coarse].index_bits):
        return dict(stored)
    tie_head(model, model.get_submodule(fine).weight.detach())
    logger.info(
        "the source holds one table twice, as %s in %.3g bits and as %s in %.3g, %.1f%% apart: "
        "the student has the finer one for both",
        *(coarse, stored[coarse].bits, fine, stored[fine].bits, 100 * distance),
    )
    return {table_names(model)[0]: stored[fine]}


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
        ConfigError: floating point is requested and a table is quantized already.
    """
    bits = config.embedding_bits
    if bits == FLOAT_BITS:
        return _in_floats(plan, model)
    if bits == "auto" or (bits is None and not _has_default(plan, model, shipping)):
        return plan
    specs = {name: _format(model, name, bits, stored.get(name)) for name in table_names(model)}
    return with_tables(plan, model, specs)


def _format(
    model: PreTrainedModel, name: str, bits: int | None, stored: StoredTable | None
) -> LutSpec:
    """Return the format of a table.

    A quantized table keeps its format. A table whose values are integers of few enough bits becomes
    these integers. Otherwise it gets no more bits than it has in the source.
    """
    module, most = model.get_submodule(name), bits or USUAL_BITS
    if bits is None and isinstance(module, FrozenLutTable):
        return module.spec
    found = None if stored is None else rounded_bits(stored.sample)
    if found is not None and found <= most:
        return integer_spec(found)
    if stored is not None:
        most = min(most, max(FEW_BITS, stored.index_bits))
    return table_spec(most, weight_shape(module)[1])


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
        if isinstance(model.get_submodule(name), FrozenLutTable):
            raise ConfigError(
                f"embedding_bits={FLOAT_BITS}, but {name} is quantized already, expected a table "
                "in floating point; convert the float model"
            )
    rules = tuple(PlanRule(pattern=name) for name in tables)
    return plan.model_copy(update={"rules": (*rules, *plan.rules)})


def round_float_tables(
    model: PreTrainedModel, plan: QuantPlan, stored: Mapping[str, StoredTable]
) -> None:
    """Round tables that `plan` leaves in floating point to bfloat16 if their source has fewer bits.

    Dequantized blocks are products that only float32 holds, at four bytes for one byte in the file;
    this rounding is small compared to that of the blocks.
    """
    for name, table in stored.items():
        if plan.spec_for(name, is_table=True) is None and table.bits < FLOAT_BITS:
            weight = model.get_submodule(name).weight
            weight.data = weight.data.bfloat16().to(weight.dtype)
