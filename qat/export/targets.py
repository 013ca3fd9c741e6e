"""Registry of export targets, with one module each, of `qat.export` or of an extension.

Each target reports for every weight format if it is held without loss. This is checked before
training (`qat convert --for TARGET`) and before files are written (`qat export --to TARGET`).
"""

from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, get_args

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.convert.shipping import Shipping, check_architecture, lost_by_activation
from qat.errors import ExportError, how_to_install
from qat.export.config import LIBRARIES, TargetName
from qat.hooks import extension, hooks
from qat.models.checkpoint import load_skeleton
from qat.nn.lut_embedding import QuantTable, quant_tables
from qat.nn.quant_linear import QuantLinear, quant_linears
from qat.nn.quant_weight import QuantWeight
from qat.nn.swap import weight_shape
from qat.quant.spec import ActivationKind, LutSpec

TARGETS: dict[TargetName, str] = {
    "packed": "qat.export.packed",
    "dense": "qat.export.dense",
}
"""The module of each target of the core, imported on first use."""
EXTENSIONS = "qat.targets"
"""The group of entry points whose names are further targets and whose values are their modules."""


class Lack(NamedTuple):
    """The reason that a target cannot hold a checkpoint as it is."""

    reason: str
    """The reason as a clause."""
    is_format: bool
    """True if it is a weight's format, which `qat convert --for` would have chosen otherwise."""


class Target(Protocol):
    """The interface of a target's module. Its own library is imported inside the functions."""

    COMPARED: Literal["bits", "bits32", "sums", "constants"]
    """How read-back logits must equal the model's. bits: bit-exact in the model's dtype; bits32:
    bit-exact in float32, because the library rounds scales of inputs to the dtype of the model;
    sums: in float32, with sums in another order; constants: in float32 with weights rounded to the
    model's dtype, as are angles and other constants in the files."""
    HOLDS_ADAPTERS: bool
    """True if `lora_out @ lora_in` may be part of a weight."""
    HOLDS_TABLES: bool
    """True if the embedding or the head may be quantized."""
    HOLDS_ACTIVATIONS: tuple[ActivationKind | None, ...]
    """Kinds of inputs that the target computes with; None stands for floating point."""
    HOW_TO_LOAD: str
    """Markdown for the model card: how to load the files with the target's own library."""

    def lost(self, spec: LutSpec, shape: tuple[int, int]) -> str | None:
        """Return why an `(O, I)` weight in that format would lose something; None if not."""

    def scheme(self, spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
        """Return the format nearest to `spec`, with as many bits, that is held without loss.

        Raises:
            ExportError: there is none.
        """

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model whose architecture, quantized or not, cannot be written.

        Raises:
            ExportError: the reason.
        """

    def write(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
    ) -> None:
        """Write the files into the existing `directory`.

        Raises:
            ExportError: a value of the model does not fit.
        """

    def read_logits(self, model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
        """Return the logits `(B, S, V)` of the written files for `ids` `(B, S)`.

        The target's own library reads the files; if it cannot run models here, it reads the weights
        into a copy of `model`.
        """


def target_names() -> tuple[TargetName, ...]:
    """Return the names of all targets, in the order in which `--to` lists them."""
    there = {*TARGETS, *hooks(EXTENSIONS)}
    listed = [name for name in get_args(TargetName) if name in there]
    return (*listed, *sorted(there.difference(listed)))


def load_target(name: TargetName) -> Target:
    """Return the module of the target called `name`.

    Raises:
        ConfigError: the target's extension is not installed.
    """
    return import_module(TARGETS[name]) if name in TARGETS else extension(EXTENSIONS, name)


def shipping_to(names: Collection[TargetName]) -> Shipping | None:
    """Return the targets called `names` for a conversion; None without names."""
    return Shipping({name: load_target(name) for name in names}) if names else None


def check_library(name: TargetName) -> None:
    """Refuse the target called `name` if its library is not installed or does not load.

    Raises:
        ConfigError: the target's extension is not installed.
        ExportError: the library is missing; the message has the command that installs it.
    """
    load_target(name)
    if name not in LIBRARIES:
        return
    library, extra = LIBRARIES[name]
    try:
        if getattr(import_module(library), "__file__", None) is None:
            raise ImportError("only a folder is called so")
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries is missing
        raise ExportError(
            f"{library} does not load ({' '.join(str(error).split())[:160]}), expected it to check "
            f"what is written; run: {how_to_install(extra)}"
        ) from None


def check_model(name: TargetName, model: PreTrainedModel) -> None:
    """Refuse a model that the target called `name` cannot hold without loss.

    Raises:
        ExportError: the first module that would lose something, why, and what to do.
    """
    target = load_target(name)
    check_architecture(name, model)
    target.check(model)
    for module_name, reason, remedy in _losses(target, model):
        raise ExportError(
            f"{name} cannot hold {module_name} without loss: {reason}; {remedy.format(name=name)}"
        )


def ships_to(directory: Path, *, adapters: bool = False) -> dict[TargetName, Lack | None]:
    """Return what each target lacks for the packed checkpoint in `directory`; None if nothing.

    Only the configuration is read. `adapters`: its linears will get adapters.

    Raises:
        CheckpointError: it is not a packed checkpoint.
    """
    return model_ships_to(load_skeleton(directory), adapters=adapters)


def model_ships_to(
    model: PreTrainedModel, *, adapters: bool = False
) -> dict[TargetName, Lack | None]:
    """Return what `ships_to` does, for a quantized model, which may have no values."""
    return {name: _lack(name, model, adapters) for name in target_names()}


def _lack(name: TargetName, model: PreTrainedModel, adapters: bool) -> Lack | None:
    target = load_target(name)
    try:
        check_architecture(name, model)
        target.check(model)
    except ExportError as error:
        return Lack(str(error).removeprefix(f"{name} ").split(",")[0], is_format=False)
    if adapters and not target.HOLDS_ADAPTERS:
        return Lack("holds no adapters", is_format=False)
    for _, reason, remedy in _losses(target, model):
        return Lack(reason.split(",")[0], is_format="--for" in remedy)
    return None


def _losses(target: Target, model: PreTrainedModel) -> Iterator[tuple[str, str, str]]:
    """Yield each module that would lose something, the reason and the remedy."""
    # linears first: their faults decide on the plan
    for name, module in {**quant_linears(model), **quant_tables(model)}.items():
        loss = _lost(target, module)
        if loss is not None:
            yield name, *loss


def held_as(target: Target, module: QuantWeight) -> LutSpec:
    """Return the format of a weight in files of a target: levels instead of vectors, if exact."""
    spec, shape = module.spec, weight_shape(module)
    return spec if target.lost(spec, shape) is None else spec.as_levels


def _lost(target: Target, module: QuantWeight) -> tuple[str, str] | None:
    if isinstance(module, QuantTable) and not target.HOLDS_TABLES:
        reason = "a quantized table, expected one in floating point"
        return reason, "convert the model with --embedding-bits 16, or --for {name}"
    if isinstance(module, QuantLinear) and module.lora_rank and not target.HOLDS_ADAPTERS:
        return "its adapter is part of its weight", "export --to dense or packed"
    activation = module.activation and module.activation.spec
    reason = target.lost(held_as(target, module), weight_shape(module))
    if reason is None and activation is not None:
        remedy = "convert the model with inputs as expected, or keep the packed checkpoint"
    else:
        # --for does not turn vectors into levels
        plan = " --to q2a4" if module.spec.lost_as_levels else ""
        remedy = f"convert the model with 'qat convert{plan} --for {{name}}' before training"
    reason = reason or lost_by_activation(target, activation)
    return None if reason is None else (reason, remedy)
