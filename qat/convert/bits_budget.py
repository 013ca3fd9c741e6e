"""Bits per module from measured sensitivity: the least KL that a budget of bits can buy.

Sensitivity is how much a model's output changes when one of its weights is quantized and nothing
else. Each weight is fitted to each format as a conversion would fit it, put in place, judged, and
taken out again; what lies before its decoder layer is not computed anew.

Shapes: O out_features, I in_features, T tokens, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.convert.calibrate import StackInputs, StageInputs, TokenBatch, stages_in_order
from qat.errors import ConfigError, ExportError
from qat.kernels.column_sweep import COLUMN_OPS, nearest_vectors
from qat.kernels.trellis import best_path
from qat.logs import Ticker, progress
from qat.models.cost import stored_bits
from qat.models.hf_quantizer import empty_weight
from qat.models.language_model import LanguageModel
from qat.models.regions import matmul_precision
from qat.models.streamed import patched_forwards
from qat.nn.lut_embedding import FrozenLutTable
from qat.nn.quant_linear import FrozenLutLinear, QuantLinear
from qat.nn.sites import StackedLinear
from qat.nn.swap import decoder_layers, linear_names, table_names, table_spec, weight_shape
from qat.quant.budget import Option, choose_options
from qat.quant.error_feedback import fit_all_to_inputs, fit_stack_to_inputs
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec, QuantPlan
from qat.quant.weight import QuantizedWeight, dequantize

JUDGED_TOKENS = 1024
"""Tokens that changed models are judged on, or half of a shorter calibration."""
ROWS = 256
"""Tokens whose logits are compared at a time."""

Sensitivities = dict[str, dict[LutSpec, float]]
"""By name and format: KL(model || model with that weight in that format), nats per token."""


@torch.no_grad()
def measure_sensitivities(
    model: LanguageModel,
    calibration: Sequence[TokenBatch],
    formats: Mapping[str, Sequence[LutSpec]],
    ticker: Ticker,
) -> Sensitivities:
    """The exact KL of every weight named in `formats`, in each of its formats alone.

    The first sequences of `calibration`, `JUDGED_TOKENS` or half of them, are judged on; linears
    are fitted to their inputs over the others. Embeddings and heads are fitted to their values.
    The model is as before afterwards.

    Args:
        formats: names of linears in the decoder layers, of the embedding or of an untied head.
        ticker: moves by one for each KL.
    """
    judged, rest = split_calibration(calibration)
    found: Sensitivities = {name: {} for name in formats}
    modules = {name: model.model.get_submodule(name) for name in formats}
    with matmul_precision("medium"):
        judge = _Judge(model, judged)

        def note(name: str, spec: LutSpec, quantized: QuantizedWeight) -> None:
            found[name][spec] = judge.divergence(modules[name], dequantize(quantized))
            ticker.advance()
            ticker.note(name)

        def measure_stage(names: list[str], inputs: StageInputs | StackInputs | None) -> None:
            if not isinstance(inputs, StageInputs):  # each by itself
                for name in names:
                    for spec in formats[name]:
                        note(name, spec, _fitted(_weight(modules[name]), spec, inputs))
                return
            for spec in dict.fromkeys(spec for name in names for spec in formats[name]):
                own = [name for name in names if spec in formats[name]]
                weights = [_weight(modules[name]) for name in own]
                fits = fit_all_to_inputs(weights, spec, inputs.second_moment, COLUMN_OPS)
                for name, fit in zip(own, fits, strict=True):
                    note(name, spec, fit.quantized)

        outside = [name for name, module in modules.items() if judge.layer_of(module) is None]
        inside = [name for name in formats if name not in outside]
        for names, inputs in chain([(outside, None)], stages_in_order(model, rest, inside)):
            measure_stage(names, inputs)
    return found


def _fitted(weight: Tensor, spec: LutSpec, inputs: StackInputs | None) -> QuantizedWeight:
    """A weight in a format: fitted to its values, or that of experts to the inputs of each."""
    if inputs is None:
        return fit_weight(weight, spec, nearest=nearest_vectors, path=best_path)
    return fit_stack_to_inputs(weight, spec, *inputs, ops=COLUMN_OPS).quantized


def split_calibration(batches: Sequence[TokenBatch]) -> tuple[TokenBatch, list[TokenBatch]]:
    """The sequences to judge on and those to fit to; a single sequence serves both."""
    ids, positions = (torch.cat(part) for part in zip(*batches, strict=True))
    wished = -(-JUDGED_TOKENS // ids.shape[1])
    count = max(1, min(wished, len(ids) // 2))
    judged = TokenBatch(ids[:count], positions[:count])
    if len(ids) == 1:
        return judged, [judged]
    size = len(batches[0].input_ids)
    rest = zip(ids[count:].split(size), positions[count:].split(size), strict=True)
    return judged, [TokenBatch(*pair) for pair in rest]


class _Judge:
    """A model, what it says about some tokens, and what its decoder layers gave for them."""

    def __init__(self, model: LanguageModel, batch: TokenBatch) -> None:
        self._model = model
        self._batch = batch
        self._layers = list(decoder_layers(model.model))
        self._gave: list[object] = []
        with patched_forwards({layer: self._noting(layer.forward) for layer in self._layers}):
            log_p_TV = self._logits().log_softmax(-1)
        self._p_TV = log_p_TV.exp()
        self._negative_entropy = _row_dots(self._p_TV, log_p_TV)

    def layer_of(self, module: nn.Module) -> int | None:
        """The number of the decoder layer that `module` lies in; None outside."""
        for number, layer in enumerate(self._layers):
            if any(inner is module for inner in layer.modules()):
                return number
        return None

    def divergence(self, module: nn.Module, weight: Tensor) -> float:
        """KL(model || model whose `module` has that weight), nats per token."""
        # layers whose input and weights another weight of `module` leaves alone give what they gave
        number = self.layer_of(module)
        if module is self._model.model.get_input_embeddings():
            number = 0
        skipped = self._layers[:number]  # all of them for a head
        given = self._gave[len(skipped) - 1] if skipped else None
        stand_ins = {layer: lambda *_args, **_named: given for layer in skipped}
        with _holding(module, weight), patched_forwards(stand_ins):
            logits_TV = self._logits()
        # sum p (log p - log q), where log q is the logits less their log-sum-exp
        crossed = logits_TV.logsumexp(-1) - _row_dots(self._p_TV, logits_TV)
        return (self._negative_entropy + crossed).double().mean().item()

    def _noting(self, forward: Callable) -> Callable:
        def call(*args: object, **named: object) -> object:
            self._gave.append(forward(*args, **named))
            return self._gave[-1]

        return call

    def _logits(self) -> Tensor:
        with matmul_precision("highest"):
            ids = (ids.to(self._model.device) for ids in self._batch)
            return self._model.logits(self._model.hidden(*ids).flatten(0, 1)).float()


def _row_dots(left: Tensor, right: Tensor) -> Tensor:
    """`sum_v left * right` for each row, a few rows at a time."""
    pairs = zip(left.split(ROWS), right.split(ROWS), strict=True)
    return torch.cat([(one * other).sum(-1) for one, other in pairs])


@contextmanager
def _holding(module: nn.Module, weight: Tensor) -> Iterator[None]:
    """Let a linear compute with `weight`, or experts, or an embedding and the head tied to it."""
    if isinstance(module, nn.Embedding | StackedLinear):
        own = module.weight.data
        module.weight.data = weight.to(own.dtype)
        try:
            yield
        finally:
            module.weight.data = own
    else:
        with patched_forwards({module: lambda x: F.linear(x, weight.to(x.dtype), module.bias)}):
            yield


def _weight(module: nn.Module) -> Tensor:
    if isinstance(module, QuantLinear):
        return module.quantized_weight()
    return module.weight.detach().float()


Bend = Callable[[str, LutSpec, tuple[int, int]], LutSpec]
LEVELS = ((2, 1), (3, 1), (4, 1))
"""Bits of an index, and weights that it names, which are tried where the plan has levels."""
VECTORS = ((8, 4), (6, 2), (8, 2))
"""The same where it has vectors: 2, 3 and 4 bits a weight too."""
TRELLISES = (2, 3, 4)
"""Bits a weight of a trellis, under windows as the plan has them, where it has one."""
TABLE_BITS = (4, 8)
TOLERANCE = 1e-9
"""Relative room for the rounding of a budget."""


@dataclass(frozen=True)
class FormatTrial:
    """One format that a module could have got."""

    bits: float
    """Of a weight's index."""
    vector_size: int
    """Weights that an index names."""
    trellis_bits: int
    """Bits a weight of a trellis; 0 without one."""
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
    modules: dict[str, list[FormatTrial]]


def formats_to_try(
    model: LanguageModel,
    plan: QuantPlan,
    bits_budget: float,
    *,
    levels: LutSpec | None = None,
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
    shapes = {n: weight_shape(model.model.get_submodule(n)) for n in [*formats, *linears]}

    def bent(name: str, specs: Sequence[LutSpec]) -> list[LutSpec]:
        if bend is None:
            return list(specs)
        return list(dict.fromkeys(bend(name, spec, shapes[name]) for spec in specs))

    def like(spec: LutSpec, name: str) -> list[LutSpec]:
        return bent(name, _formats_like(spec, name, shapes[name], wider_groups))

    formats = {name: bent(name, specs) for name, specs in formats.items()}
    for name, spec in linears.items():
        try:
            formats[name] = like(spec, name)
            if levels is not None:
                levels.check_shape(name, *shapes[name])
                formats[name] += bent(name, [levels])
        except (ConfigError, ExportError):
            if levels is None:
                raise
            formats[name] = like(levels, name)
    with torch.device("meta"):
        bits = {
            name: [
                stored_bits(FrozenLutLinear(empty_weight(spec, *shapes[name]), None, spec))
                for spec in specs
            ]
            for name, specs in formats.items()
        }
    _check_reach(bits_budget, list(bits.values()), sum(map(math.prod, shapes.values())))
    return kept, formats, bits


def plan_within_budget(
    model: LanguageModel,
    plan: QuantPlan,
    bits_budget: float,
    calibration: Sequence[TokenBatch],
    *,
    levels: LutSpec | None = None,
    with_tables: bool = False,
    wider_groups: bool = False,
    bend: Bend | None = None,
) -> tuple[QuantPlan, BudgetReport]:
    """The plan whose KLs, each measured alone, add up to the least within `bits_budget`.

    Every linear that `plan` quantizes gets 2, 3 or 4 bits a weight of a learned codebook, of
    levels, of vectors or of a trellis as the plan has it, under the plan's form of scale; what does
    not fit its shape is not tried. `with_tables` the embedding and an untied head get 4 or 8.
    Together they take at most `bits_budget` bits per weight. Tables that the plan itself names stay
    as it says.

    Args:
        model: whose weights are quantized and whose output is kept; as before afterwards.
        plan: says which linears, and in which groups.
        calibration: what to judge on and to fit to, see `measure_sensitivities`.
        levels: a format that is tried beside those of `plan`. A linear whose shape or target cannot
            have those gets 2, 3 or 4 bits of levels under this one's form of scale.
        wider_groups: linears may also have groups of the next size that divides their rows.
        bend: from a module's name, a format and `(O, I)` to the format that is tried instead.

    Raises:
        ConfigError: the formats cannot meet the budget, need less, or do not fit a layer.
    """
    began = time.perf_counter()
    kept, formats, bits = formats_to_try(
        model,
        plan,
        bits_budget,
        with_tables=with_tables,
        levels=levels,
        wider_groups=wider_groups,
        bend=bend,
    )
    sizes = {name: math.prod(weight_shape(model.model.get_submodule(name))) for name in formats}
    with progress("measuring sensitivities", sum(map(len, bits.values())), "trials") as ticker:
        nats = measure_sensitivities(model, calibration, formats, ticker)
    options = {
        name: [Option(nats[name][spec], size) for spec, size in zip(specs, bits[name], strict=True)]
        for name, specs in formats.items()
    }
    limit = int(bits_budget * sum(sizes.values()) * (1 + TOLERANCE))
    places = dict(zip(formats, choose_options(list(options.values()), limit), strict=True))
    chosen = {name: formats[name][place] for name, place in places.items()}
    rules = plan.rules_for({**kept, **chosen}, table_names(model.model))
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
) -> list[FormatTrial]:
    return [
        FormatTrial(
            bits=spec.index_bits,
            vector_size=spec.vector_size,
            trellis_bits=spec.trellis_bits,
            group_size=spec.group_size,
            bits_per_weight=option.bits / num_weights,
            kl_nats=option.cost,
            is_chosen=place == taken,
        )
        for place, (spec, option) in enumerate(zip(formats, options, strict=True))
    ]


def _formats_like(
    spec: LutSpec, name: str, shape: tuple[int, int], wider_groups: bool
) -> list[LutSpec]:
    """Those of 2, 3 and 4 bits a weight that the weight called `name` can have.

    Raises:
        ConfigError: there is none; what is wrong with the first.
    """
    size, I = spec.group_size, shape[1]
    # a size that does not divide the rows gives way to the next that does, in finer steps
    steps = [step for step in (size, size // 2, size // 4) if step and wider_groups]
    found = ([s for s in range(size, I + 1, step) if I % s == 0] for step in steps)
    groups = next(filter(None, found), [size])[:2]
    if spec.is_trellis:
        kinds = [{"trellis_bits": k} for k in TRELLISES]
    else:
        kinds = [
            {"bits": bits, "vector_size": d, "codebook": "lut"}
            for bits, d in (VECTORS if spec.is_vector else LEVELS)
        ]
    fitting, errors = [], []
    for kind, group_size in product(kinds, groups):
        try:
            form = LutSpec.parse(spec.model_dump() | kind | {"group_size": group_size}, name)
            form.check_shape(name, *shape)
            fitting.append(form)
        except ConfigError as error:
            errors.append(error)
    if not fitting:
        raise errors[0]
    return fitting


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
