"""Bits per module from measured sensitivity: the least KL that a budget of bits can buy.

Shapes: O out_features, I in_features.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from qat.convert.calibrate import TokenBatch
from qat.convert.sensitivity import measure_sensitivities
from qat.errors import ConfigError
from qat.logs import progress
from qat.models.cost import stored_bits
from qat.models.hf_quantizer import empty_weight
from qat.models.language_model import LanguageModel
from qat.nn.lut_embedding import FrozenLutTable
from qat.nn.quant_linear import FrozenLutLinear
from qat.nn.swap import linear_names, table_names, table_spec, weight_shape
from qat.quant.budget import Option, choose_options
from qat.quant.spec import LutSpec, PlanRule, QuantPlan

Bend = Callable[[str, LutSpec, tuple[int, int]], LutSpec]
LINEAR_BITS = (2, 3, 4)
TABLE_BITS = (4, 8)
TOLERANCE = 1e-9
"""Relative room for the rounding of a budget."""


@dataclass(frozen=True)
class Trial:
    """One format that a module could have got."""

    bits: int
    group_size: int
    bits_per_weight: float
    """With scales and codebook."""
    kl_nats: float
    """KL(model || model with this module alone in this format) per token."""
    is_chosen: bool


@dataclass(frozen=True)
class BudgetReport:
    """How a budget was spent."""

    bits_budget: float
    """Bits per weight that the modules below may take together."""
    bits_per_weight: float
    """What they take."""
    predicted_kl_nats: float
    """The sum of the chosen formats' KLs, each measured alone."""
    seconds: float
    """Of measuring and choosing."""
    modules: dict[str, list[Trial]]


def formats_to_try(
    model: LanguageModel,
    plan: QuantPlan,
    bits_budget: float,
    *,
    with_tables: bool = False,
    wider_groups: bool = False,
    bend: Bend | None = None,
) -> tuple[dict[str, LutSpec], dict[str, list[LutSpec]], dict[str, list[int]]]:
    """What `plan_within_budget` leaves as `plan` has it, what it tries, and the bits that takes.

    Reads names and shapes alone, so `model` may lie on the meta device.

    Raises:
        ConfigError: the formats cannot meet the budget, need less, or do not fit a layer.
    """
    tables = table_names(model.model)
    planned = plan.assign(linear_names(model.model), tables)
    formats = _table_formats(model, tables) if with_tables else {}
    kept = {n: spec for n, spec in planned.items() if n in tables and n not in formats}
    linears = {n: spec for n, spec in planned.items() if n not in tables}
    formats |= _linear_formats(model, linears, wider_groups)
    if bend is not None:
        formats = {n: _bent(model, n, specs, bend) for n, specs in formats.items()}
    bits = {n: [_stored_bits(model, n, spec) for spec in specs] for n, specs in formats.items()}
    _check_reach(bits_budget, list(bits.values()), sum(_num_weights(model, n) for n in formats))
    return kept, formats, bits


def plan_within_budget(
    model: LanguageModel,
    plan: QuantPlan,
    bits_budget: float,
    calibration: Sequence[TokenBatch],
    *,
    with_tables: bool = False,
    wider_groups: bool = False,
    bend: Bend | None = None,
) -> tuple[QuantPlan, BudgetReport]:
    """The plan whose KLs, each measured alone, add up to the least within `bits_budget`.

    Every linear that `plan` quantizes gets 2, 3 or 4 bits of a learned codebook under the plan's
    form of scale; `with_tables` the embedding and an untied head get 4 or 8. Together they take at
    most `bits_budget` bits per weight. Tables that the plan itself names stay as it says.

    Args:
        model: whose weights are quantized and whose output is kept; as before afterwards.
        plan: says which linears, and in which groups.
        calibration: what to judge on and to fit to, see `measure_sensitivities`.
        wider_groups: linears may also have groups of the next size that divides their rows.
        bend: from a module's name, a format and `(O, I)` to the format that is tried instead.

    Raises:
        ConfigError: the formats cannot meet the budget, need less, or do not fit a layer.
    """
    began = time.perf_counter()
    kept, formats, bits = formats_to_try(
        model, plan, bits_budget, with_tables=with_tables, wider_groups=wider_groups, bend=bend
    )
    sizes = {name: _num_weights(model, name) for name in formats}
    with progress("measuring sensitivities", sum(map(len, bits.values())), "trials") as ticker:
        nats = measure_sensitivities(model, calibration, formats, ticker)
    options = {
        name: [Option(nats[name][spec], size) for spec, size in zip(specs, bits[name], strict=True)]
        for name, specs in formats.items()
    }
    limit = int(bits_budget * sum(sizes.values()) * (1 + TOLERANCE))
    places = dict(zip(formats, choose_options(list(options.values()), limit), strict=True))
    chosen = {name: formats[name][place] for name, place in places.items()}
    rules = tuple(PlanRule(pattern=n, spec=spec) for n, spec in {**kept, **chosen}.items())
    taken = [options[name][place] for name, place in places.items()]
    report = BudgetReport(
        bits_budget=bits_budget,
        bits_per_weight=sum(option.bits for option in taken) / sum(sizes.values()),
        predicted_kl_nats=sum(option.cost for option in taken),
        seconds=time.perf_counter() - began,
        modules={n: _trials(formats[n], options[n], places[n], size) for n, size in sizes.items()},
    )
    return QuantPlan(name=f"mixed-{bits_budget:g}", rules=rules), report


def _trials(
    formats: Sequence[LutSpec], options: Sequence[Option], taken: int, num_weights: int
) -> list[Trial]:
    return [
        Trial(
            bits=spec.bits,
            group_size=spec.group_size,
            bits_per_weight=option.bits / num_weights,
            kl_nats=option.cost,
            is_chosen=place == taken,
        )
        for place, (spec, option) in enumerate(zip(formats, options, strict=True))
    ]


def _linear_formats(
    model: LanguageModel, specs: Mapping[str, LutSpec], wider_groups: bool
) -> dict[str, list[LutSpec]]:
    formats = {}
    for name, spec in specs.items():
        O, I = weight_shape(model.model.get_submodule(name))
        spec.check_shape(name, O, I)
        groups = [spec.group_size]
        if wider_groups:
            multiples = range(2 * spec.group_size, I + 1, spec.group_size)
            groups += [size for size in multiples if I % size == 0][:1]
        formats[name] = [
            spec.model_copy(update={"bits": bits, "codebook": "lut", "group_size": size})
            for bits in LINEAR_BITS
            for size in groups
        ]
    return formats


def _bent(model: LanguageModel, name: str, specs: Sequence[LutSpec], bend: Bend) -> list[LutSpec]:
    """What a target makes of the formats of one module, each once."""
    shape = weight_shape(model.model.get_submodule(name))
    return list(dict.fromkeys(bend(name, spec, shape) for spec in specs))


def _table_formats(model: LanguageModel, names: Sequence[str]) -> dict[str, list[LutSpec]]:
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
            f"bits_budget={bits_budget:g}, but these {len(bits)} modules can take {least:.4f} to "
            f"{most:.4f} bits per weight, scales and codebooks included; give a budget between, or "
            "another --group-size"
        )


def _stored_bits(model: LanguageModel, name: str, spec: LutSpec) -> int:
    with torch.device("meta"):
        weight = empty_weight(spec, *weight_shape(model.model.get_submodule(name)))
        return stored_bits(FrozenLutLinear(weight, None, spec))


def _num_weights(model: LanguageModel, name: str) -> int:
    O, I = weight_shape(model.model.get_submodule(name))
    return O * I
