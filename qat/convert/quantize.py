"""Quantizes the linears and tables of a model in place: each fitted alone, no training.

Shapes: O out_features, I in_features.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.backend.device import on
from qat.convert.bits_budget import BudgetReport
from qat.convert.calibrate import StageInputs, TokenBatch, Walk, quantize_in_order
from qat.errors import ConfigError
from qat.kernels.column_sweep import COLUMN_OPS
from qat.logs import Ticker, progress
from qat.models.cost import (
    bits_per_weight,
    float_table_bytes,
    model_bits_per_weight,
    tensor_bytes,
    whole_model_bits,
)
from qat.models.language_model import LanguageModel
from qat.models.regions import matmul_precision
from qat.nn.lut_embedding import FrozenLutTable
from qat.nn.quant_linear import FrozenLutLinear, QuantLinear
from qat.nn.swap import decoder_layers, linear_names, put_quantized, table_names, weight_shape
from qat.quant.error_feedback import aim_all, fit_all_to_inputs
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec, QuantPlan, role_of
from qat.quant.weight import QuantizedWeight, dequantize, round_levels

logger = logging.getLogger(__name__)

TINY = 1e-30


@dataclass(frozen=True)
class ModuleReport:
    """How well one linear or table survived."""

    name: str
    bits: int
    codebook: str
    scale: str
    group_size: int
    rank: int
    scale_bits: int
    relative_error: float
    """`|W - W_q| / |W|`, Frobenius."""
    weighted_error: float | None
    """The same of the layer's output on the calibration inputs; None without any. W is then the
    weight that was aimed at (`qat.quant.error_feedback`)."""
    bits_per_weight: float
    """Indices, scales and codebook over the number of weights."""
    seconds: float
    """Its share, by size, of fitting all linears that share its input."""


@dataclass(frozen=True)
class QuantizeReport:
    """What a conversion did."""

    plan: str
    seconds: float
    bits_per_weight: float
    """Over all quantized linears; NaN without any."""
    whole_bits_per_weight: float
    """Over the whole model: tables, norms and everything else included."""
    megabytes: float
    """Of all tensors of the checkpoint, in 10**6 bytes."""
    kept: int
    """Linears and tables that had their format already."""
    num_tables: int
    """How many of `modules` are tables."""
    modules: list[ModuleReport]
    float_tables_frac: float = 0.0
    """Share of `megabytes` that an embedding and a head in floating point take."""
    budget: BudgetReport | None = None
    """How a budget was spent; None without one."""


def quantize_model(
    student: LanguageModel,
    plan: QuantPlan,
    *,
    base: LanguageModel | None = None,
    calibration: Sequence[TokenBatch] = (),
    workers: int = 0,
) -> QuantizeReport:
    """Quantize the linears and tables of `student` in place by `plan`.

    What has the wished format already is kept as it is. The others are fitted to the weights of
    `base` if given, else to their own. Tables come first. With `calibration` the blocks are then
    quantized in order, against the inputs that they will see, each linear aimed at what it gives
    in `base`, else in `student` as it was.

    Raises:
        ConfigError: the plan or the base does not fit the model.
    """
    began = time.perf_counter()
    tables = table_names(student.model)
    check_experts(plan, student.model)
    specs = plan.assign(linear_names(student.model), tables)
    _say_others(plan, [name for name in specs if name not in tables])
    for name, spec in specs.items():
        spec.check_shape(name, *weight_shape(student.model.get_submodule(name)))
    if base is not None:
        _check_base(student.model, base.model, list(specs))
    todo = {n: s for n, s in specs.items() if not _has_format(student.model.get_submodule(n), s)}
    if base is None:
        _say_requantized(student.model, todo)
    description = f"quantizing to {plan.name}"
    with progress(description, len(todo), "linears") as ticker, matmul_precision("medium"):
        job = _Conversion(student.model, todo, base and base.model, workers=workers, ticker=ticker)
        linears = [name for name in todo if name not in tables]
        # before the tables change: the teacher reads its own
        teacher = Walk(base or student, calibration) if calibration and linears else None
        job.quantize_alone([name for name in todo if name in tables])
        if teacher:
            quantize_in_order(student, calibration, linears, job.quantize_stage, teacher=teacher)
        else:
            job.quantize_alone(linears)
    reports = job.reports()
    return QuantizeReport(
        plan=plan.name,
        seconds=time.perf_counter() - began,
        bits_per_weight=model_bits_per_weight(student.model),
        whole_bits_per_weight=whole_model_bits(student.model),
        megabytes=tensor_bytes(student.model) / 1e6,
        float_tables_frac=float_table_bytes(student.model) / tensor_bytes(student.model),
        kept=len(specs) - len(todo),
        num_tables=len(todo) - len(linears),
        modules=[reports[name] for name in todo],
    )


def check_experts(plan: QuantPlan, model: PreTrainedModel) -> None:
    """Refuse a plan that means weights which are no linears: experts fused into one tensor.

    Raises:
        ConfigError: see above.
    """
    linears = (nn.Linear, QuantLinear, nn.Conv1d, nn.Conv2d)
    blocks = {id(module) for module in decoder_layers(model).modules()}
    for path, module in model.named_modules():
        if id(module) not in blocks or isinstance(module, linears):
            continue
        for key, weight in module.named_parameters(path, recurse=False):
            is_fused = weight.dim() >= (2 if path.endswith("experts") else 3)
            if is_fused and plan.spec_for(key) is not None:
                raise ConfigError(
                    f"{key} holds experts in one tensor of shape {tuple(weight.shape)}, expected "
                    f"linears: plan {plan.name} cannot quantize them yet; choose a model without "
                    'experts, or a plan file with role = "attention" alone'
                )


def _say_others(plan: QuantPlan, linears: list[str]) -> None:
    """Name the linears that the plan gives a format though their role is unknown."""
    if not any(rule.role == "other" for rule in plan.rules):
        return
    others = [name for name in linears if role_of(name) == "other"]
    if others:
        logger.warning(
            "%d linears (such as %s) are no known part of an MLP or an attention: plan %s gives "
            "them %d bits; a plan of your own may say otherwise (docs/convert.md)",
            len(others),
            others[0],
            plan.name,
            plan.spec_for(others[0]).bits,
        )


def _say_requantized(model: nn.Module, todo: dict[str, LutSpec]) -> None:
    """Name what is fitted to rounded values, since the float ones are not here."""
    modules = {name: model.get_submodule(name) for name in todo}
    rounded = {
        n: m.spec.bits for n, m in modules.items() if isinstance(m, QuantLinear | FrozenLutTable)
    }
    if rounded:
        name = next(iter(rounded))
        logger.warning(
            "%d linears and tables are quantized already (%s in %d bits, now %d): without the "
            "float weights their error stays; name the float model with --base",
            len(rounded),
            name,
            rounded[name],
            todo[name].bits,
        )


def _check_base(model: nn.Module, base: nn.Module, names: list[str]) -> None:
    kinds = nn.Linear | QuantLinear | nn.Embedding | FrozenLutTable
    found = {n: weight_shape(m) for n, m in base.named_modules() if isinstance(m, kinds)}
    for name in names:
        wished = weight_shape(model.get_submodule(name))
        if found.get(name) != wished:
            raise ConfigError(
                f"base: its {name} is of shape {found.get(name)}, the model's of {wished}; give "
                "the float model that this one was converted from"
            )


@dataclass
class _Fitted:
    """One linear or table in its place, and what its report needs."""

    module: FrozenLutLinear | FrozenLutTable
    error: Tensor
    """`|W - W_q| / |W|`, still on the device."""
    output_error: float | None
    seconds: float


class _Conversion:
    """Fits linears and tables and puts the results in their place."""

    def __init__(
        self,
        model: nn.Module,
        specs: dict[str, LutSpec],
        base: nn.Module | None,
        *,
        workers: int,
        ticker: Ticker,
    ) -> None:
        self.model = model
        self.specs = specs
        self.base = base
        self.workers = workers or on(next(model.parameters()).device).workers()
        self.ticker = ticker
        self.fitted: dict[str, _Fitted] = {}

    def quantize_alone(self, names: list[str]) -> None:
        """Replace the modules called `names`, each fitted to its weight, some at a time."""

        def fit(name: str) -> tuple[Tensor, QuantizedWeight, float]:
            began, weight = time.perf_counter(), self._weight(name)
            return weight, fit_weight(weight, self.specs[name]), time.perf_counter() - began

        with ThreadPoolExecutor(self.workers) as pool:
            for name, (weight, quantized, seconds) in zip(names, pool.map(fit, names), strict=True):
                self._put(name, weight, quantized, output_error=None, seconds=seconds)

    def quantize_stage(self, names: list[str], inputs: StageInputs) -> None:
        """Replace the linears called `names`, aimed at the teacher's and fitted to `inputs`."""
        for spec in dict.fromkeys(self.specs[name] for name in names):
            began = time.perf_counter()
            own = [name for name in names if self.specs[name] == spec]
            weights = [self._weight(name) for name in own]
            aims = weights if inputs.input_gap is None else aim_all(weights, *inputs)
            fits = fit_all_to_inputs(aims, spec, inputs.second_moment, COLUMN_OPS)
            per_weight = (time.perf_counter() - began) / sum(weight.numel() for weight in weights)
            for name, weight, fit in zip(own, weights, fits, strict=True):
                seconds = per_weight * weight.numel()
                self._put(
                    name, weight, fit.quantized, output_error=fit.output_error, seconds=seconds
                )

    def reports(self) -> dict[str, ModuleReport]:
        """Report of each module that was replaced, by name."""
        if not self.fitted:
            return {}
        names, errors = zip(*((n, fitted.error) for n, fitted in self.fitted.items()), strict=True)
        pairs = zip(names, torch.stack(errors).tolist(), strict=True)
        return {name: _report(name, self.fitted[name], error) for name, error in pairs}

    def _put(
        self,
        name: str,
        weight: Tensor,
        quantized: QuantizedWeight,
        *,
        output_error: float | None,
        seconds: float,
    ) -> None:
        levels = round_levels(quantized.codebook, self.specs[name].level_bits)
        quantized = quantized._replace(codebook=levels)
        put_quantized(self.model, name, quantized, self.specs[name])
        error = (weight - dequantize(quantized)).norm() / weight.norm().clamp_min(TINY)
        self.fitted[name] = _Fitted(self.model.get_submodule(name), error, output_error, seconds)
        self.ticker.advance()
        self.ticker.note(name)

    def _weight(self, name: str) -> Tensor:
        """The float weight to imitate, on the device of the one it replaces."""
        own = self.model.get_submodule(name)
        module = own if self.base is None else self.base.get_submodule(name)
        if isinstance(module, QuantLinear | FrozenLutTable):
            return module.quantized_weight()
        is_quantized = isinstance(own, QuantLinear | FrozenLutTable)
        device = own.codebook.device if is_quantized else own.weight.device
        return module.weight.detach().float().to(device)


def _report(name: str, fitted: _Fitted, error: float) -> ModuleReport:
    spec = fitted.module.spec
    return ModuleReport(
        name=name,
        bits=spec.bits,
        codebook=spec.codebook,
        scale=spec.scale,
        group_size=spec.group_size,
        rank=spec.rank,
        scale_bits=spec.scale_bits,
        relative_error=error,
        weighted_error=fitted.output_error,
        bits_per_weight=bits_per_weight(fitted.module),
        seconds=fitted.seconds,
    )


def _has_format(module: nn.Module, spec: LutSpec) -> bool:
    return isinstance(module, QuantLinear | FrozenLutTable) and module.spec == spec
