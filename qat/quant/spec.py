"""How one linear layer is quantized, and which layer gets which way."""

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, get_args

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from qat.config import Settings
from qat.errors import ConfigError

ActivationKind = Literal["int8", "int8-asymmetric", "int8-static", "fp8"]
ACTIVATION_KINDS: tuple[ActivationKind, ...] = get_args(ActivationKind)
CodebookKind = Literal["lut", "seq", "int", "ternary", "e2m1"]
Role = Literal["mlp", "attention", "other"]
SUFFIX_OF: dict[ActivationKind, str] = {
    "int8": "a8",
    "int8-asymmetric": "a8z",
    "int8-static": "a8s",
    "fp8": "f8",
}
"""What the name of a plan ends in, by how it quantizes inputs."""
ROLE_PARTS: dict[Role, str] = {
    "attention": r"attn|attention|conv|mamba|mixer|ssm|temporal|^[qkvo]_proj$|qkv|^query",
    "mlp": r"mlp|ffn|feed_?forward|expert|moe|^ff$|^fc(\d|_|$)|^w[123]$"
    r"|^(gate|up|down|gate_up)_proj$|^dense_.*h$",
}
"""What the parts of a decoder block are called across families, as patterns of one name."""


def role_of(name: str) -> Role:
    """What the linear called `name` is a part of: the first of its path's names that says so.

    `attention` is whatever mixes tokens: a convolution or a recurrence in its place too. `other`
    is what no known family calls so.
    """
    for part in name.split("."):
        for role, pattern in ROLE_PARTS.items():
            if re.search(pattern, part):
                return role
    return "other"


VECTOR_BITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
"""Bits of an index that names a vector: eight of them, or four, or two, fill whole bytes."""


MOST_FEATURES = 2**24
"""More features than any linear has: no count of them in a file is larger."""


class LutSpec(Settings):
    """One weight format: `W = codebook[indices] * S`.

    An index names one level, or a codeword of `vector_size` neighbouring input features of a row:
    `bits / vector_size` bits a weight. Of a trellis it is a window over the bits of its row.
    A `group` scale is shared by `group_size` consecutive input features of one row; a `low_rank`
    scale is `A diag(g) B` of rank `rank` (of the reference system and the Apple Neural Engine).
    """

    bits: int = Field(ge=1, le=12)
    """Bits per index; the codebook has `2**bits` entries (three when ternary, 15 when e2m1)."""
    vector_size: Literal[1, 2, 4, 8] = 1
    """Weights that an index names."""
    trellis_bits: Literal[0, 1, 2, 3, 4] = 0
    """Bits a weight of a trellis: an index is the last `bits` of its row's bits up to there, which
    are zeros before the row (QTIP, arXiv:2406.11235); 0: indices are stored whole."""
    codebook: CodebookKind = "lut"
    """lut: k-means levels that may learn; seq, int, ternary, e2m1: fixed grids."""
    scale: Literal["group", "low_rank"] = "group"
    """Form of the scale."""
    group_size: int = Field(default=32, gt=0, le=MOST_FEATURES)
    """Input features that share a scale; also where a low-rank fit starts from."""
    rank: int = Field(default=0, ge=0, le=MOST_FEATURES)
    """Rank of a low-rank scale; 0 with group scales."""
    scale_bits: Literal[32, 16, 8] = 16
    """Bits of a stored scale: a float32, a float16, or, of a group scale alone, its upper byte
    (5 exponent, 3 mantissa bits). 32 is for imported weights that float16 would change."""
    level_bits: Literal[32, 16, 8] = 32
    """Bits that a learned level is rounded to: a float32, or a float16 for programs that compute
    in one. A codebook of vectors or of a trellis, which is large, is of 16 or, if not given, of 8:
    multiples of 1/64 below 2."""

    @model_validator(mode="before")
    @classmethod
    def _short_codewords(cls, values: Any) -> Any:
        if isinstance(values, dict):
            is_large = values.get("vector_size", 1) != 1 or values.get("trellis_bits", 0) != 0
            return {"level_bits": 8} | values if is_large else values
        return values

    @model_serializer(mode="wrap")
    def _without_usual_size(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What has levels is written as it always was: older versions read it."""
        values: dict[str, Any] = write(self)
        if self.vector_size == 1:
            del values["vector_size"]
        if not self.is_trellis:
            del values["trellis_bits"]
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.is_vector:
            self._check_vectors()
        elif self.bits > 8:
            raise ValueError(
                f"bits={self.bits}, expected at most 8 of an index that names one weight; give "
                "vector_size=2, 4 or 8 too"
            )
        elif self.is_trellis:
            self._check_trellis()
        elif self.level_bits == 8:
            raise ValueError(
                "level_bits=8 is for codewords (vector_size=2, 4 or 8) and for a trellis "
                "(trellis_bits=1 to 4); give 16 or 32"
            )
        if self.codebook == "ternary" and self.bits != 2:
            raise ValueError(f"a ternary codebook is stored in bits=2, got bits={self.bits}")
        if self.codebook == "e2m1" and self.bits != 4:
            raise ValueError(f"an e2m1 codebook is stored in bits=4, got bits={self.bits}")
        if self.codebook == "int" and self.bits == 1:
            raise ValueError("codebook=int needs bits >= 2; use codebook=seq for one bit")
        if (self.scale == "low_rank") != (self.rank > 0):
            raise ValueError(f"scale={self.scale} does not go with rank={self.rank}")
        if self.scale == "low_rank" and self.scale_bits == 8:
            raise ValueError("scale=low_rank is stored in scale_bits=16 or 32, got scale_bits=8")
        return self

    def _check_vectors(self) -> None:
        d = self.vector_size
        if self.codebook != "lut":
            raise ValueError(f"codebook={self.codebook} has vector_size=1, got vector_size={d}")
        if self.bits not in VECTOR_BITS:
            raise ValueError(
                f"bits={self.bits}, expected one of {VECTOR_BITS} with vector_size={d}"
            )
        if self.group_size % d:
            raise ValueError(f"group_size={self.group_size} is no multiple of vector_size={d}")
        if self.level_bits == 32:
            raise ValueError(f"vector_size={d} needs level_bits=8 or 16, got level_bits=32")
        if self.is_trellis:
            raise ValueError(f"trellis_bits={self.trellis_bits} has vector_size=1, got {d}")

    def _check_trellis(self) -> None:
        k = self.trellis_bits
        if self.codebook != "lut":
            raise ValueError(f"codebook={self.codebook} has trellis_bits=0, got trellis_bits={k}")
        if self.bits < 2 * k:
            raise ValueError(f"trellis_bits={k} needs bits={2 * k} or more, got bits={self.bits}")
        if self.level_bits == 32:
            raise ValueError(f"trellis_bits={k} needs level_bits=8 or 16, got level_bits=32")

    @property
    def is_vector(self) -> bool:
        """Whether an index names several weights."""
        return self.vector_size > 1

    @property
    def is_trellis(self) -> bool:
        """Whether an index is a window over the bits of its row."""
        return self.trellis_bits > 0

    @property
    def has_codewords(self) -> bool:
        """Whether the codebook is `(C, d)`, in any order: of vectors, or a trellis's with d = 1."""
        return self.is_vector or self.is_trellis

    @property
    def num_levels(self) -> int:
        """Entries of the codebook: levels, or codewords."""
        return {"ternary": 3, "e2m1": 15}.get(self.codebook, 2**self.bits)

    @property
    def codebook_shape(self) -> tuple[int, ...]:
        """`(C,)` of levels, `(C, d)` of codewords."""
        return (self.num_levels, self.vector_size) if self.has_codewords else (self.num_levels,)

    @property
    def index_bits(self) -> float:
        """Bits of a weight's index alone, scales and codebook aside: an `int` where it is whole."""
        whole, rest = divmod(self.trellis_bits or self.bits, self.vector_size)
        return self.bits / self.vector_size if rest else whole

    def stored_bits(self, part: str) -> int:
        """Bits that a checkpoint stores a number of the weight's `part` in: codebook or scale."""
        if part == "codebook":
            return self.level_bits if self.has_codewords else 32
        return self.scale_bits

    def check_shape(self, name: str, out_features: int, in_features: int) -> None:
        """Refuse a layer whose rows do not split into whole groups, or that has not that rank.

        Raises:
            ConfigError: `group_size` or `vector_size` does not divide `in_features`, `rank` is
                above either size, or the codebook has more codewords than the weight has vectors.
        """
        vectors, left = divmod(out_features * in_features, self.vector_size)
        if self.is_vector and (left or in_features % self.vector_size):
            raise ConfigError(
                f"{name}: vector_size={self.vector_size} does not divide its {in_features} input "
                f"features; choose a vector_size that does, or levels (vector_size=1)"
            )
        if self.is_vector and self.num_levels > vectors:
            raise ConfigError(
                f"{name}: bits={self.bits} make {self.num_levels} codewords, more than the "
                f"{vectors} vectors of {self.vector_size} in its {out_features} x {in_features} "
                "weight; choose fewer bits"
            )
        if in_features % self.group_size:
            most = min(self.group_size, in_features)
            sizes = range(self.vector_size, most, self.vector_size)
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


class ActivationSpec(Settings):
    """How the inputs of one linear are quantized."""

    kind: ActivationKind
    """int8: a scale for each token, levels -127 ... 127; int8-asymmetric: a scale and a zero point
    for each token; int8-static: one learned scale for all; fp8: E4M3, a scale for each token."""
    scale_bits: Literal[32, 16] = 32
    """Bits that a static scale is rounded to: a float32, or a float16 for programs that compute in
    one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scale_bits != 32 and not self.is_static:
            raise ValueError(
                f"scale_bits={self.scale_bits} is for kind=int8-static, got kind={self.kind}; "
                "leave it out"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_usual_bits(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What has float32 scales is written as it always was: older versions read it."""
        values: dict[str, Any] = write(self)
        if self.scale_bits == 32:
            del values["scale_bits"]
        return values

    @property
    def is_static(self) -> bool:
        """Whether the scale is stored, and learns, in place of being measured at each token."""
        return self.kind == "int8-static"


STEP_BYTES = 4
"""Scale and zero of both halves of a head, in a cache of keys or values (`qat.quant.kv`)."""


class KvSpec(Settings):
    """How keys and values are kept."""

    bits: Literal[8, 4]
    """Of each number."""

    def head_bytes(self, width: int) -> int:
        """What the key or the value of one token takes in a head of `width` numbers."""
        return width * self.bits // 8 + STEP_BYTES

    def check_width(self, width: int) -> None:
        """Refuse heads that have no two equal halves.

        Raises:
            ConfigError: the width is odd.
        """
        if width % 2:
            raise ConfigError(
                f"kv=int{self.bits} keeps a head in two equal halves, and heads here have {width} "
                "numbers, expected an even width; leave --kv out"
            )


class PlanRule(Settings):
    """Module names that match `pattern` (a glob) get `spec`, or stay as they are without one.

    What they read is quantized by `activation`, or stays in floating point without one. With a
    `role` only linears that play it do (`role_of`), whatever their family calls them.
    """

    pattern: str = "*"
    role: Role | None = None
    spec: LutSpec | None = None
    activation: ActivationSpec | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role is None and "pattern" not in self.model_fields_set:
            raise ValueError("a rule needs a pattern or a role; add one")
        if self.activation is not None and self.spec is None:
            raise ValueError("activation is given without a spec; quantize the weight too")
        return self

    def catches(self, name: str, *, is_table: bool = False) -> bool:
        """Whether the pattern matches; a table only if it is its name or says `embed` or `head`."""
        if self.role is not None:
            is_of_role = not is_table and role_of(name) == self.role
            return is_of_role and fnmatchcase(name, self.pattern)
        is_meant = self.pattern == name or "embed" in self.pattern or "head" in self.pattern
        return fnmatchcase(name, self.pattern) and (is_meant or not is_table)


class QuantPlan(Settings):
    """Rules in order: the first whose pattern matches a module's name decides.

    A table (embedding or head) is matched only by a pattern that is its name or holds `embed` or
    `head`: what is written for linears, such as `*`, does not catch it by accident.
    """

    name: str
    rules: tuple[PlanRule, ...]

    def rule_for(self, module_name: str, *, is_table: bool = False) -> PlanRule | None:
        """The rule that decides about that module; None if no pattern matches."""
        rules = (rule for rule in self.rules if rule.catches(module_name, is_table=is_table))
        return next(rules, None)

    def spec_for(self, module_name: str, *, is_table: bool = False) -> LutSpec | None:
        """The spec of that module, or None if it stays in floating point."""
        rule = self.rule_for(module_name, is_table=is_table)
        return None if rule is None else rule.spec

    def activation_for(self, module_name: str, *, is_table: bool = False) -> ActivationSpec | None:
        """How that module's input is quantized; None if it stays in floating point."""
        rule = self.rule_for(module_name, is_table=is_table)
        return None if rule is None else rule.activation

    @property
    def activations(self) -> set[ActivationSpec | None]:
        """The ways in which inputs of what is quantized are; None is one of them."""
        return {rule.activation for rule in self.rules if rule.spec is not None}

    @property
    def has_static(self) -> bool:
        """Return whether some inputs have one learned scale, which a calibration finds."""
        return any(spec is not None and spec.is_static for spec in self.activations)

    def rules_for(
        self, specs: dict[str, LutSpec], table_names: Collection[str]
    ) -> tuple[PlanRule, ...]:
        """A rule for each module of `specs`: its spec, and the activation that this plan gives it.

        A table that the plan does not name gets that of all the plan's weights, if it is one.
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
        """The same plan with every input quantized in one way, under a name that says so."""
        change = {"activation": ActivationSpec(kind=kind)}
        rules = [r if r.spec is None else r.model_copy(update=change) for r in self.rules]
        name = f"{self.name}_{SUFFIX_OF[kind]}"
        return self.model_copy(update={"name": name, "rules": tuple(rules)})

    def with_short_scales(self) -> Self:
        """The same plan, its static scales of inputs rounded to float16."""
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
        """The modules to quantize and how: tables first, then linears.

        Raises:
            ConfigError: a pattern matches no module at all, or no role is played by any.
        """
        is_table = dict.fromkeys(table_names, True) | dict.fromkeys(module_names, False)
        idle = [
            rule
            for rule in self.rules
            if not any(rule.catches(name, is_table=kind) for name, kind in is_table.items())
        ]
        # a model may well have no linear of one role
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
    """What plays another role is few or unknown: it gets the format of the attention."""
    rules = (
        PlanRule(role="mlp", spec=mlp),
        PlanRule(role="attention", spec=attention),
        PlanRule(role="other", spec=attention),
    )
    return QuantPlan(name=name, rules=rules)


def by_group(bits: int, group_size: int = 16) -> LutSpec:
    """A learned codebook and a scale of 8 bits for each group.

    At equal size, groups of 16 with 8-bit scales are closer to the weight than groups of 32 with
    16-bit ones: speedrun/records/2026-11-21_quality.
    """
    return LutSpec(bits=bits, group_size=group_size, scale_bits=8)


def vectors(bits: int, vector_size: Literal[2, 4]) -> LutSpec:
    """Codewords and a scale of 8 bits for each group of 64: an eighth of a bit a weight.

    What more scales cost buys more as indices (speedrun/LOG.md, 2026-11-23).
    """
    return LutSpec(bits=bits, vector_size=vector_size, group_size=64, scale_bits=8)


def _low_rank(bits: int, rank: int) -> LutSpec:
    return LutSpec(bits=bits, scale="low_rank", rank=rank)


def _trellis() -> LutSpec:
    """2 bits a weight of a window of 8, and a scale of 8 bits for each group of 64."""
    return LutSpec(bits=8, trellis_bits=2, group_size=64, scale_bits=8)


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
        _preset("t2a4", _trellis(), by_group(4)),
        _preset("t2a2", _trellis(), _trellis()),
    )
}

SUFFIXES = re.compile(rf"(?P<plan>.+)_(?P<activation>{'|'.join(SUFFIX_OF.values())})")
"""The name of a preset with more than weights: `q2a4_a8`."""


def preset_called(name: str) -> QuantPlan | None:
    """The preset of that name, which may end in how inputs are quantized; None if there is none."""
    found = SUFFIXES.fullmatch(name)
    if found is None or name in PRESETS:
        return PRESETS.get(name)
    plan = PRESETS.get(found["plan"])
    kinds = {suffix: kind for kind, suffix in SUFFIX_OF.items()}
    return None if plan is None else plan.with_activation(kinds[found["activation"]])
