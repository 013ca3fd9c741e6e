"""Quantizes the linears of a model in place: each fitted alone, no training.

Shapes: O out_features, I in_features.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from torch import Tensor, nn

from qat.backend import Backend
from qat.errors import ConfigError
from qat.logs import Ticker, progress
from qat.models.calibrate import TokenBatch, quantize_in_order
from qat.models.count import bits_per_weight, model_bits_per_weight
from qat.models.language_model import LanguageModel
from qat.models.swap import linear_names, replace_module
from qat.nn.frozen_lut_linear import FrozenLutLinear
from qat.nn.quant_linear import QuantLinear
from qat.quant.error_feedback import damped, fit_to_inputs, output_error
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec, QuantPlan
from qat.quant.weight import dequantize

TINY = 1e-30


@dataclass(frozen=True)
class ModuleReport:
    """How well one linear survived."""

    name: str
    bits: int
    codebook: str
    scale: str
    group_size: int
    rank: int
    relative_error: float
    """`|W - W_q| / |W|`, Frobenius."""
    weighted_error: float | None
    """The same of the layer's output on the calibration inputs; None without any."""
    bits_per_weight: float
    """Indices, scales and codebook over the number of weights."""
    seconds: float


@dataclass(frozen=True)
class QuantizeReport:
    """What a conversion did."""

    plan: str
    seconds: float
    bits_per_weight: float
    """Over all quantized linears."""
    kept: int
    """Linears that had their format already."""
    modules: list[ModuleReport]


def quantize_model(
    student: LanguageModel,
    plan: QuantPlan,
    *,
    base: LanguageModel | None = None,
    calibration: Sequence[TokenBatch] = (),
    workers: int = 0,
) -> QuantizeReport:
    """Quantize the linears of `student` in place by `plan`.

    A linear that has the wished format already is kept as it is. The others are fitted to the
    weights of `base` if given, else to their own. With `calibration` the blocks are quantized in
    order, against the inputs that they will see.

    Raises:
        ConfigError: the plan or the base does not fit the model.
    """
    began = time.perf_counter()
    names = linear_names(student.model)
    specs = plan.assign(names)
    for name, spec in specs.items():
        module = student.model.get_submodule(name)
        spec.check_shape(name, module.out_features, module.in_features)
    if base is not None:
        _check_base(student.model, base.model, list(specs))
    todo = {n: s for n, s in specs.items() if not _has_format(student.model.get_submodule(n), s)}
    with progress(f"quantizing to {plan.name}", len(todo), "linears") as ticker:
        job = _Conversion(student.model, todo, base and base.model, workers=workers, ticker=ticker)
        if calibration:
            quantize_in_order(student, calibration, list(todo), job.quantize)
        else:
            job.quantize(list(todo), None)
    reports = {report.name: report for report in job.reports}
    return QuantizeReport(
        plan=plan.name,
        seconds=time.perf_counter() - began,
        bits_per_weight=model_bits_per_weight(student.model),
        kept=len(specs) - len(todo),
        modules=[reports[name] for name in todo],
    )


def _check_base(model: nn.Module, base: nn.Module, names: list[str]) -> None:
    found = {
        n: _shape(m) for n, m in base.named_modules() if isinstance(m, nn.Linear | QuantLinear)
    }
    for name in names:
        wished = _shape(model.get_submodule(name))
        if found.get(name) != wished:
            raise ConfigError(
                f"base: its {name} is of shape {found.get(name)}, the model's of {wished}; give "
                "the float model that this one was converted from"
            )


def _shape(linear: nn.Linear | QuantLinear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


class _Conversion:
    """Fits linears in parallel and puts the result in their place."""

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
        self.workers = workers or Backend(next(model.parameters()).device).workers()
        self.ticker = ticker
        self.reports: list[ModuleReport] = []

    def quantize(self, names: list[str], hessian: Tensor | None) -> None:
        """Replace the linears called `names`; they share the input behind `hessian`."""
        with ThreadPoolExecutor(self.workers) as pool:
            for name, linear, report in pool.map(lambda n: self._fit(n, hessian), names):
                replace_module(self.model, name, linear)
                self.reports.append(report)
                self.ticker.advance()
                self.ticker.note(f"{name} {report.relative_error:.3f}")

    def _fit(self, name: str, hessian: Tensor | None) -> tuple[str, FrozenLutLinear, ModuleReport]:
        began = time.perf_counter()
        spec, weight = self.specs[name], self._weight(name)
        if hessian is None:
            fitted = fit_weight(weight, spec)
        else:
            fitted = fit_to_inputs(weight, spec, hessian)
        bias = self.model.get_submodule(name).bias
        linear = FrozenLutLinear(fitted, None if bias is None else bias.detach(), spec)
        report = _report(name, linear, weight, hessian)
        return name, linear, replace(report, seconds=time.perf_counter() - began)

    def _weight(self, name: str) -> Tensor:
        """The float weight to imitate, on the device of the one it replaces."""
        own = self.model.get_submodule(name)
        module = own if self.base is None else self.base.get_submodule(name)
        if isinstance(module, QuantLinear):
            return module.quantized_weight()
        device = own.codebook.device if isinstance(own, QuantLinear) else own.weight.device
        return module.weight.detach().float().to(device)


def _report(
    name: str, linear: FrozenLutLinear, weight: Tensor, hessian: Tensor | None
) -> ModuleReport:
    quantized, spec, weighted = linear.quantized(), linear.spec, None
    if hessian is not None:
        H = damped(hessian)
        whole = ((weight @ H) * weight).sum().item()
        weighted = (output_error(weight, quantized, H) / max(whole, TINY)) ** 0.5
    error = weight - dequantize(quantized)
    return ModuleReport(
        name=name,
        bits=spec.bits,
        codebook=spec.codebook,
        scale=spec.scale,
        group_size=spec.group_size,
        rank=spec.rank,
        relative_error=(error.norm() / weight.norm().clamp_min(TINY)).item(),
        weighted_error=weighted,
        bits_per_weight=bits_per_weight(linear),
        seconds=0.0,
    )


def _has_format(module: nn.Module, spec: LutSpec) -> bool:
    return isinstance(module, QuantLinear) and module.spec == spec
