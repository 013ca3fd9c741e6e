"""Bits per module from measured sensitivity: the least KL that a budget of bits can buy.

Shapes: O out_features, I in_features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qat.errors import ConfigError
from qat.logs import progress
from qat.models.calibrate import TokenBatch
from qat.models.count import stored_bits
from qat.models.hf_quantizer import empty_weight
from qat.models.language_model import LanguageModel
from qat.models.sensitivity import measure_sensitivities
from qat.models.swap import linear_names
from qat.models.tables import table_names, table_spec, weight_shape
from qat.nn.frozen_lut_linear import FrozenLutLinear
from qat.nn.lut_embedding import FrozenLutTable
from qat.quant.budget import Option, choose_options
from qat.quant.spec import LutSpec, PlanRule, QuantPlan

LINEAR_BITS = (2, 3, 4)
TABLE_BITS = (4, 8)
TOLERANCE = 1e-9
"""Relative room for the rounding of a budget."""

Formats = Mapping[str, Sequence[LutSpec]]


@dataclass(frozen=True)
class ModuleChoice:
    """What one module got, and what each of its formats would have cost."""

    bits: int
    kl_nats: dict[int, float]
    """By bits: the KL of the model with this module alone quantized."""


@dataclass(frozen=True)
class BudgetReport:
    """How a budget was spent."""

    bits_budget: float
    """Bits per weight that the chosen modules may take together."""
    bits_per_weight: float
    """What they take, with scales and codebooks."""
    predicted_kl_nats: float
    """The sum of the chosen formats' KLs, each measured alone."""
    modules: dict[str, ModuleChoice]


def plan_within_budget(
    model: LanguageModel,
    plan: QuantPlan,
    bits_budget: float,
    calibration: Sequence[TokenBatch],
    *,
    with_tables: bool = False,
) -> tuple[QuantPlan, BudgetReport]:
    """The plan that costs least, as the sum of KLs measured alone, within `bits_budget`.

    Every linear that `plan` quantizes gets 2, 3 or 4 bits of a learned codebook under the plan's
    form of scale; `with_tables` the embedding and an untied head get 4 or 8. Together they take at
    most `bits_budget` bits per weight. Tables that the plan itself names stay as it says.

    Args:
        model: whose weights are quantized and whose output is kept; as before afterwards.
        plan: says which linears, and in which groups.
        calibration: what to judge on and to fit to, see `measure_sensitivities`.

    Raises:
        ConfigError: the formats cannot meet the budget, need less, or do not fit a layer.
    """
    tables = table_names(model.model)
    planned = plan.assign(linear_names(model.model), tables)
    chosen_tables = tables if with_tables else []
    kept = {n: spec for n, spec in planned.items() if n in tables and n not in chosen_tables}
    linears = {n: spec for n, spec in planned.items() if n not in tables}
    formats = {**_table_formats(model, chosen_tables), **_linear_formats(model, linears)}
    bits = {n: [_stored_bits(model, n, spec) for spec in specs] for n, specs in formats.items()}
    num_weights = sum(_num_weights(model, name) for name in formats)
    _check_reach(bits_budget, list(bits.values()), num_weights)
    num_trials = sum(map(len, formats.values()))
    with progress("measuring sensitivities", num_trials, "trials") as ticker:
        nats = measure_sensitivities(model, calibration, formats, ticker)
    options = {
        name: [Option(nats[name][spec], b) for spec, b in zip(specs, bits[name], strict=True)]
        for name, specs in formats.items()
    }
    limit = int(bits_budget * num_weights * (1 + TOLERANCE))
    taken = dict(zip(options, choose_options(list(options.values()), limit), strict=True))
    chosen = {name: formats[name][place] for name, place in taken.items()}
    spent = [options[name][place] for name, place in taken.items()]
    report = BudgetReport(
        bits_budget=bits_budget,
        bits_per_weight=sum(option.bits for option in spent) / num_weights,
        predicted_kl_nats=sum(option.cost for option in spent),
        modules={
            name: ModuleChoice(spec.bits, {s.bits: kl for s, kl in nats[name].items()})
            for name, spec in chosen.items()
        },
    )
    rules = tuple(PlanRule(pattern=n, spec=spec) for n, spec in {**kept, **chosen}.items())
    return QuantPlan(name=f"mixed-{bits_budget:g}", rules=rules), report


def _linear_formats(model: LanguageModel, specs: Mapping[str, LutSpec]) -> Formats:
    for name, spec in specs.items():
        spec.check_shape(name, *weight_shape(model.model.get_submodule(name)))
    return {
        name: [spec.model_copy(update={"bits": b, "codebook": "lut"}) for b in LINEAR_BITS]
        for name, spec in specs.items()
    }


def _table_formats(model: LanguageModel, names: Sequence[str]) -> Formats:
    formats = {}
    for name in names:
        module = model.model.get_submodule(name)
        if isinstance(module, FrozenLutTable):
            raise ConfigError(
                f"embedding_bits=auto, but {name} is quantized already, expected a float table to "
                "choose bits for; give the float model as --base"
            )
        width = weight_shape(module)[1]
        formats[name] = [table_spec(bits, width) for bits in TABLE_BITS]
    return formats


def _check_reach(bits_budget: float, bits: Sequence[Sequence[int]], num_weights: int) -> None:
    """Refuse a budget outside of what the formats can take.

    Raises:
        ConfigError: it is below the smallest formats or above the largest.
    """
    least, most = (sum(map(pick, bits)) / num_weights for pick in (min, max))
    room = TOLERANCE * bits_budget
    if not least - room <= bits_budget <= most + room:
        raise ConfigError(
            f"bits_budget={bits_budget:g}, but these {len(bits)} modules take {least:.4f} to "
            f"{most:.4f} bits per weight with scales and codebooks; give a budget between, or "
            "larger groups with --group-size"
        )


def _stored_bits(model: LanguageModel, name: str, spec: LutSpec) -> int:
    with torch.device("meta"):
        weight = empty_weight(spec, *weight_shape(model.model.get_submodule(name)))
        return stored_bits(FrozenLutLinear(weight, None, spec))


def _num_weights(model: LanguageModel, name: str) -> int:
    O, I = weight_shape(model.model.get_submodule(name))
    return O * I
