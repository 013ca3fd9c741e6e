"""Settings of `qat convert`, and the plan that its `--to` names: which linear gets which format."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from qat.config import Attention, Calibration, Device, Formats, Knows, Settings, Speed
from qat.errors import ConfigError, nearest
from qat.files import parse_toml
from qat.quant.spec import (
    PRESETS,
    SUFFIX_OF,
    ActivationKind,
    KvSpec,
    LutSpec,
    PlanRule,
    QuantPlan,
    preset_called,
    vectors,
)

REPORT_NAME = "convert_report.json"
"""What a conversion says of itself, in the checkpoint that it makes."""


class ConvertConfig(Settings):
    """How to quantize a model, and how it is to attend, without training it."""

    attention: Attention[str | None] = None
    """dense, nsa, nsa-merged, nsa-shared, nsa-merged-shared, nsa-paper, or a TOML file with sizes
    of sparse attention; as the source has it if not given. Without --to nothing is quantized."""
    attention_steps: Attention[int] = Field(100, ge=0)
    """With --attention and --calibration: steps in which gates and pooling come closer to dense
    attention, layer by layer; 0 for none."""
    to: Formats[Annotated[str | None, Knows(tuple(PRESETS))]] = None
    """A preset (q4a4, q2a4, q2a2, q4a4_r4, q4a4_r32, q2a4_r32; with codebooks of vectors, for 2 or
    3 bits that stay packed, become dense or go to Core ML: v2a4, v2a2, v3a3; with a trellis, for
    the least error of 2 bits that stay packed or become dense: t2a4, t2a2) or a TOML file with a
    plan. Behind a preset, _kv8 or _kv4 is --kv int8 or int4: q2a4_kv4, q2a4_a8kv8."""
    activations: Formats[ActivationKind | None] = None
    """Quantize what the quantized linears (and a quantized head) read: int8 or fp8 (E4M3) with a
    scale for each token, int8-asymmetric with a zero point too, or int8-static with one learned
    scale, which needs --calibration; else as the plan says, whose name may say so: q2a4_a8,
    q2a4_a8z, q2a4_a8s, q2a4_f8."""
    kv: Formats[Literal["int8", "int4"] | None] = None
    """Keep keys and values of attention in so many bits, in training and in every cache; as the
    source has it if not given. Without --to nothing else is quantized."""
    bits_budget: Formats[float | None] = Field(None, gt=0)
    """Bits per weight to meet with 2, 3 or 4 bits per linear, chosen by measured KL; a plan then
    only says which linears, of levels, vectors or trellises, in which groups (without a plan all,
    of vectors, and of levels where a linear or a target cannot have these)."""
    group_size: Formats[int | None] = Field(None, gt=0)
    """Input features that share a scale; the plan's own if not given."""
    embedding_bits: Formats[Literal[4, 8, 16, "auto"] | None] = None
    """Bits of the embedding and the head: 4 or 8; 16 for floating point; auto for what the budget,
    which then holds for them too, is best spent on. If not given, 8 (or fewer, where the source has
    fewer) unless the plan has a rule for them, its scales are of low rank, or a target of --for
    holds no quantized table."""
    rotate: Formats[bool] = False
    """Rotate a float model before anything is quantized, so that what its linears read has fewer
    outliers; its function stays. Without --to nothing is quantized."""
    base: Formats[str | None] = None
    """Float model to take weights from, where the source is already quantized."""
    calibration: Calibration[str | None] = None
    """Teacher cache or text file whose tokens show what each layer's inputs look like."""
    calibration_sequences: Calibration[int] = Field(256, gt=0)
    """Sequences of it to use, drawn from all that it has."""
    calibration_seed: Calibration[int] = Field(0, ge=0)
    """Seed of that draw."""
    calibration_length: Calibration[int] = Field(256, gt=1)
    """Tokens per sequence of a text file (a cache has its own)."""
    workers: Speed[int] = Field(0, ge=0)
    """Linears fitted at a time without calibration; 0: one per core, or one where a GPU works."""
    device: Speed[Device] = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    trust_remote_code: Speed[bool] = False
    """Run the code that comes with the model or its base (recorded in convert_report.json)."""

    @field_validator("embedding_bits", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        """A flag's digits are a number, as a recipe writes it."""
        return int(value) if isinstance(value, str) and value.isdigit() else value


ALL_LINEARS = QuantPlan(name="all linears", rules=(PlanRule(pattern="*", spec=vectors(8, 4)),))
"""Which linears share a budget of bits, and in which form, where no plan says so."""
NOTHING = QuantPlan(name="none", rules=())


class PlanFile(Settings):
    """A plan in a TOML file: `name` and a list of `rules`, each a `pattern` and a `spec`."""

    name: str
    rules: tuple[PlanRule, ...]


def split_kv(name: str) -> tuple[str, KvSpec | None]:
    """A preset's name and the widths behind it: `q2a4_kv4` is `q2a4` with keys and values of 4."""
    found = re.fullmatch(r"(.+?)_?kv([48])", name)
    return (name, None) if found is None else (found[1], KvSpec(bits=int(found[2])))


def read_kv(config: ConvertConfig) -> KvSpec | None:
    """How keys and values are to be kept; None for as they are.

    Raises:
        ConfigError: `kv` and the name of the preset say two things.
    """
    named = None if config.to is None or Path(config.to).is_file() else split_kv(config.to)[1]
    asked = None if config.kv is None else KvSpec(bits=int(config.kv.removeprefix("int")))
    if asked is not None and named not in (None, asked):
        raise ConfigError(
            f"to={config.to} keeps keys and values in {named.bits} bits, but kv={config.kv} is "
            "given, expected one of them; drop one"
        )
    return asked or named


def read_plan(config: ConvertConfig) -> QuantPlan:
    """The plan that `config.to` names, with the group size and activations that are given.

    Else all linears for a budget, and nothing without one.

    Raises:
        ConfigError: neither a preset nor a readable plan file, or activations are named twice.
    """
    plan = _with_group_size(_named_plan(config), config.group_size)
    if config.activations is None:
        return plan
    said = sorted(spec.kind for spec in plan.activations if spec is not None)
    if said:
        raise ConfigError(
            f"activations={config.activations}, but plan {plan.name} says {said[0]} already; name "
            "them once"
        )
    return plan.with_activation(config.activations)


def check_asked(config: ConvertConfig) -> QuantPlan:
    """Return the plan of settings that name something to do and fit one another.

    Raises:
        ConfigError: nothing is named to do, or a setting lacks another one that it needs.
    """
    changes = {config.to, config.bits_budget, config.attention, config.kv}
    if changes == {None} and not config.rotate:
        raise ConfigError(
            "neither a plan nor a budget is given, expected one of them; add --to PLAN or "
            "--bits-budget BITS (or --attention, --kv or --rotate to do that alone)"
        )
    if config.rotate and config.base is not None:
        raise ConfigError(
            f"base={config.base} is given with rotate, expected a base that is rotated as the "
            "model is; convert the float model with --rotate alone and name the result as --base"
        )
    read_kv(config)
    if config.bits_budget is not None and config.calibration is None:
        raise ConfigError(
            f"bits_budget={config.bits_budget:g} is given without a text to measure sensitivities "
            "on; add --calibration TEXT"
        )
    if config.embedding_bits == "auto" and config.bits_budget is None:
        raise ConfigError(
            "embedding_bits=auto is given without a budget to choose within; add --bits-budget "
            "BITS, or give --embedding-bits 4 or 8"
        )
    if config.activations is not None and config.to is None and config.bits_budget is None:
        raise ConfigError(
            f"activations={config.activations} is given without a plan, expected weights to be "
            "quantized too; add --to PLAN, such as the one that the source has"
        )
    plan = read_plan(config)
    if plan.has_static and config.calibration is None:
        raise ConfigError(
            "activations=int8-static is given without a text to find the scales on; add "
            "--calibration TEXT"
        )
    return plan


def _named_plan(config: ConvertConfig) -> QuantPlan:
    unnamed = NOTHING if config.bits_budget is None else ALL_LINEARS
    plan = preset_called(split_kv(config.to)[0]) if config.to is not None else unnamed
    if plan is None:
        path = Path(config.to)
        if not path.is_file():
            known = ", ".join(PRESETS)
            found = nearest(split_kv(config.to)[0], PRESETS)
            hint = f"; did you mean {found[0]}?" if found else ""
            raise ConfigError(
                f"to={config.to} is neither a file nor a preset; use one of {known}, which may end "
                f"in _{', _'.join(SUFFIX_OF.values())}, and then in _kv8 or _kv4{hint}"
            )
        try:
            values = parse_toml(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"to={path} is not TOML ({error}), expected a plan; mend that line"
            ) from None
        plan = QuantPlan(**PlanFile.parse(values, str(path)).model_dump())
    return plan


def _with_group_size(plan: QuantPlan, group_size: int | None) -> QuantPlan:
    if group_size is None:
        return plan
    change = {"group_size": group_size}
    specs = [
        rule.spec and LutSpec.parse(rule.spec.model_dump() | change, f"plan {plan.name}")
        for rule in plan.rules
    ]
    changed = zip(plan.rules, specs, strict=True)
    rules = tuple(rule.model_copy(update={"spec": spec}) for rule, spec in changed)
    return plan.model_copy(update={"rules": rules})
