"""The plan that `qat convert --to` names: which linear gets which format."""

from pathlib import Path

from qat.config import Settings
from qat.convert.config import ConvertConfig
from qat.errors import ConfigError
from qat.files import parse_toml
from qat.quant.spec import PRESETS, PlanRule, QuantPlan, by_group

ALL_LINEARS = QuantPlan(name="all linears", rules=(PlanRule(pattern="*", spec=by_group(2)),))
"""Which linears share a budget of bits where no plan says so."""
NOTHING = QuantPlan(name="none", rules=())


class PlanFile(Settings):
    """A plan in a TOML file: `name` and a list of `rules`, each a `pattern` and a `spec`."""

    name: str
    rules: tuple[PlanRule, ...]


def read_plan(config: ConvertConfig) -> QuantPlan:
    """The plan that `config.to` names, with its group size if one is given.

    Else all linears for a budget, and nothing without one.

    Raises:
        ConfigError: neither a preset nor a readable plan file.
    """
    unnamed = NOTHING if config.bits_budget is None else ALL_LINEARS
    plan = PRESETS.get(config.to) if config.to is not None else unnamed
    if plan is None:
        path = Path(config.to)
        if not path.is_file():
            known = ", ".join(PRESETS)
            raise ConfigError(f"to={config.to} is neither a file nor a preset; use one of {known}")
        try:
            values = parse_toml(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"to={path} is not TOML ({error}), expected a plan; mend that line"
            ) from None
        plan = QuantPlan(**PlanFile.parse(values, str(path)).model_dump())
    if config.group_size is None:
        return plan
    rules = tuple(
        rule.model_copy(
            update={
                "spec": rule.spec and rule.spec.model_copy(update={"group_size": config.group_size})
            }
        )
        for rule in plan.rules
    )
    return plan.model_copy(update={"rules": rules})
