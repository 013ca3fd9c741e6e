"""A plan bent to what a target of `qat export` holds without loss, before anything is quantized.

Shapes: O out_features, I in_features.
"""

from typing import NamedTuple, Protocol

from transformers import PreTrainedModel

from qat.errors import ExportError
from qat.models.nsa_swap import nsa_config
from qat.models.stored_state import quantized_modules
from qat.models.swap import linear_names
from qat.models.tables import table_names, weight_shape
from qat.quant.spec import LutSpec, PlanRule, QuantPlan


class Holder(Protocol):
    """What a conversion asks of a target (`qat.export.targets.Target`)."""

    HOLDS_TABLES: bool
    """Whether an embedding or a head may be quantized."""

    def lost(self, spec: LutSpec, shape: tuple[int, int]) -> str | None:
        """Why a weight in that format would lose something; None if it loses nothing."""

    def scheme(self, spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
        """The nearest format that is held without loss."""

    def check(self, model: PreTrainedModel) -> None:
        """Refuse an architecture that cannot be written."""


KEEPS_ATTENTION = "packed"
"""The one target that holds sparse attention: the checkpoint itself."""


def check_attention(name: str, model: PreTrainedModel) -> None:
    """Refuse a model whose sparse attention the target called `name` would lose.

    Raises:
        ExportError: see above.
    """
    if name != KEEPS_ATTENTION and nsa_config(model) is not None:
        raise ExportError(
            f"{name} cannot hold sparse attention, expected dense attention; swap it out with 'qat "
            f"convert --attention dense', or export --to {KEEPS_ATTENTION}"
        )


class Shipping(NamedTuple):
    """Where a student is to go."""

    name: str
    """Of the target, for names and messages."""
    target: Holder

    def bend(self, module: str, spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
        """The format that the `(O, I)` weight of `module` gets instead of `spec`: of as many bits.

        A fixed grid that the target holds already, with scales of 8 bits, which every dtype holds,
        stays.

        Raises:
            ExportError: the target holds none.
        """
        is_held = self.target.lost(spec, shape) is None
        if is_held and spec.scale_bits == 8 and spec.codebook != "lut":
            return spec
        try:
            return self.target.scheme(spec, shape)
        except ExportError as error:
            raise ExportError(f"{self.name} cannot hold {module}: {error}") from None

    def plan(self, plan: QuantPlan, model: PreTrainedModel) -> QuantPlan:
        """`plan` with a rule for each module, its format bent to what the target holds.

        Raises:
            ExportError: the target cannot hold the model, a format of the plan, or one that a
                module outside of the plan has already.
            ConfigError: a pattern of the plan matches nothing.
        """
        check_attention(self.name, model)
        self.target.check(model)
        tables = table_names(model)
        specs = plan.assign(linear_names(model), tables)
        self._check_tables([name for name in specs if name in tables])
        self._check_others(model, set(specs))
        rules = [
            PlanRule(pattern=n, spec=self.bend(n, spec, weight_shape(model.get_submodule(n))))
            for n, spec in specs.items()
        ]
        return QuantPlan(name=f"{plan.name}_{self.name}", rules=tuple(rules))

    def _check_tables(self, tables: list[str]) -> None:
        if tables and not self.target.HOLDS_TABLES:
            raise ExportError(
                f"{self.name} cannot hold {tables[0]} quantized, expected embedding and head in "
                "floating point; convert without --embedding-bits"
            )

    def _check_others(self, model: PreTrainedModel, planned: set[str]) -> None:
        """What is quantized already and stays must be held as it is."""
        for name, module in quantized_modules(model).items():
            reason = self.target.lost(module.spec, weight_shape(module))
            if name not in planned and reason is not None:
                raise ExportError(
                    f"{self.name} cannot hold {name}, which is quantized already and in no rule of "
                    f"the plan: {reason}; add a rule for it"
                )
