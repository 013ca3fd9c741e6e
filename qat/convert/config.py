"""Settings of `qat convert`, and the plan that `--to` names: the format of each linear."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from qat.config import Attention, Calibration, Device, Formats, Knows, Settings, Speed, read_toml
from qat.errors import ConfigError, nearest
from qat.hooks import extension
from qat.models.attention import read_attention
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
"""File of a checkpoint with the report of its conversion."""


class ConvertConfig(Settings):
    """Settings for quantizing a model, and changing its attention, without training it."""

    attention: Attention[str | None] = None
    """dense, nsa, nsa-merged, nsa-shared, nsa-merged-shared, nsa-paper, or a TOML file with sizes
    of sparse attention; the source's attention by default. Without --to nothing is quantized."""
    attention_steps: Attention[int] = Field(100, ge=0)
    """With --attention and --calibration: steps that fit gates and pooling to dense attention,
    layer by layer; 0 for none."""
    to: Formats[Annotated[str | None, Knows((*PRESETS, "float"))]] = None
    """A preset (q4a4, q2a4, q2a2, q4a4_r4, q4a4_r32, q2a4_r32; with codebooks of vectors, for 2 or
    3 bits that stay packed, become dense or go to Core ML: v2a4, v2a2, v3a3; for llama.cpp's Q2_0
    and Q1_0: ternary, b1; ternary with one zero in four, as Sherry: sherry) or a TOML file with a
    plan. The suffix _kv8 or _kv4 of a preset means --kv int8 or int4: q2a4_kv4, q2a4_a8kv8. float
    quantizes nothing: it makes a directory of a GGUF file, with one table where that holds two
    roundings of one."""
    activations: Formats[ActivationKind | None] = None
    """Quantize the inputs of the quantized linears (and of a quantized head): int8 or fp8 (E4M3)
    with a scale per token, int8-asymmetric with a zero point too, or int8-static with one learned
    scale, which needs --calibration. The plan decides by default; presets have a suffix for it:
    q2a4_a8, q2a4_a8z, q2a4_a8s, q2a4_f8."""
    kv: Formats[Literal["int8", "int4"] | None] = None
    """Bits of attention keys and values, in training and in every cache; those of the source by
    default. Without --to nothing else is quantized."""
    bits_budget: Formats[float | None] = Field(None, gt=0)
    """Bits per weight of the whole file, met with 2, 3 or 4 bits per linear, or those of the plan,
    and 2, 3, 4 or 8 per table, chosen by measured KL; of the linears alone where tables have their
    bits from --embedding-bits, the plan or the source, or are not quantized. A plan then only says
    which linears, whether levels or vectors, and in which groups. Without a plan: all linears, as
    vectors, or as levels where a linear or a target cannot hold vectors."""
    group_size: Formats[int | None] = Field(None, gt=0)
    """Input features that share a scale; the plan's own by default. If targets of --for hold
    other groups only, those are used, and a line says so."""
    embedding_bits: Formats[Literal[2, 3, 4, 8, 16] | None] = None
    """Bits of the embedding and the head: 2, 3, 4 or 8; 16 for floating point. By default the
    plan's rule for them, or what --bits-budget chooses; without either 4 beside linears of fewer,
    else 8 (or fewer, where the source has fewer), or floating point if scales are of low rank or a
    target of --for holds no quantized table. With --keep, of tables of other types than it keeps;
    without it these stay in floating point, as exact as in the file."""
    rotate: Formats[bool] = False
    """Rotate a float model before it is quantized, so that inputs of linears have fewer outliers;
    its function does not change. Without --to nothing is quantized."""
    keep: Formats[bool] = False
    """The source is a GGUF file whose weights are integers and one scale per block (Q1_0, Q2_0,
    TQ1_0, TQ2_0, Q4_0, Q5_0, Q8_0): the student has just these, and can be trained further."""
    snap: Formats[bool] = False
    """The source is a model whose float weights lie on a grid, as QAT in another program leaves
    them: the student has just that grid. Linears that lie on none stay in floating point."""
    base: Formats[str | None] = None
    """Float model to take weights from, where the source is already quantized."""
    calibration: Calibration[str | None] = None
    """Teacher cache or text file whose tokens are run through the model to measure layer inputs."""
    calibration_sequences: Calibration[int] = Field(256, gt=0)
    """Number of sequences to use, drawn at random from all."""
    calibration_seed: Calibration[int] = Field(0, ge=0)
    """Seed of the draw."""
    calibration_length: Calibration[int] = Field(256, gt=1)
    """Tokens per sequence of a text file (a cache has its own length)."""
    workers: Speed[int] = Field(0, ge=0)
    """Linears fitted in parallel without calibration; 0: one per core, or one on a GPU."""
    device: Speed[Device] = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    trust_remote_code: Speed[bool] = False
    """Run the code that comes with the model or its base (recorded in convert_report.json)."""

    @property
    def kept(self) -> str | None:
        """The setting, `keep` or `snap`, by which weights of the source stay; None without one."""
        return "keep" if self.keep else "snap" if self.snap else None

    @field_validator("embedding_bits", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        return int(value) if isinstance(value, str) and value.isdigit() else value


ALL_LINEARS = QuantPlan(name="all linears", rules=(PlanRule(pattern="*", spec=vectors(8, 4)),))
"""The plan of a budget without `--to`: all linears, as vectors."""
NOTHING = QuantPlan(name="none", rules=())
FLOAT = "float"
"""The value of `--to` that quantizes nothing: it writes a float source as a model directory."""


def split_kv(name: str) -> tuple[str, KvSpec | None]:
    """Split a preset's name into plan and KV format: `q2a4_kv4` is `q2a4` with a 4-bit cache."""
    found = re.fullmatch(r"(.+?)_?kv([48])", name)
    return (name, None) if found is None else (found[1], KvSpec(bits=int(found[2])))


def read_kv(config: ConvertConfig) -> KvSpec | None:
    """Return the format of keys and values; None to keep that of the source.

    Raises:
        ConfigError: `kv` and the name of the preset disagree.
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
    """Return the plan that `config.to` names, with the given group size and activations.

    Without `to`, the plan is `ALL_LINEARS` for a budget, else `NOTHING`.

    Raises:
        ConfigError: `to` is neither a preset nor a readable plan file, or activations are given
            twice.
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


def load_rotate() -> Callable:
    """Return the function that rotates a float model in place, and measures that.

    Raises:
        ConfigError: its extension is not installed.
    """
    return extension("qat.rotations", "rotate")


def check_asked(config: ConvertConfig) -> QuantPlan:
    """Check that settings name something to do and fit together; return their plan.

    Raises:
        ConfigError: nothing is named to do, or a setting lacks another one that it needs.
    """
    if config.kept:
        raise ConfigError(
            f"{config.kept} is given for a model that is to be changed, expected a model alone; "
            f"run 'qat convert MODEL --{config.kept}' first, and go on with its result"
        )
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
    if config.to == FLOAT and config.bits_budget is not None:
        raise ConfigError(
            f"bits_budget={config.bits_budget:g} is given with to={FLOAT}, which quantizes "
            "nothing, expected one of them; drop one"
        )
    if config.rotate:
        load_rotate()
    read_kv(config)
    if config.attention is not None:
        read_attention(config.attention)
    if config.bits_budget is not None and config.calibration is None:
        raise ConfigError(
            f"bits_budget={config.bits_budget:g} is given without a text to measure sensitivities "
            "on; add --calibration TEXT"
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
    if config.to == FLOAT:
        return NOTHING.model_copy(update={"name": FLOAT})
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
        plan = QuantPlan.parse(read_toml(path, f"to={path}", "a plan"), str(path))
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
