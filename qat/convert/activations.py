"""Quantization of the inputs of quantized linears and heads, with calibration of static scales.

Shapes: N numbers of an input, K bins of its histogram.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat.convert.calibrate import TokenBatch
from qat.errors import ConfigError
from qat.models.language_model import LanguageModel
from qat.models.stored_state import quantized_modules
from qat.nn.activation import ActivationQuantizer
from qat.nn.lut_embedding import QuantTable
from qat.nn.sites import experts_of, unseen_input
from qat.nn.swap import body_of, reads_input, table_names
from qat.quant.activation import LEVELS
from qat.quant.spec import ActivationSpec, QuantPlan

LOWEST_EXPONENT, OCTAVES, BINS_AN_OCTAVE = -24, 48, 32
"""The histogram of magnitudes covers 2**-24 to 2**24 in steps of about two percent."""
MOST_OF_MEDIAN = 4.0
"""Largest peak of a channel, as a multiple of the median peak of the nonzero channels."""
TOKENS = 16
"""Tokens whose outputs are compared before and after channels are levelled."""


def inputs_to_quantize(
    model: PreTrainedModel, plan: QuantPlan, names: Collection[str]
) -> dict[str, ActivationSpec | None]:
    """Return how `plan` quantizes the input of each module in `names` that reads an input.

    No weight is read.

    Raises:
        ConfigError: an input cannot be observed (`unseen_input`).
    """
    tables = table_names(model)
    found = {
        name: plan.activation_for(name, is_table=name in tables)
        for name in names
        if reads_input(model, name)
    }
    for name in (name for name, spec in found.items() if spec is not None):
        owner, _, key = name.rpartition(".")
        why = unseen_input(model.get_submodule(owner), key)
        if why is not None:
            raise ConfigError(
                f"the input of {name} cannot be quantized ({why}), expected a linear that is "
                "called; give a plan file whose rule for it has no activation, or leave out "
                "--activations"
            )
    return found


@torch.no_grad()
def level_products(
    student: LanguageModel,
    activations: dict[str, ActivationSpec | None],
    calibration: Sequence[TokenBatch],
) -> int:
    """Shrink outlier channels of gated products before static scales; return how many.

    A channel of the input of `down_proj` whose peak is far above the median is divided by a power
    of two in a row of `up_proj` and multiplied by it in a column of `down_proj` (SmoothQuant,
    arXiv:2211.10438, for outliers only). The output of the model keeps its bits. Where it would
    not, as after a product that is not linear in `up_proj`, and where a weight is quantized,
    nothing changes.
    """
    model = student.model
    downs = {}
    for name in (name for name, spec in activations.items() if spec is not None and spec.is_static):
        owner, _, key = name.rpartition(".")
        mlp = model.get_submodule(owner)
        is_float = all(type(getattr(mlp, k, None)) is nn.Linear for k in ("up_proj", "down_proj"))
        if key == "down_proj" and is_float:
            downs[name] = mlp.down_proj
    peaks: dict[str, Tensor] = {}

    def note(names: Sequence[str], x: Tensor) -> None:
        peak = x.float().abs().flatten(0, -2).amax(0)
        peaks[names[0]] = torch.maximum(peak, peaks.get(names[0], peak))

    with _recording(student, downs, note):
        for batch in calibration if downs else ():
            student.hidden(*(ids.to(student.device) for ids in batch))
    return sum(_level(model.get_submodule(n.rpartition(".")[0]), peaks[n]) for n in peaks)


def _level(mlp: nn.Module, peak: Tensor) -> int:
    """Level the product inside `mlp` with channel peaks `peak` `(I,)`; return how many shrank."""
    # pruned channels are zero and would lower the median
    most = MOST_OF_MEDIAN * peak[peak > 0].median()
    factor = (peak / most).log2().ceil().clamp_min(0).exp2()
    tokens = mlp.up_proj.weight[None, :TOKENS].clone()  # rows of weights serve as test inputs
    before = mlp(tokens)
    weights = [mlp.down_proj.weight, mlp.up_proj.weight, mlp.up_proj.bias]
    kept = [(weight, weight.clone()) for weight in weights if weight is not None]
    mlp.down_proj.weight.mul_(factor)
    mlp.up_proj.weight.div_(factor[:, None])
    if mlp.up_proj.bias is not None:
        mlp.up_proj.bias.div_(factor)
    if not torch.equal(mlp(tokens), before):
        for weight, old in kept:  # restore copies: dividing back may round or give NaN
            weight.copy_(old)
        return 0
    return int((factor > 1).sum())


@torch.no_grad()
def put_activations(
    student: LanguageModel,
    activations: dict[str, ActivationSpec | None],
    calibration: Sequence[TokenBatch] = (),
) -> None:
    """Set how the quantized modules in `activations` quantize their inputs; None removes it.

    A module whose spec does not change keeps its scale. Static scales minimise the squared error on
    the module inputs in `calibration`, with all weights quantized and these inputs in floating
    point. Modules that read the same tensor share one scale.

    Raises:
        ConfigError: scales are static, and no token of `calibration` reaches a module.
    """
    model = student.model
    modules = {name: m for name, m in quantized_modules(model).items() if name in activations}
    statics = {}
    for name, module in modules.items():
        spec = activations[name]
        if spec == (None if module.activation is None else module.activation.spec):
            continue  # keep a learned scale
        module.activation = None
        if spec is not None and spec.is_static:
            statics[name] = module
        elif spec is not None:
            module.activation = ActivationQuantizer(spec)
    if not statics:
        return
    inputs = inputs_of(student, statics, calibration)
    for names, magnitudes in inputs.items():
        quantizer = ActivationQuantizer(activations[names[0]], magnitudes.best_scale())
        for name in names:
            statics[name].activation = quantizer
    unread = statics.keys() - {name for names in inputs for name in names}
    if unread:
        raise ConfigError(
            f"no token of the calibration text reaches {min(unread)}, whose static scale hangs on "
            "what it reads; raise --calibration-sequences or choose --activations int8"
        )


@dataclass
class Magnitudes:
    """A histogram of input magnitudes: `(K,)` counts in bins of equal ratio.

    A number counts `1 / |token|`, so that an error is weighed relative to its token: otherwise the
    few tokens that are hundreds of times as large as the others would set the range for all.
    """

    counts: Tensor | None = None
    names: list[str] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        """Add the numbers of `x`, `(..., I)`, to the histogram."""
        x = x.float()
        places = (x.abs().log2() - LOWEST_EXPONENT) * BINS_AN_OCTAVE
        bins = places.clamp(0, OCTAVES * BINS_AN_OCTAVE - 1).long().flatten()
        sizes = x.norm(dim=-1, keepdim=True).double().clamp_min(2.0**LOWEST_EXPONENT)
        weights = sizes.reciprocal().expand(x.shape).flatten()
        counts = torch.bincount(bins, weights, minlength=OCTAVES * BINS_AN_OCTAVE)
        self.counts = counts if self.counts is None else self.counts + counts

    def values(self) -> Tensor:
        """Return the middle of each bin, `(K,)` float64."""
        exponents = (torch.arange(OCTAVES * BINS_AN_OCTAVE) + 0.5) / BINS_AN_OCTAVE
        return (exponents.double() + LOWEST_EXPONENT).exp2().to(self.counts.device)

    def best_scale(self) -> Tensor:
        """Return the scale of the least expected squared error, one float32 number.

        Inside the range the error of a rounding step is `scale**2 / 12` on average, below half a
        step it is the number itself, and above the range it is the distance to it (each squared).
        """
        values = self.values()
        scales = values / LEVELS  # try each value as the end of the range
        size, value = scales[:, None], values[None]  # (K, 1) and (1, K)
        inside = torch.where(value < size / 2, value.square(), size.square() / 12)
        error = torch.where(value > LEVELS * size, (value - LEVELS * size).square(), inside)
        return scales[(error @ self.counts).argmin()].float()  # (K, K) @ (K,)


def inputs_of(
    student: LanguageModel,
    modules: dict[str, nn.Module],
    calibration: Sequence[TokenBatch],
) -> dict[tuple[str, ...], Magnitudes]:
    """Return input histograms of the quantized `modules`, by the names that read one tensor."""
    found: dict[str, Magnitudes] = {}
    here: dict[int, tuple[ref[Tensor], str]] = {}

    def note(names: Sequence[str], x: Tensor) -> None:
        seen = here.get(id(x))
        # the first tensor was freed, and another has its address
        if seen is None or seen[0]() is not x:
            seen = here[id(x)] = ref(x), names[0]
        first = seen[1]
        if names[0] not in found:
            found[names[0]] = found.setdefault(first, Magnitudes())
            found[names[0]].names += names
        if first == names[0] or found[first] is not found[names[0]]:
            found[names[0]].add(x)

    with _recording(student, modules, note):
        for batch in calibration:
            student.hidden(*(ids.to(student.device) for ids in batch))
    return {tuple(each.names): each for each in found.values()}


@contextmanager
def _recording(student: LanguageModel, modules: dict[str, nn.Module], note: Any) -> Iterator[None]:
    """Call `note(names, tensor)` on every input of `modules` inside the block."""
    model = student.model
    stacks: dict[nn.Module, list[str]] = {}
    with ExitStack() as hooks:
        for name, module in modules.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, QuantTable):
                handle = body_of(model).register_forward_hook(
                    lambda _m, _a, output, name=name: note([name], output[0])
                )
            elif experts_of(owner, name.rpartition(".")[2]):
                stacks.setdefault(owner, []).append(name)
                continue
            else:
                handle = module.register_forward_pre_hook(
                    lambda _m, args, name=name: note([name], args[0])
                )
            hooks.enter_context(handle)
        for owner, names in stacks.items():
            handle = owner.register_forward_pre_hook(
                lambda _m, args, named, names=names: note(
                    names, next(x for x in (*args, *named.values()) if isinstance(x, Tensor))
                ),
                with_kwargs=True,
            )
            hooks.enter_context(handle)
        yield
