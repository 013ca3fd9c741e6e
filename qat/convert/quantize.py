"""Quantization of a model's linears and tables in place, without training.

Shapes: O out_features, I in_features.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.backend.base import GIB, side_by_side
from qat.backend.device import on
from qat.convert.activations import inputs_to_quantize, level_products, put_activations
from qat.convert.bits_budget import BudgetReport
from qat.convert.calibrate import (
    LayerwiseRun,
    StackInputs,
    StageInputs,
    TokenBatch,
    stages_in_order,
)
from qat.convert.savings import Saving
from qat.convert.shipping import FileSizes
from qat.convert.tables import TableInputs, fit_table, table_inputs
from qat.errors import ConfigError
from qat.kernels.column_sweep import COLUMN_OPS, RecordedSweeps, nearest_vectors
from qat.logs import Ticker, progress
from qat.models.attention import kv_spec
from qat.models.cost import (
    Part,
    bits_per_weight,
    bytes_by_name,
    linear_bits,
    parameter_count,
    parts_of,
)
from qat.models.document_attention import cached_heads
from qat.models.language_model import LanguageModel
from qat.models.precision import matmul_precision
from qat.models.stored_state import activation_counts
from qat.models.streamed import SHARE
from qat.nn.lut_embedding import QuantTable
from qat.nn.quant_linear import QuantLinear
from qat.nn.quant_weight import QuantWeight
from qat.nn.sites import MORE_THAN_LINEAR, NARROWEST, Owner
from qat.nn.swap import (
    decoder_layers,
    linear_names,
    put_quantized,
    table_names,
    weight_shape,
)
from qat.quant.error_feedback import (
    DAMPING,
    FEWEST_INPUTS,
    InputFit,
    aim_all,
    fit_all_to_inputs,
    fit_stack_to_inputs,
)
from qat.quant.fit import fit_weight
from qat.quant.spec import ActivationKind, ActivationSpec, LutSpec, QuantPlan, role_of
from qat.quant.weight import QuantizedWeight, dequantize, round_levels

logger = logging.getLogger(__name__)

ROTATION = "rotation_seed"
"""Key of a rotated model's configuration, with the seed."""
TINY = 1e-30  # the relative error of a weight of zeros is 0, not NaN
FIT_BYTES = 14
"""Bytes per element of a weight while it is fitted, with its own float32 (measured: 13)."""


@dataclass(frozen=True)
class ModuleReport:
    """Format and error of one quantized linear or table."""

    name: str
    bits: float
    """Bits per weight of the indices alone."""
    vector_size: int
    """Weights per index."""
    codebook: str
    scale: str
    group_size: int
    rank: int
    scale_bits: int
    relative_error: float
    """`|W - W_q| / |W|`, Frobenius."""
    weighted_error: float | None
    """The relative error of the layer's output on the calibration inputs; None without any. W is
    then the weight after aiming (`qat.quant.error_feedback`)."""
    bits_per_weight: float
    """Bits of indices, scales and codebook over the number of weights."""
    seconds: float
    """Seconds of fitting, shared by size among linears with the same input."""
    activation: str | None = None
    """The kind of its quantized input; None for floating point."""


@dataclass(frozen=True)
class KvReport:
    """Size of the keys and values of one token, in all layers, with scales and zeros."""

    bits: int
    bytes_per_token: int
    bf16_frac: float
    """Size as a fraction of bfloat16 keys and values."""

    @classmethod
    def of(cls, student: LanguageModel) -> Self | None:
        """Return the report of `student`; None if it does not quantize keys and values."""
        spec = kv_spec(student.model.config)
        if spec is None:
            return None
        heads = cached_heads(student.model, student.device)
        total = sum(each.num_bytes(spec) for each in heads)
        return cls(spec.bits, total, total / sum(each.half_bytes() for each in heads))


@dataclass(frozen=True)
class QuantizeReport:
    """The result of a conversion."""

    plan: str
    seconds: float
    bits_per_weight: float
    """Bits per weight over all weights of the checkpoint: linears, tables, norms and all else."""
    linear_bits: float
    """Bits per weight of the quantized linears alone; NaN without any."""
    megabytes: float
    """Size of all tensors of the checkpoint, in 10**6 bytes."""
    kept: int
    """Linears and tables that already had their format."""
    num_tables: int
    """The number of tables among `modules`."""
    modules: list[ModuleReport]
    parts: list[Part] = field(default_factory=list)
    """The parts of `megabytes`."""
    savings: list[Saving] = field(default_factory=list)
    """The flags that would make it smaller, and by how much."""
    budget: BudgetReport | None = None
    """The choices within a budget; None without one."""
    activations: dict[ActivationKind, int] = field(default_factory=dict)
    """Linears and tables that quantize their input, counted by kind."""
    kv: KvReport | None = None
    """Size of keys and values; None if they are not quantized."""
    file: FileSizes | None = None
    """The sizes of a target's file, where it counts them."""

    def of_file(self) -> Self:
        """Return this report with the sizes of that file in place of the checkpoint's."""
        return self if self.file is None else replace(self, **vars(self.file))


def quantize_model(
    student: LanguageModel,
    plan: QuantPlan,
    *,
    base: LanguageModel | None = None,
    calibration: Sequence[TokenBatch] = (),
    workers: int = 0,
) -> QuantizeReport:
    """Quantize the linears and tables of `student` in place by `plan`.

    Modules that already have their format are kept. The others are fitted to the weights of `base`
    if given, else to their own. Tables come first. With `calibration` the blocks are then quantized
    in order, against the inputs that they will see, and each linear is aimed at its output in
    `base`, else in the original `student`.

    Raises:
        ConfigError: the plan or the base does not fit the model.
    """
    began, model = time.perf_counter(), student.model
    tables = table_names(model)
    check_experts(plan, model)
    specs = plan.assign(linear_names(model), tables)
    _warn_of_other_roles(plan, [name for name in specs if name not in tables])
    _check_specs(model, specs, tables)
    activations = inputs_to_quantize(model, plan, specs)
    if base is None:
        level_products(student, activations, calibration)
    else:
        _check_base(model, base.model, list(specs))
    # a quantized module has a `spec`, and a float one has none
    todo = {n: s for n, s in specs.items() if getattr(model.get_submodule(n), "spec", None) != s}
    linears = [name for name in todo if name not in tables]
    if base is None:
        _warn_of_requantizing(model, todo)
    with (
        progress(f"quantizing to {plan.name}", len(todo), "linears") as ticker,
        matmul_precision("medium"),
        torch.no_grad(),
    ):
        read = table_inputs(base or student, {n: [s] for n, s in todo.items()}, calibration)
        job = _Conversion(
            student, todo, base or student, ticker, activations=activations, tables=read
        )
        # walk the teacher before the tables change, because it may share them
        teacher = LayerwiseRun(base or student, calibration) if calibration and linears else None
        alone = [*(name for name in todo if name in tables), *([] if teacher else linears)]

        def heartbeat(text: str) -> None:
            ticker.note(text)
            ticker.on_advance()

        walk = (
            stages_in_order(student, calibration, linears, teacher=teacher, heartbeat=heartbeat)
            if teacher
            else ()
        )
        for names, inputs in chain([(alone, None)], walk):
            if inputs is not None:
                try:
                    job.quantize_stage(names, inputs)
                except ConfigError as error:
                    raise ConfigError(f"{names[0]}: {error}") from error
            else:
                job.quantize_alone(names, workers)
    put_activations(student, activations, calibration)
    reports = job.reports()
    if job.rare:
        logger.warning(
            "%d of %d weights of experts saw fewer than %d calibration tokens and were rounded "
            "without them; --calibration-sequences gives more",
            job.rare,
            job.experts,
            FEWEST_INPUTS,
        )
    if job.dampings:
        most = max(job.dampings, key=job.dampings.__getitem__)
        logger.info(
            "%d of %d linears have inputs so uneven that more than %g of their mean second moment "
            "was added to it, at most %g (%s)",
            len(job.dampings),
            len(linears),
            DAMPING,
            job.dampings[most],
            most,
        )
    stored = bytes_by_name(model)
    return QuantizeReport(
        plan=plan.name,
        seconds=time.perf_counter() - began,
        bits_per_weight=8 * sum(stored.values()) / parameter_count(model),
        linear_bits=linear_bits(model),
        megabytes=sum(stored.values()) / 1e6,
        parts=parts_of(model, stored),
        kept=len(specs) - len(todo),
        num_tables=len(todo) - len(linears),
        modules=[reports[name] for name in todo],
        activations=activation_counts(model),
        kv=KvReport.of(student),
    )


def fits_at_once(sizes: Sequence[int], memory_gib: float | None) -> int:
    """Return how many weights of up to these sizes may be fitted, or held fitted, at a time.

    They use at most `SHARE` of the memory, if its size is known, but at least one weight is
    allowed.
    """
    if memory_gib is None or not sizes:
        return max(1, len(sizes))
    most = int(SHARE * memory_gib * GIB / (FIT_BYTES * max(sizes)))
    return min(max(1, most), len(sizes))


def check_experts(plan: QuantPlan, model: PreTrainedModel) -> None:
    """Refuse a plan that would quantize experts fused into one tensor, which are no linears.

    Fused experts are at least two matrices whose sides are no narrower than the narrowest linear to
    quantize.

    Raises:
        ConfigError: the model has such a tensor and the plan has a format for it.
    """
    linears = (nn.Linear, QuantLinear, nn.Conv1d, nn.Conv2d, Owner)
    blocks = {id(module) for module in decoder_layers(model).modules()}
    for path, module in model.named_modules():
        is_known = isinstance(module, linears) or type(module).__name__ in MORE_THAN_LINEAR
        if id(module) not in blocks or is_known:
            continue
        for key, weight in module.named_parameters(path, recurse=False):
            is_fused = "experts" in path.split(".") or math.prod(weight.shape[:-2]) > 1
            is_wide = weight.dim() > 1 and min(weight.shape[-2:]) >= NARROWEST
            if is_fused and is_wide and plan.spec_for(key) is not None:
                raise ConfigError(
                    f"{key} holds experts in one tensor of shape {tuple(weight.shape)}, expected "
                    f"linears: plan {plan.name} cannot quantize them yet; choose a model without "
                    'experts, or a plan file with role = "attention" alone'
                )


def _check_specs(model: PreTrainedModel, specs: dict[str, LutSpec], tables: list[str]) -> None:
    for name, spec in specs.items():
        spec.check_shape(name, *weight_shape(model.get_submodule(name)))
        owner = model.get_submodule(name.rpartition(".")[0])
        if spec.table_rows and (name in tables or isinstance(owner, Owner)):
            raise ConfigError(
                f"{name}: table_rows={spec.table_rows}, but it is no single linear, expected one "
                "codebook for all rows; leave table_rows out of its rule"
            )


def _warn_of_other_roles(plan: QuantPlan, linears: list[str]) -> None:
    if not any(rule.role == "other" for rule in plan.rules):
        return
    others = [name for name in linears if role_of(name) == "other"]
    if others:
        logger.warning(
            "%d linears (such as %s) are no known part of an MLP or an attention: plan %s gives "
            "them %g bits; a plan of your own may say otherwise (docs/convert.md)",
            len(others),
            others[0],
            plan.name,
            plan.spec_for(others[0]).index_bits,
        )


def _warn_of_requantizing(model: nn.Module, todo: dict[str, LutSpec]) -> None:
    modules = {name: model.get_submodule(name) for name in todo}
    rounded = {n: m.spec.index_bits for n, m in modules.items() if isinstance(m, QuantWeight)}
    if rounded:
        name = next(iter(rounded))
        logger.warning(
            "%d linears and tables are quantized already (%s in %g bits, now %g): without the "
            "float weights their error stays; name the float model with --base",
            len(rounded),
            name,
            rounded[name],
            todo[name].index_bits,
        )


def _check_base(model: nn.Module, base: nn.Module, names: list[str]) -> None:
    kinds = nn.Linear | QuantLinear | nn.Embedding | QuantTable
    found = {n: weight_shape(m) for n, m in base.named_modules() if isinstance(m, kinds)}
    seeds = [getattr(each.config, ROTATION, None) for each in (base, model)]
    if seeds[0] != seeds[1]:
        raise ConfigError(
            f"base: its {ROTATION} is {seeds[0]}, the model's {seeds[1]}, expected the float model "
            "that this one was converted from; 'qat convert --rotate' alone makes a rotated one"
        )
    for name in names:
        wished = weight_shape(model.get_submodule(name))
        if found.get(name) != wished:
            raise ConfigError(
                f"base: its {name} is of shape {found.get(name)}, the model's of {wished}; give "
                "the float model that this one was converted from"
            )


class _Conversion:
    def __init__(
        self,
        student: LanguageModel,
        specs: dict[str, LutSpec],
        base: LanguageModel,
        ticker: Ticker,
        *,
        activations: dict[str, ActivationSpec | None],
        tables: dict[str, TableInputs],
    ) -> None:
        self.student, self.model = student, student.model
        self.specs = specs
        self.tables = table_names(self.model)
        self.table_inputs = tables
        """The statistics of the calibration text for each table, by name."""
        self.activations = activations
        self.base = base.model
        self.ticker = ticker
        self.ops = COLUMN_OPS._replace(sweeps=RecordedSweeps())
        self.experts = self.rare = 0
        """Weights of experts in all, and those with too few inputs to be fitted to them."""
        self.dampings: dict[str, float] = {}
        """Damping of linears whose second moment needed more than `DAMPING`."""
        self._reports: dict[str, ModuleReport] = {}
        self._errors: list[Tensor] = []
        """Relative errors, left on the device and read all at once."""

    def quantize_alone(self, names: list[str], workers: int) -> None:
        """Replace the linears and tables called `names`, each fitted to its own weight."""
        backend = on(self.student.device)
        sizes = [math.prod(weight_shape(self.model.get_submodule(name))) for name in names]
        at_once = fits_at_once(sizes, backend.memory_gib())

        def fit(name: str) -> tuple[Tensor, QuantizedWeight, float]:
            began, weight, spec = time.perf_counter(), self.weight(name), self.specs[name]
            if name in self.tables:
                fitted = fit_table(weight, spec, self.table_inputs.get(name))
            else:
                fitted = fit_weight(weight, spec, nearest=nearest_vectors)
            return weight, fitted, time.perf_counter() - began

        with side_by_side(min(workers or backend.workers(), at_once)) as map_:
            for first in range(0, len(names), at_once):
                some = names[first : first + at_once]
                for name, (weight, quantized, seconds) in zip(some, map_(fit, some), strict=True):
                    with self.student.present(self.model.get_submodule(name)):
                        self.put(name, weight, quantized, output_error=None, seconds=seconds)
                    self.student.settle(self.model.get_submodule(name))

    def quantize_stage(self, names: list[str], inputs: StageInputs | StackInputs) -> None:
        """Replace the linears called `names`, aimed at the teacher's output and fitted to `inputs`.

        The experts of a stack are each fitted to their own inputs, without an aim: routers send the
        tokens of the teacher and of the student to different experts.
        """
        if isinstance(inputs, StackInputs):
            (name,) = names
            began, weight, spec = time.perf_counter(), self.weight(name), self.specs[name]
            fit = fit_stack_to_inputs(weight, spec, *inputs, ops=self.ops)
            seconds = time.perf_counter() - began
            self._note_damping(name, fit)
            self.put(name, weight, fit.quantized, output_error=fit.output_error, seconds=seconds)
            self.rare += int((inputs.counts < FEWEST_INPUTS).sum())
            self.experts += len(inputs.counts)
            return
        for spec in dict.fromkeys(self.specs[name] for name in names):
            began = time.perf_counter()
            own = [name for name in names if self.specs[name] == spec]
            weights = [self.weight(name) for name in own]
            aims = weights if inputs.input_gap is None else aim_all(weights, *inputs)
            fits = fit_all_to_inputs(aims, spec, inputs.second_moment, self.ops)
            per_weight = (time.perf_counter() - began) / sum(weight.numel() for weight in weights)
            for name, weight, fit in zip(own, weights, fits, strict=True):
                seconds = per_weight * weight.numel()
                self._note_damping(name, fit)
                self.put(
                    name, weight, fit.quantized, output_error=fit.output_error, seconds=seconds
                )

    def _note_damping(self, name: str, fit: InputFit) -> None:
        if fit.damping > DAMPING:
            self.dampings[name] = fit.damping

    def put(
        self,
        name: str,
        weight: Tensor,
        quantized: QuantizedWeight,
        *,
        output_error: float | None,
        seconds: float,
    ) -> None:
        """Replace the module called `name`, whose float weight was `weight`."""
        spec = self.specs[name]
        quantized = quantized._replace(codebook=round_levels(quantized.codebook, spec.level_bits))
        put_quantized(self.model, name, quantized, spec)
        error = (weight - dequantize(quantized)).norm() / weight.norm().clamp_min(TINY)
        self._errors.append(error)
        activation = self.activations.get(name)
        self._reports[name] = ModuleReport(
            name=name,
            bits=spec.index_bits,
            vector_size=spec.vector_size,
            codebook=spec.codebook,
            scale=spec.scale,
            group_size=spec.group_size,
            rank=spec.rank,
            scale_bits=spec.scale_bits,
            relative_error=math.nan,
            weighted_error=output_error,
            bits_per_weight=bits_per_weight(self.model.get_submodule(name)),
            seconds=seconds,
            activation=None if activation is None else activation.kind,
        )
        self.ticker.advance()
        self.ticker.note(name)

    def reports(self) -> dict[str, ModuleReport]:
        """Return the report of each replaced module by name; call it after all replacements."""
        self.student.widen()
        errors = torch.stack(self._errors).tolist() if self._errors else []
        found = zip(self._reports.items(), errors, strict=True)
        return {name: replace(report, relative_error=error) for (name, report), error in found}

    def weight(self, name: str) -> Tensor:
        """Return the float weight to imitate, on the device of the weight it replaces."""
        module = self.base.get_submodule(name)
        if isinstance(module, QuantWeight):
            return module.quantized_weight()
        device = self.student.device_of(self.model.get_submodule(name))
        return module.weight.detach().to(device).float()
