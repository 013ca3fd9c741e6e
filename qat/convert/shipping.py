"""Adaptation of a plan to what targets of `qat export` hold without loss, before quantization.

Shapes: O out_features, I in_features.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple, Protocol

from transformers import PreTrainedModel

from qat.convert.config import ConvertConfig
from qat.errors import ExportError
from qat.models.attention import attends_sparsely
from qat.models.cost import Part, format_bits
from qat.models.stored_state import quantized_modules
from qat.nn.sites import odd_site
from qat.nn.swap import linear_names, table_names, weight_shape
from qat.quant.spec import ActivationKind, ActivationSpec, LutSpec, QuantPlan, name_in_layer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileSizes:
    """The sizes of a target's file."""

    megabytes: float  # the whole file, in 10**6 bytes
    bits_per_weight: float  # over its tensors
    linear_bits: float  # over the quantized linears alone
    parts: list[Part]  # one without weights is no tensor


class Holder(Protocol):
    """The part of a target (`qat.export.targets.Target`) that a conversion uses."""

    HOLDS_TABLES: bool
    """True if an embedding or a head may be quantized."""
    HOLDS_ACTIVATIONS: tuple[ActivationKind | None, ...]
    """Kinds of inputs that the target computes with; None stands for floating point."""

    def lost(self, spec: LutSpec, shape: tuple[int, int]) -> str | None:
        """Return why a weight in that format would lose something; None if it loses nothing."""

    def scheme(self, spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
        """Return the nearest format that is held without loss."""

    def check(self, model: PreTrainedModel) -> None:
        """Refuse an architecture that cannot be written."""


KEEPS_ATTENTION = "packed"
"""The only target that holds sparse attention: the checkpoint itself."""
KEEP_SITES = ("packed", "dense", "mxfp4")
"""Targets that hold quantized weights outside of linears; `mxfp4` checks which itself."""
COMPUTE_IN_HALF = ("coreml", "ane")
"""Targets whose programs may compute in float16 with static scales of inputs."""


def check_architecture(name: str, model: PreTrainedModel) -> None:
    """Refuse a model with a part that the target called `name` cannot hold.

    These are sparse attention, experts in one tensor, and transposed weights.

    Raises:
        ExportError: the model has such a part.
    """
    site = None if name in KEEP_SITES else odd_site(model)
    if site is not None:
        raise ExportError(
            f"{name} cannot hold {type(model).__name__}: {site}, expected linears; export --to "
            "dense, or keep the packed checkpoint"
        )
    if name != KEEPS_ATTENTION and attends_sparsely(model):
        raise ExportError(
            f"{name} cannot hold sparse attention, expected dense attention; swap it out with 'qat "
            f"convert --attention dense', or export --to {KEEPS_ATTENTION}"
        )


HELD_INPUTS = {None: "in floating point", "int8-static": "int8-static, whose range is fixed"}
"""Descriptions of held inputs in messages; other kinds are described by their name."""


def lost_by_activation(target: Holder, activation: ActivationSpec | None) -> str | None:
    """Return why the target does not compute with inputs quantized in this way; None if it does."""
    kind = None if activation is None else activation.kind
    if kind in target.HOLDS_ACTIVATIONS:
        return None
    held = " or ".join(HELD_INPUTS.get(each, each) for each in target.HOLDS_ACTIVATIONS)
    found = "in floating point" if kind is None else f"quantized ({kind})"
    return f"its input is {found}, expected one {held}"


GROUP_SIZES = (32, 64, 128, 256)
"""Group sizes to try if several targets have no format in common at the plan's size."""


class Shipping(NamedTuple):
    """The export targets of a student."""

    targets: dict[str, Holder]
    """Targets by name, in any order."""

    @property
    def name(self) -> str:
        """The names of all targets, joined."""
        return "_".join(self.targets)

    def stored_bits(self, spec: LutSpec, shape: tuple[int, int]) -> int:
        """Return the bits of an `(O, I)` weight in the files where it takes the most.

        The blocks of a target with `file_bits` may take more than the packed checkpoint.
        """
        return max(format_bits(spec, shape), *self._bits_by_file(spec, shape))

    def _bits_by_file(self, spec: LutSpec, shape: tuple[int, int]) -> list[int]:
        sizes = (getattr(target, "file_bits", format_bits) for target in self.targets.values())
        return [size(spec, shape) for size in sizes]

    @property
    def count_file(self) -> Callable[..., tuple[dict[str, int], FileSizes]] | None:
        """The function of the first target that counts its file; None if none does.

        It takes a model, which may have no values, the bytes of the tensors of its checkpoint and
        its tokenizer. It returns the bytes of the tensors of the file, by name of the model.
        """
        return getattr(self._counting, "count_file", None)

    @property
    def counted_bits(self) -> Callable[[LutSpec, tuple[int, int]], int]:
        """The function for the bits of a weight in that file, or in the packed checkpoint."""
        return getattr(self._counting, "file_bits", format_bits)

    @property
    def _counting(self) -> Holder | None:
        return next((each for each in self.targets.values() if hasattr(each, "count_file")), None)

    @property
    def holds_tables(self) -> bool:
        """Return whether all targets hold a quantized embedding and head."""
        return all(target.HOLDS_TABLES for target in self.targets.values())

    def bend(self, module: str, spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
        """Return the format of equal bits that replaces `spec` for the `(O, I)` weight of `module`.

        A fixed grid with 8-bit scales, which every dtype holds, is returned unchanged if its groups
        divide the rows and all targets hold it.

        Raises:
            ExportError: the targets have none in common; the message names two that conflict.
        """
        sizes = [size for size in GROUP_SIZES if size > spec.group_size and not shape[1] % size]
        for size in [spec.group_size, *(sizes if len(self.targets) > 1 else ())]:
            found = self._common(spec.model_copy(update={"group_size": size}), shape)
            if found is not None:
                return found
        if len(self.targets) > 2:
            for pair in combinations(self.targets.items(), 2):
                Shipping(dict(pair)).bend(module, spec, shape)
        for name, target in self.targets.items():
            try:
                target.scheme(spec, shape)
            except ExportError as error:
                raise ExportError(f"{name} cannot hold {module}: {error}") from None
        raise ExportError(
            f"{' and '.join(self.targets)} hold no format of {spec.bits} bits for {module} in "
            "common, expected one; convert the model once for each of them"
        )

    def _common(self, spec: LutSpec, shape: tuple[int, int]) -> LutSpec | None:
        """Return the format near `spec` that takes the fewest bits of those that all targets hold.

        None if there is none. Which one is found depends on the target that adapts `spec` first,
        and integers of few bits are often all that targets have in common, so all are tried.
        Learned levels are kept where all targets hold them: they fit far better than integers,
        which save a table.
        """
        names, specs = sorted(self.targets), [spec]
        if len(names) > 1 and spec.codebook == "lut" and spec.vector_size == 1:
            specs.append(spec.model_copy(update={"codebook": "int"}))
        orders = [[*names[n:], *names[:n]] for n in range(len(names))]
        adapted = [self._adapted(each, shape, order) for each in specs for order in orders]
        held = [each for each in adapted if each is not None]
        learned = [each for each in held if each.codebook == "lut"]

        def cost(spec: LutSpec) -> tuple[int, int, int, bool]:
            total = sum(self._bits_by_file(spec, shape))
            return self.stored_bits(spec, shape), total, spec.group_size, spec.codebook == "int"

        return min(learned or held, key=cost, default=None)

    def _adapted(self, spec: LutSpec, shape: tuple[int, int], order: list[str]) -> LutSpec | None:
        """Adapt `spec` to each target in turn; None if the result is not held by all."""
        try:
            for target in [self.targets[name] for name in (*order, *order)]:
                is_fixed = spec.scale_bits <= 8 and spec.codebook != "lut"
                is_fixed &= not shape[1] % spec.group_size
                if not is_fixed or target.lost(spec, shape) is not None:
                    spec = target.scheme(spec, shape)
        except ExportError:
            return None
        is_held = all(target.lost(spec, shape) is None for target in self.targets.values())
        return spec if is_held else None

    def plan(
        self, plan: QuantPlan, model: PreTrainedModel, *, asked: ConvertConfig | None = None
    ) -> QuantPlan:
        """Return `plan` with a rule for each module, its format adapted to all targets.

        Lines say which groups of `asked` are not kept, and which weights a target holds in more
        bits than their format needs.

        Raises:
            ExportError: a target cannot hold the model, a format of the plan, or one that a module
                outside of the plan already has, or two targets have no format in common.
            ConfigError: a pattern of the plan matches nothing.
        """
        for name, target in self.targets.items():
            check_architecture(name, model)
            target.check(model)
        plan, tables = self._with_inputs(plan), table_names(model)
        specs = plan.assign(linear_names(model), tables)
        self._check_tables([name for name in specs if name in tables])
        self._check_others(model, set(specs))
        held = {n: self.bend(n, s, weight_shape(model.get_submodule(n))) for n, s in specs.items()}
        held |= {name: held[name].of_one_table for name in tables if name in held}
        if asked is not None and asked.group_size is not None:
            self._say_groups({n: s for n, s in held.items() if n not in tables}, asked.group_size)
        if asked is not None and asked.bits_budget is None:  # which has chosen by sizes
            self._say_larger(specs, held, model)
        return QuantPlan(name=f"{plan.name}_{self.name}", rules=plan.rules_for(held, tables))

    def _say_groups(self, linears: Mapping[str, LutSpec], group_size: int) -> None:
        others = sorted({spec.group_size for spec in linears.values()} - {group_size})
        if others:
            logger.warning(
                "group_size=%d is not kept: linears get groups of %s, which %s holds; --for packed "
                "keeps it, or drop --group-size",
                group_size,
                " and ".join(map(str, others)),
                " and ".join(self.targets),
            )

    def _say_larger(
        self, asked: Mapping[str, LutSpec], held: Mapping[str, LutSpec], model: PreTrainedModel
    ) -> None:
        counting = {n: t.larger for n, t in self.targets.items() if hasattr(t, "larger")}
        for target, larger in counting.items():
            alike: dict[str, dict[str, None]] = {}
            for name, spec in asked.items():
                form = larger(spec, held[name], weight_shape(model.get_submodule(name)))
                if form is not None:
                    alike.setdefault(form, {})[name_in_layer(name)] = None
            for form, names in alike.items():
                logger.warning("%s holds %s as %s", target, ", ".join(names), form)

    def _with_inputs(self, plan: QuantPlan) -> QuantPlan:
        """Return `plan` with inputs that all targets support.

        If the plan leaves inputs in floating point and a target does not support that, they get a
        kind that all targets have in common. Static scales get the dtype that the targets compute
        in.
        """
        takes = [target.HOLDS_ACTIVATIONS for target in self.targets.values()]
        common = [kind for kind in takes[0] if all(kind in kinds for kinds in takes)]
        if plan.activations == {None} and common and None not in common:
            plan = plan.with_activation(common[0])
        for (name, target), each in product(self.targets.items(), plan.activations):
            reason = lost_by_activation(target, each)
            if reason is not None:
                raise ExportError(
                    f"{name} cannot hold plan {plan.name}: {reason}; convert with --activations of "
                    "that kind, without where it is floating point, or for another target"
                )
        return plan if self.targets.keys().isdisjoint(COMPUTE_IN_HALF) else plan.with_short_scales()

    def _check_tables(self, tables: list[str]) -> None:
        for name, target in self.targets.items():
            if tables and not target.HOLDS_TABLES:
                raise ExportError(
                    f"{name} cannot hold {tables[0]} quantized, expected embedding and head in "
                    "floating point; convert with --embedding-bits 16"
                )

    def _check_others(self, model: PreTrainedModel, planned: set[str]) -> None:
        """Refuse targets that cannot hold modules already quantized outside of the plan."""
        others = {n: m for n, m in quantized_modules(model).items() if n not in planned}
        for (name, module), (to, target) in product(others.items(), self.targets.items()):
            reason = target.lost(module.spec, weight_shape(module))
            activation = module.activation and module.activation.spec
            reason = reason or lost_by_activation(target, activation)
            if reason is not None:
                raise ExportError(
                    f"{to} cannot hold {name}, which is quantized already and in no rule of "
                    f"the plan: {reason}; add a rule for it"
                )
