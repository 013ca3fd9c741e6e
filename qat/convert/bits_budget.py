"""Choice of bits per module from measured sensitivity: the least KL within a budget of bits.

The sensitivity of a weight is how much the model's output changes when only that weight is
quantized. Each weight is fitted to each format as a conversion would fit it, put in place, judged,
and restored; the decoder layers before it are not computed again.

Shapes: O out_features, I in_features, T tokens, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from qat.convert.calibrate import StackInputs, StageInputs, TokenBatch, stages_in_order
from qat.convert.tables import FLOAT_BITS, fit_table, table_inputs
from qat.errors import ConfigError, ExportError
from qat.kernels.column_sweep import COLUMN_OPS, nearest_vectors
from qat.logs import Ticker, progress
from qat.models.cost import format_bits, num_weights, parameter_count, stored_bits
from qat.models.language_model import LanguageModel
from qat.models.precision import matmul_precision
from qat.models.stored_state import quantized_modules
from qat.models.streamed import patched_forwards
from qat.nn.quant_linear import QuantLinear
from qat.nn.sites import StackedLinear
from qat.nn.swap import decoder_layers, linear_names, table_names, weight_shape
from qat.quant.budget import Option, choose_options
from qat.quant.error_feedback import fit_all_to_inputs, fit_stack_to_inputs
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec, QuantPlan
from qat.quant.weight import QuantizedWeight, dequantize

JUDGED_TOKENS = 1024
"""Tokens that changed models are judged on, or half of a shorter calibration."""
ROWS = 256
"""Tokens whose logits are compared at a time."""

LARGE_CODEBOOK = {"bits": 12, "vector_size": 4}
"""A form that is tried for tables too: its codewords hold the rows of usual words well, and take
none of a table's bits (KL of SmolLM2's in 3 bits: 0.066 nats; with 64 of two 0.134)."""

Sensitivities = dict[str, dict[LutSpec, float]]
"""KL(model || model with that weight in that format) by name and format, in nats per token."""


@torch.no_grad()
def measure_sensitivities(
    model: LanguageModel,
    calibration: Sequence[TokenBatch],
    formats: Mapping[str, Sequence[LutSpec]],
    ticker: Ticker,
) -> Sensitivities:
    """Measure the exact KL of every weight named in `formats`, in each of its formats alone.

    The first sequences of `calibration`, `JUDGED_TOKENS` or half of them, are used for judging;
    linears and heads are fitted to their inputs over the others. An untied embedding is fitted to
    its values. The model is restored at the end.

    Args:
        formats: names of linears in the decoder layers, of the embedding or of an untied head.
        ticker: advances by one for each KL.
    """
    judged, rest = split_calibration(calibration)
    found: Sensitivities = {name: {} for name in formats}
    modules = {name: model.model.get_submodule(name) for name in formats}
    tables = table_names(model.model)
    with matmul_precision("medium"):
        judge, read = _Judge(model, judged), table_inputs(model, formats, rest)

        def note(name: str, spec: LutSpec, quantized: QuantizedWeight) -> None:
            found[name][spec] = judge.divergence(modules[name], dequantize(quantized))
            ticker.advance()
            ticker.note(name)

        def measure_stage(names: list[str], inputs: StageInputs | StackInputs | None) -> None:
            # tables, experts and unused linears are fitted one by one
            if not isinstance(inputs, StageInputs):
                for name in names:
                    fit = partial(_fitted, inputs=inputs)
                    if name in tables:
                        fit = partial(fit_table, inputs=read.get(name))
                    for spec in formats[name]:
                        note(name, spec, fit(_weight(modules[name]), spec))
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
    if inputs is None:
        return fit_weight(weight, spec, nearest=nearest_vectors)
    return fit_stack_to_inputs(weight, spec, *inputs, ops=COLUMN_OPS).quantized


def split_calibration(batches: Sequence[TokenBatch]) -> tuple[TokenBatch, list[TokenBatch]]:
    """Return the sequences to judge on and those to fit to; a single sequence is used for both."""
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
    """Measures the KL of a model with one changed weight.

    It keeps the model's distributions on some tokens and the outputs of its decoder layers for
    them.
    """

    def __init__(self, model: LanguageModel, batch: TokenBatch) -> None:
        self._model = model
        self._batch = batch
        self._layers = list(decoder_layers(model.model))
        self._gave: list[object] = []
        with patched_forwards({layer: self._recording(layer.forward) for layer in self._layers}):
            log_p_TV = self._logits().log_softmax(-1)
        self._p_TV = log_p_TV.exp()
        self._negative_entropy = _row_dots(self._p_TV, log_p_TV)

    def layer_of(self, module: nn.Module) -> int | None:
        """Return the index of the decoder layer that contains `module`; None if it is outside."""
        for number, layer in enumerate(self._layers):
            if any(inner is module for inner in layer.modules()):
                return number
        return None

    def divergence(self, module: nn.Module, weight: Tensor) -> float:
        """Return KL(model || model with `weight` in `module`), in nats per token."""
        # layers before the changed one give the same outputs, so they are replayed
        number = self.layer_of(module)
        if module is self._model.model.get_input_embeddings():
            number = 0
        skipped = self._layers[:number]  # all layers for a head
        given = self._gave[len(skipped) - 1] if skipped else None
        stand_ins = {layer: lambda *_args, **_named: given for layer in skipped}
        with _holding(module, weight), patched_forwards(stand_ins):
            logits_TV = self._logits()
        # sum p (log p - log q), where log q is the logits less their log-sum-exp
        crossed = logits_TV.logsumexp(-1) - _row_dots(self._p_TV, logits_TV)
        return (self._negative_entropy + crossed).double().mean().item()

    def _recording(self, forward: Callable) -> Callable:
        def call(*args: object, **named: object) -> object:
            self._gave.append(forward(*args, **named))
            return self._gave[-1]

        return call

    def _logits(self) -> Tensor:
        with matmul_precision("highest"):
            ids = (ids.to(self._model.device) for ids in self._batch)
            return self._model.logits(self._model.hidden(*ids).flatten(0, 1)).float()


def _row_dots(left: Tensor, right: Tensor) -> Tensor:
    """Return `sum_v left * right` for each row, `ROWS` rows at a time."""
    pairs = zip(left.split(ROWS), right.split(ROWS), strict=True)
    return torch.cat([(one * other).sum(-1) for one, other in pairs])


@contextmanager
def _holding(module: nn.Module, weight: Tensor) -> Iterator[None]:
    """Let `module` compute with `weight` inside the block.

    `module` is a linear, a stack of experts, or an embedding with the head that may be tied to it.
    """
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


TOLERANCE = 1e-9
"""Relative tolerance for rounding errors of a budget."""


@dataclass(frozen=True)
class FormatTrial:
    """One format that was tried for a module."""

    bits: float
    """Bits per weight of the indices alone."""
    vector_size: int
    """Weights per index."""
    group_size: int
    bits_per_weight: float
    """Bits per weight with scales and codebook."""
    kl_nats: float
    """KL(model || model with this module alone in this format) per token."""
    is_chosen: bool


@dataclass(frozen=True)
class BudgetReport:
    """The result of spending a budget."""

    bits_budget: float
    """Bits per weight that the student may use."""
    bits_per_weight: float
    """Bits per weight that it uses."""
    is_of_file: bool
    """True if both are over all weights of the file, false if over the modules below alone."""
    predicted_kl_nats: float
    """The sum of the chosen formats' KLs, each measured alone."""
    seconds: float
    """Seconds for measuring and choosing."""
    modules: dict[str, list[FormatTrial]]


class Room(NamedTuple):
    """The formats that a budget may choose in addition to those of its plan."""

    tables: Mapping[str, Sequence[LutSpec]] | None = None
    """The formats to try for the embedding and an untied head; the budget is then over all weights
    of the file. None: over the linears of the plan alone."""
    levels: LutSpec | None = None
    """A format that is tried besides those of the plan. A linear whose shape or target cannot have
    those gets 2, 3 or 4 bits of levels with this one's form of scale."""
    wider_groups: bool = False
    """True if linears may also have groups of the next size that divides their rows."""
    bend: Callable[[str, LutSpec, tuple[int, int]], LutSpec] | None = None
    """Maps a module's name, a format and `(O, I)` to the format that is tried instead."""
    size: Callable[[LutSpec, tuple[int, int]], int] = format_bits
    """Returns the bits of an `(O, I)` weight in a format."""


class Trials(NamedTuple):
    """The formats that a budget chooses among."""

    kept: dict[str, LutSpec]
    """Tables that keep the plan's format."""
    formats: dict[str, list[LutSpec]]
    """The formats to try, by name of the module."""
    bits: dict[str, list[int]]
    """The stored bits of the module in each of them."""
    num_weights: int
    """Weights that the budget is over."""
    other_bits: int
    """Bits of those weights that are in none of these modules."""


def formats_to_try(
    model: PreTrainedModel,
    plan: QuantPlan,
    bits_budget: float,
    room: Room = Room(),  # noqa: B008 - immutable
) -> Trials:
    """Return what a budget may choose among.

    Reads names and shapes only, so `model` may be on the meta device.

    Raises:
        ConfigError: the formats cannot meet the budget, need less, or do not fit a layer.
    """
    names, tables = table_names(model), room.tables or {}
    planned = plan.assign(linear_names(model), names)
    linears = {n: spec for n, spec in planned.items() if n not in names}
    kept = {n: spec for n, spec in planned.items() if n in names and n not in tables}
    shapes = {n: weight_shape(model.get_submodule(n)) for n in [*tables, *linears]}

    def bent(name: str, specs: Sequence[LutSpec]) -> list[LutSpec]:
        if room.bend is None:
            return list(specs)
        return list(dict.fromkeys(room.bend(name, spec, shapes[name]) for spec in specs))

    def like(spec: LutSpec, name: str) -> list[LutSpec]:
        return bent(name, _formats_like(spec, name, shapes[name], room.wider_groups))

    formats = {name: bent(name, specs) for name, specs in tables.items()}
    vectors = next((spec for spec in linears.values() if spec.vector_size > 1), None)
    for name in tables if vectors else ():
        with suppress(ConfigError, ExportError):  # its rows, or a target, hold levels only
            large = vectors.model_copy(update=LARGE_CODEBOOK)
            found = [*formats[name], *like(vectors, name), *like(large, name)]
            formats[name] = list(dict.fromkeys(found))
    for name, spec in linears.items():
        try:
            formats[name] = like(spec, name)
            if room.levels is not None:
                room.levels.check_shape(name, *shapes[name])
                formats[name] += bent(name, [room.levels])
        except (ConfigError, ExportError):
            if room.levels is None:
                raise
            formats[name] = like(room.levels, name)
    bits = {n: [room.size(spec, shapes[n]) for spec in specs] for n, specs in formats.items()}
    count = sum(map(math.prod, shapes.values()))
    rest = (0, 0) if room.tables is None else _rest(model, formats)
    trials = Trials(kept, formats, bits, count + rest[0], rest[1])
    _check_reach(bits_budget, trials, is_of_file=room.tables is not None)
    return trials


def _rest(model: PreTrainedModel, chosen: Mapping[str, object]) -> tuple[int, int]:
    """Return the number and the stored bits of all weights outside of the modules `chosen`."""
    quantized = [m for name, m in quantized_modules(model).items() if name not in chosen]
    modules = [model.get_submodule(name) for name in chosen]
    others = parameter_count(model) - sum(math.prod(weight_shape(m)) for m in modules)
    floats = others - sum(map(num_weights, quantized))
    return others, FLOAT_BITS * floats + sum(map(stored_bits, quantized))


def plan_within_budget(
    model: LanguageModel,
    plan: QuantPlan,
    bits_budget: float,
    calibration: Sequence[TokenBatch],
    *,
    room: Room = Room(),  # noqa: B008 - immutable
) -> tuple[QuantPlan, BudgetReport]:
    """Return the plan of the least sum of KLs, each measured alone, within `bits_budget`.

    Every linear that `plan` quantizes gets a learned codebook of 2, 3 or 4 bits per weight, or of
    the plan's bits: levels or vectors, and the form of scale, as in the plan. Formats that do not
    fit its shape are not tried. Without tables in `room`, those that the plan names keep the plan's
    format.

    Args:
        model: the model whose weights are quantized and whose output is the target; restored at the
            end.
        plan: the linears to quantize and their groups.
        calibration: text to judge on and to fit to, see `measure_sensitivities`.
        room: what the budget may be spent on.

    Raises:
        ConfigError: the formats cannot meet the budget, need less, or do not fit a layer.
    """
    began = time.perf_counter()
    trials = formats_to_try(model.model, plan, bits_budget, room)
    formats, bits = trials.formats, trials.bits
    sizes = {name: math.prod(weight_shape(model.model.get_submodule(name))) for name in formats}
    with progress("measuring sensitivities", sum(map(len, bits.values())), "trials") as ticker:
        nats = measure_sensitivities(model, calibration, formats, ticker)
    options = {
        name: [Option(nats[name][spec], size) for spec, size in zip(specs, bits[name], strict=True)]
        for name, specs in formats.items()
    }
    limit = int(bits_budget * trials.num_weights * (1 + TOLERANCE)) - trials.other_bits
    places = dict(zip(formats, choose_options(list(options.values()), limit), strict=True))
    chosen = {name: formats[name][place] for name, place in places.items()}
    rules = plan.rules_for({**trials.kept, **chosen}, table_names(model.model))
    taken = [options[name][place] for name, place in places.items()]
    tried = {
        name: [
            FormatTrial(
                bits=spec.index_bits,
                vector_size=spec.vector_size,
                group_size=spec.group_size,
                bits_per_weight=option.bits / size,
                kl_nats=option.cost,
                is_chosen=place == places[name],
            )
            for place, (spec, option) in enumerate(zip(formats[name], options[name], strict=True))
        ]
        for name, size in sizes.items()
    }
    used = sum(option.bits for option in taken) + trials.other_bits
    report = BudgetReport(
        bits_budget=bits_budget,
        bits_per_weight=used / trials.num_weights,
        is_of_file=room.tables is not None,
        predicted_kl_nats=sum(option.cost for option in taken),
        seconds=time.perf_counter() - began,
        modules=tried,
    )
    of_what = "" if report.is_of_file else "-of-linears"
    return QuantPlan(name=f"mixed-{bits_budget:g}{of_what}", rules=rules), report


def _formats_like(
    spec: LutSpec, name: str, shape: tuple[int, int], wider_groups: bool
) -> list[LutSpec]:
    """Return the formats of 2, 3 and 4 bits per weight, and of those of `spec`, that fit `name`."""
    size, I = spec.group_size, shape[1]
    # with `wider_groups`: the first two sizes from `size` on that divide the rows, in the coarsest
    # steps that find any
    steps = [step for step in (size, size // 2, size // 4) if step and wider_groups]
    found = ([s for s in range(size, I + 1, step) if I % s == 0] for step in steps)
    groups = next(filter(None, found), [size])[:2]
    forms = dict.fromkeys([*spec.budget_forms, (spec.bits, spec.vector_size)])
    kinds = [{"bits": bits, "vector_size": d, "codebook": "lut"} for bits, d in forms]
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


def _check_reach(bits_budget: float, trials: Trials, *, is_of_file: bool) -> None:
    """Refuse a budget outside the range that the formats can reach."""
    least, most = (
        (sum(map(pick, trials.bits.values())) + trials.other_bits) / trials.num_weights
        for pick in (min, max)
    )
    room = TOLERANCE * bits_budget
    if not least - room <= bits_budget <= most + room:
        what = "all weights of this model" if is_of_file else f"these {len(trials.bits)} linears"
        raise ConfigError(
            f"bits_budget={bits_budget:g}, but {what} can take {least:.4f} to {most:.4f} bits per "
            "weight, scales and codebooks included; give a budget between, or another --group-size"
        )
