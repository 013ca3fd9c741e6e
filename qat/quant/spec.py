"""Specification of how one linear layer is quantized, and rules that assign it to layers."""

import re
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, SerializeAsAny, model_serializer, model_validator

from qat.config import Settings
from qat.errors import ConfigError

ActivationKind = Literal["int8", "int8-asymmetric", "int8-static", "fp8"]
ACTIVATION_KINDS: tuple[ActivationKind, ...] = get_args(ActivationKind)
CodebookKind = Literal["lut", "seq", "int", "ternary", "e2m1"]
Role = Literal["mlp", "attention", "other"]
SUFFIX_OF: dict[ActivationKind, str] = {  # of a plan's name for each way to quantize inputs
    "int8": "a8",
    "int8-asymmetric": "a8z",
    "int8-static": "a8s",
    "fp8": "f8",
}
ROLE_PARTS: dict[Role, str] = {  # the names that parts of a decoder block have across families
    "attention": r"attn|attention|conv|mamba|mixer|ssm|temporal|^[qkvo]_proj$|qkv|^query",
    "mlp": r"mlp|ffn|feed_?forward|expert|moe|^ff$|^fc(\d|_|$)|^w[123]$"
    r"|^(gate|up|down|gate_up)_proj$|^dense_.*h$",
}


def role_of(name: str) -> Role:
    """Return the role of the linear called `name`, from the first part of its path that matches.

    `attention` is any part that mixes tokens, so it includes a convolution or a recurrence in its
    place. `other` is a name that no known family uses for either.
    """
    for part in name.split("."):
        for role, pattern in ROLE_PARTS.items():
            if re.search(pattern, part):
                return role
    return "other"


def name_in_layer(name: str) -> str:
    """Return the part of a module's name that all layers share: `self_attn.q_proj`."""
    return re.sub(r"^.*\.\d+\.", "", name)


VectorSize = Literal[2, 4, 8]
VECTOR_BITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)  # 2, 4 or 8 fill whole bytes


MOST_FEATURES = 2**24  # limit on feature counts that a file may hold; no linear has as many


class LutSpec(Settings):
    """The format of one weight: `W = codebook[indices] * S`.

    An index names one level. With a `vector_size` the format is a `VectorSpec`, which overrides
    what differs. A `group` scale is shared by `group_size` consecutive input features of one row; a
    `low_rank` scale is `A diag(g) B` of rank `rank` (as in the reference system, for the Apple
    Neural Engine).
    """

    bits: int = Field(ge=1, le=12)
    """Bits per index; the codebook has `2**bits` entries (three when ternary, 15 when e2m1)."""
    vector_size: Literal[1, 2, 4, 8] = Field(default=1, exclude=True)
    """Weights per index; files of levels leave it out, so that older versions read them."""
    table_rows: int = Field(default=0, exclude=True)
    """Rows that share a codebook, or 0 if all do; files of one codebook leave it out."""
    codebook: CodebookKind = "lut"
    """lut: k-means levels that may learn; seq, int, ternary, e2m1: fixed grids. Of vectors: lut, or
    ternary with three of four weights that are not zero."""
    scale: Literal["group", "low_rank"] = "group"  # form of the scale
    group_size: int = Field(default=32, gt=0, le=MOST_FEATURES)
    """Input features that share a scale; with a low-rank scale, the groups that its fit starts
    from."""
    rank: int = Field(default=0, ge=0, le=MOST_FEATURES)  # of a low-rank scale; 0 with group scales
    scale_bits: Literal[32, 16, 8, 5] = 16
    """Bits of a stored scale: a float32, a float16, or, for group scales only, the upper byte of a
    float16 (5 exponent, 3 mantissa bits), or that byte without its mantissa, a power of two as MX
    formats have. 32 is for imported weights that float16 would change."""
    level_bits: Literal[32, 16, 8] = 32
    """Bits of a learned level: those of float32, or of float16 for programs that compute in it."""
    letter: ClassVar[str] = "q"  # the first letter of a run's name, before the bits
    budget_forms: ClassVar[tuple[tuple[int, int], ...]] = ((2, 1), (3, 1), (4, 1))
    """Bits per index and weights per index that a budget tries: 2, 3 and 4 bits per weight."""
    rows_share_codebook: ClassVar[bool] = False
    """True if all rows of a sweep share one codebook, so a sweep takes one weight at a time."""

    def __new__(cls, **values: Any) -> "LutSpec":
        """Make a `VectorSpec` or `TableSpec` if the values have its sizes: files need no name."""
        return super().__new__(cls._kind(values))

    @classmethod
    def _kind(cls, values: dict[str, Any]) -> type["LutSpec"]:
        if values.get("table_rows"):
            return TableSpec
        return VectorSpec if values.get("vector_size") in get_args(VectorSize) else cls

    @model_validator(mode="wrap")
    @classmethod
    def _of_kind(cls, values: Any, validate: Callable[[Any], "LutSpec"]) -> "LutSpec":
        if isinstance(values, dict):
            kind = cls._kind(values)
            validate = validate if kind is cls else kind.model_validate
        return validate(values)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_index()
        if self.codebook == "e2m1" and self.bits != 4:
            raise ValueError(f"an e2m1 codebook is stored in bits=4, got bits={self.bits}")
        if self.codebook == "int" and self.bits == 1:
            raise ValueError("codebook=int needs bits >= 2; use codebook=seq for one bit")
        if (self.scale == "low_rank") != (self.rank > 0):
            raise ValueError(f"scale={self.scale} does not go with rank={self.rank}")
        if self.scale == "low_rank" and self.scale_bits < 16:
            raise ValueError(
                f"scale=low_rank is stored in scale_bits=16 or 32, got scale_bits={self.scale_bits}"
            )
        return self

    def _check_index(self) -> None:
        if self.codebook == "ternary" and self.bits != 2:
            raise ValueError(f"a ternary codebook is stored in bits=2, got bits={self.bits}")
        if self.bits > 8:
            raise ValueError(
                f"bits={self.bits}, expected at most 8 of an index that names one weight; give "
                "vector_size=2, 4 or 8 too"
            )
        if self.level_bits == 8:
            raise ValueError("level_bits=8 is for codewords (vector_size=2, 4 or 8); give 16 or 32")

    @property
    def num_levels(self) -> int:
        """Entries of the codebook: levels or codewords."""
        return {"ternary": 3, "e2m1": 15}.get(self.codebook, 2**self.bits)

    @property
    def codebook_shape(self) -> tuple[int, ...]:
        """`(C,)` for levels, `(C, d)` for codewords."""
        return (self.num_levels,)

    @property
    def lost_as_levels(self) -> str | None:
        """Why one stored index per weight cannot hold that weight; None if it can."""
        return None

    @property
    def of_one_table(self) -> "LutSpec":
        """The format of rows that share a codebook."""
        return self

    @property
    def as_levels(self) -> "LutSpec":
        """The format of the same weight with one index per weight, if it has one; else this."""
        return self

    @property
    def index_bits(self) -> float:
        """Bits per weight of the indices alone, without scales and codebook; an `int` if whole."""
        whole, rest = divmod(self.bits, self.vector_size)
        return self.bits / self.vector_size if rest else whole

    def described(self) -> str:
        """Return the format for `print(model)`: `bits=2, codebook=lut, group_size=16, ...`."""
        scale = {"rank"} if self.scale == "low_rank" else {"group_size", "scale_bits"}
        values = self.model_dump(include={"bits", "vector_size", "table_rows", "codebook", *scale})
        return ", ".join(f"{name}={value}" for name, value in values.items())

    def described_codebook(self) -> str:
        """Return the codebook for a model card."""
        return self.codebook

    def stored_bits(self, part: str) -> int:
        """Return the bits of each stored number of a weight's `part`: the codebook or a scale."""
        return 32 if part == "codebook" else self.scale_bits

    def check_shape(self, name: str, out_features: int, in_features: int) -> None:
        """Refuse a layer whose rows do not split into whole groups, or that is too small.

        Raises:
            ConfigError: `group_size` does not divide `in_features`, or `rank` is above either size.
        """
        if in_features % self.group_size:
            most = min(self.group_size, in_features)
            sizes = range(self.vector_size, most + 1, self.vector_size)
            fitting = [size for size in sizes if in_features % size == 0]
            nearest = f", such as {fitting[-1]}" if fitting else ""
            raise ConfigError(
                f"{name}: group_size={self.group_size} does not divide its {in_features} input "
                f"features; choose a divisor of {in_features}{nearest}"
            )
        if self.rank > min(out_features, in_features):
            raise ConfigError(
                f"{name}: rank={self.rank} is more than its {out_features} x {in_features} weight "
                f"has; choose a rank of at most {min(out_features, in_features)}"
            )


class VectorSpec(LutSpec):
    """A format whose index names a codeword: `vector_size` neighbouring weights of a row."""

    vector_size: VectorSize
    level_bits: Literal[32, 16, 8] = 8
    """A codebook of vectors is large: it has 16 bits, or 8 (multiples of 1/64 below 2)."""
    letter = "v"
    budget_forms = ((8, 4), (6, 2), (8, 2))
    rows_share_codebook = True

    def _check_index(self) -> None:
        d = self.vector_size
        is_sparse = (self.codebook, self.bits, d) == ("ternary", 5, 4)
        if self.codebook != "lut" and not is_sparse:
            raise ValueError(
                f"codebook={self.codebook} of bits={self.bits} has vector_size=1, got "
                f"vector_size={d}; vectors have lut, or ternary of 5 bits with vector_size=4"
            )
        if self.bits not in VECTOR_BITS:
            raise ValueError(
                f"bits={self.bits}, expected one of {VECTOR_BITS} with vector_size={d}"
            )
        if self.group_size % d:
            raise ValueError(f"group_size={self.group_size} is no multiple of vector_size={d}")
        if self.level_bits == 32:
            raise ValueError(f"vector_size={d} needs level_bits=8 or 16, got level_bits=32")

    @property
    def num_levels(self) -> int:
        """See `LutSpec`."""
        return 2**self.bits

    @property
    def codebook_shape(self) -> tuple[int, ...]:
        """See `LutSpec`."""
        return (self.num_levels, self.vector_size)

    def stored_bits(self, part: str) -> int:
        """See `LutSpec`."""
        return self.level_bits if part == "codebook" else self.scale_bits

    @property
    def lost_as_levels(self) -> str | None:
        """See `LutSpec`."""
        return f"an index names {self.vector_size} weights, expected one"

    @property
    def as_levels(self) -> LutSpec:
        """See `LutSpec`; only codewords of -1, 0 and 1 have so few levels."""
        parts = self.model_dump(include={"codebook", "scale", "group_size", "rank", "scale_bits"})
        return LutSpec(bits=2, **parts) if self.codebook == "ternary" else self

    def described_codebook(self) -> str:
        """See `LutSpec`."""
        return f"{self.codebook}, {self.num_levels} codewords of {self.vector_size} weights"

    def check_shape(self, name: str, out_features: int, in_features: int) -> None:
        """See `LutSpec`; vectors must fill the rows too, and be as many as the codewords."""
        vectors, left = divmod(out_features * in_features, self.vector_size)
        if left or in_features % self.vector_size:
            raise ConfigError(
                f"{name}: vector_size={self.vector_size} does not divide its {in_features} input "
                f"features; choose a vector_size that does, or levels (vector_size=1)"
            )
        if self.num_levels > vectors:
            raise ConfigError(
                f"{name}: bits={self.bits} make {self.num_levels} codewords, more than the "
                f"{vectors} vectors of {self.vector_size} in its {out_features} x {in_features} "
                "weight; choose fewer bits"
            )
        super().check_shape(name, out_features, in_features)


class TableSpec(LutSpec):
    """A format of levels with a codebook of its own for each `table_rows` rows.

    The Neural Engine looks such weights up as they are. It has no scales within a row: there
    `group_size` is that of the whole row, a factor of the output.
    """

    table_rows: Literal[8, 16, 32]
    vector_size: Literal[1] = Field(default=1, exclude=True)
    level_bits: Literal[32, 16, 8] = 16

    def _check_index(self) -> None:
        if (self.codebook, self.scale, self.level_bits) != ("lut", "group", 16):
            raise ValueError(
                f"table_rows={self.table_rows} needs codebook=lut, scale=group and level_bits=16, "
                f"got {self.codebook}, {self.scale} and {self.level_bits}"
            )
        super()._check_index()

    def stored_bits(self, part: str) -> int:
        """See `LutSpec`."""
        return self.level_bits if part == "codebook" else self.scale_bits

    @property
    def lost_as_levels(self) -> str | None:
        """See `LutSpec`."""
        return f"it has a codebook for each {self.table_rows} rows, expected one"

    @property
    def of_one_table(self) -> LutSpec:
        """See `LutSpec`."""
        return LutSpec(**self.model_dump(exclude={"table_rows"}))

    def described_codebook(self) -> str:
        """See `LutSpec`."""
        return f"{self.codebook}, one for each {self.table_rows} rows"

    def check_shape(self, name: str, out_features: int, in_features: int) -> None:
        """See `LutSpec`; the codebooks must fill the rows too."""
        if out_features % self.table_rows:
            raise ConfigError(
                f"{name}: table_rows={self.table_rows} does not divide its {out_features} rows; "
                "choose 8, 16 or 32 that does, or leave table_rows out"
            )
        super().check_shape(name, out_features, in_features)


class ActivationSpec(Settings):
    """The quantization of the inputs of one linear."""

    kind: ActivationKind
    """int8: a scale for each token, levels -127 ... 127; int8-asymmetric: a scale and a zero point
    for each token; int8-static: one learned scale for all; fp8: E4M3, a scale for each token."""
    scale_bits: Literal[32, 16] = 32
    """Bits that a static scale is rounded to: float32, or float16 for programs that compute in
    it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scale_bits != 32 and not self.is_static:
            raise ValueError(
                f"scale_bits={self.scale_bits} is for kind=int8-static, got kind={self.kind}; "
                "leave it out"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_usual_bits(self, write: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        """Leave out `scale_bits` of float32, so that older versions read the result."""
        values = write(self)
        if self.scale_bits == 32:
            del values["scale_bits"]
        return values

    @property
    def is_static(self) -> bool:
        """True if the scale is stored and learned instead of measured on each token."""
        return self.kind == "int8-static"


STEP_BYTES = 4  # scale and zero of both halves of a head, in a cache (`qat.quant.kv`)


class KvSpec(Settings):
    """The quantization of keys and values in the cache."""

    bits: Literal[8, 4]  # bits per number

    def head_bytes(self, width: int) -> int:
        """Return the bytes of one token's key or value in a head of `width` numbers."""
        return width * self.bits // 8 + STEP_BYTES

    def check_width(self, width: int) -> None:
        """Refuse heads that do not split into two equal halves.

        Raises:
            ConfigError: the width is odd.
        """
        if width % 2:
            raise ConfigError(
                f"kv=int{self.bits} keeps a head in two equal halves, and heads here have {width} "
                "numbers, expected an even width; leave --kv out"
            )


class PlanRule(Settings):
    """A rule for modules whose names match `pattern` (a glob): they get `spec`, or stay float.

    The inputs of these modules are quantized by `activation`, or stay in floating point without
    one. With a `role` the rule only applies to linears of that role (`role_of`), whatever their
    family names them.
    """

    pattern: str = "*"
    role: Role | None = None
    spec: SerializeAsAny[LutSpec] | None = None
    activation: ActivationSpec | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role is None and "pattern" not in self.model_fields_set:
            raise ValueError("a rule needs a pattern or a role; add one")
        if self.activation is not None and self.spec is None:
            raise ValueError("activation is given without a spec; quantize the weight too")
        return self

    def catches(self, name: str, *, is_table: bool = False) -> bool:
        """Return whether the rule applies to `name`.

        A rule with a role applies to no table. A pattern applies to a table only if it is the
        table's name or contains `embed` or `head`.
        """
        if self.role is not None:
            is_of_role = not is_table and role_of(name) == self.role
            return is_of_role and fnmatchcase(name, self.pattern)
        is_meant = self.pattern == name or "embed" in self.pattern or "head" in self.pattern
        return fnmatchcase(name, self.pattern) and (is_meant or not is_table)


class QuantPlan(Settings):
    """Ordered rules: the first whose pattern matches a module's name decides.

    A table (embedding or head) only matches a pattern that is its name or contains `embed` or
    `head`, so that patterns meant for linears, such as `*`, do not match it by accident.
    """

    name: str
    rules: tuple[PlanRule, ...]

    def rule_for(self, module_name: str, *, is_table: bool = False) -> PlanRule | None:
        """Return the rule that decides about that module; None if no pattern matches."""
        rules = (rule for rule in self.rules if rule.catches(module_name, is_table=is_table))
        return next(rules, None)

    def spec_for(self, module_name: str, *, is_table: bool = False) -> LutSpec | None:
        """Return the spec of that module, or None if it stays in floating point."""
        rule = self.rule_for(module_name, is_table=is_table)
        return None if rule is None else rule.spec

    def activation_for(self, module_name: str, *, is_table: bool = False) -> ActivationSpec | None:
        """Return how that module's input is quantized; None if it stays in floating point."""
        rule = self.rule_for(module_name, is_table=is_table)
        return None if rule is None else rule.activation

    @property
    def activations(self) -> set[ActivationSpec | None]:
        """The specs of the inputs of quantized modules; None stands for floating point."""
        return {rule.activation for rule in self.rules if rule.spec is not None}

    @property
    def has_static(self) -> bool:
        """True if some inputs have one learned scale, which needs calibration."""
        return any(spec is not None and spec.is_static for spec in self.activations)

    def rules_for(
        self, specs: dict[str, LutSpec], table_names: Collection[str]
    ) -> tuple[PlanRule, ...]:
        """Return one rule per module of `specs`, with its spec and its activation in this plan.

        A module that matches no rule gets the plan's activation if all weights of the plan share
        one.
        """
        common = self.activations
        usual = common.pop() if len(common) == 1 else None
        found = {name: self.rule_for(name, is_table=name in table_names) for name in specs}
        activations = {n: usual if rule is None else rule.activation for n, rule in found.items()}
        return tuple(
            PlanRule(pattern=name, spec=spec, activation=activations[name])
            for name, spec in specs.items()
        )

    def with_activation(self, kind: ActivationKind) -> Self:
        """Return this plan with every input quantized by `kind`, whose suffix joins the name."""
        change = {"activation": ActivationSpec(kind=kind)}
        rules = [r if r.spec is None else r.model_copy(update=change) for r in self.rules]
        name = f"{self.name}_{SUFFIX_OF[kind]}"
        return self.model_copy(update={"name": name, "rules": tuple(rules)})

    def with_short_scales(self) -> Self:
        """Return this plan with the static scales of inputs rounded to float16."""
        change = {"scale_bits": 16}
        rules = [
            r.model_copy(update={"activation": r.activation.model_copy(update=change)})
            if r.activation is not None and r.activation.is_static
            else r
            for r in self.rules
        ]
        return self.model_copy(update={"rules": tuple(rules)})

    def assign(
        self, module_names: list[str], table_names: Collection[str] = ()
    ) -> dict[str, LutSpec]:
        """Return the spec of each module to quantize: tables first, then linears.

        Raises:
            ConfigError: a pattern matches no module, or no linear has any of the roles.
        """
        is_table = dict.fromkeys(table_names, True) | dict.fromkeys(module_names, False)
        idle = [
            rule
            for rule in self.rules
            if not any(rule.catches(name, is_table=kind) for name, kind in is_table.items())
        ]
        # a model may have no linear of one role, so that alone is no error
        faulty = [rule for rule in idle if rule.role is None or len(idle) == len(self.rules)]
        if faulty:
            what = f"pattern {faulty[0].pattern!r}"
            what += f" of role {faulty[0].role}" if faulty[0].role else ""
            raise ConfigError(
                f"plan {self.name}: {what} matches none of the model's "
                f"{len(module_names)} linear layers (such as {module_names[0]!r}); mend the "
                "pattern"
            )
        specs = {name: self.spec_for(name, is_table=kind) for name, kind in is_table.items()}
        return {name: spec for name, spec in specs.items() if spec is not None}


def _preset(name: str, mlp: LutSpec, attention: LutSpec) -> QuantPlan:
    """Return a plan by role; other roles are few or unknown and get the format of the attention."""
    rules = (
        PlanRule(role="mlp", spec=mlp),
        PlanRule(role="attention", spec=attention),
        PlanRule(role="other", spec=attention),
    )
    return QuantPlan(name=name, rules=rules)


def by_group(bits: int, group_size: int = 16) -> LutSpec:
    """Return the format with a learned codebook and an 8-bit scale for each group.

    At equal size, groups of 16 with 8-bit scales are closer to the weight than groups of 32 with
    16-bit scales: speedrun/records/2026-11-21_quality.
    """
    return LutSpec(bits=bits, group_size=group_size, scale_bits=8)


def vectors(bits: int, vector_size: Literal[2, 4]) -> LutSpec:
    """Return the format with codewords and an 8-bit scale per group of 64: 1/8 bit per weight.

    Bits spent on more scales are better spent on indices (speedrun/LOG.md, 2026-11-23).
    """
    return VectorSpec(bits=bits, vector_size=vector_size, group_size=64, scale_bits=8)


SPARSE = VectorSpec(bits=5, vector_size=4, codebook="ternary", group_size=64, scale_bits=8)
"""Sherry's format: of four weights three are -1 or 1 and one is 0, in 1.25 bits per weight."""
BINARY = LutSpec(bits=1, codebook="seq", group_size=128, scale_bits=8)
TERNARY = LutSpec(bits=2, codebook="ternary", group_size=64, scale_bits=8)
"""The formats of llama.cpp's Q1_0 and Q2_0.

A scale of 8 bits adds 0.0005 to the 0.36 and 0.18 of a weight's energy that rounding to one bit or
three levels costs, and as a float16 of the file every fraction of it is exact.
"""


def _low_rank(bits: int, rank: int) -> LutSpec:
    return LutSpec(bits=bits, scale="low_rank", rank=rank)


PRESETS = {
    plan.name: plan
    for plan in (
        _preset("q4a4", by_group(4), by_group(4)),
        _preset("q2a4", by_group(2), by_group(4)),
        _preset("q2a2", by_group(2), by_group(2)),
        _preset("q4a4_r4", _low_rank(4, 4), _low_rank(4, 4)),
        _preset("q4a4_r32", _low_rank(4, 32), _low_rank(4, 32)),
        _preset("q2a4_r32", _low_rank(2, 32), _low_rank(4, 8)),
        _preset("v2a4", vectors(8, 4), by_group(4)),
        _preset("v2a2", vectors(8, 4), vectors(8, 4)),
        _preset("v3a3", vectors(6, 2), vectors(6, 2)),
        _preset("ternary", TERNARY, TERNARY),
        _preset("sherry", SPARSE, SPARSE),
        _preset("b1", BINARY, BINARY),
    )
}

SUFFIXES = re.compile(rf"(?P<plan>.+)_(?P<activation>{'|'.join(SUFFIX_OF.values())})")
"""A preset's name with a suffix for activations: `q2a4_a8`."""


def preset_called(name: str) -> QuantPlan | None:
    """Return the preset called `name`, which may have a suffix for activations; None if unknown."""
    found = SUFFIXES.fullmatch(name)
    if found is None or name in PRESETS:
        return PRESETS.get(name)
    plan = PRESETS.get(found["plan"])
    kinds = {suffix: kind for kind, suffix in SUFFIX_OF.items()}
    return None if plan is None else plan.with_activation(kinds[found["activation"]])
