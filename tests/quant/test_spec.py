"""Formats, plans and presets: what fits together, and what is refused by which words."""

import copy
import json
import re

import pytest
import torch
from pydantic import ValidationError

from qat.errors import ConfigError
from qat.quant.codebook import fixed_grid
from qat.quant.spec import (
    PRESETS,
    SPARSE,
    LutSpec,
    PlanRule,
    QuantPlan,
    VectorSpec,
    preset_called,
    role_of,
)

NAMES = [f"layers.{i}.{part}" for i in (0, 1) for part in ("self_attn.q", "mlp.up", "mlp.down")]
TWO, FOUR = LutSpec(bits=2), LutSpec(bits=4)


def plan(*rules: tuple[str, LutSpec | None]) -> QuantPlan:
    return QuantPlan(name="p", rules=tuple(PlanRule(pattern=p, spec=s) for p, s in rules))


def test_formats_that_cannot_be() -> None:
    for values, message in [
        ({"bits": 0}, r"bits=0: .*greater than or equal to 1"),
        ({"bits": 9}, "bits=9, expected at most 8 of an index that names one weight"),
        ({"bits": 2, "group_size": 0}, r"group_size=0: .*greater than 0"),
        ({"bits": 2, "rank": -1}, r"rank=-1: "),
        ({"bits": 2, "codebook": "kmeans"}, r"codebook='kmeans': .*'lut', 'seq', 'int'"),
        ({"bits": 2, "scale": "row"}, r"scale='row': .*'group' or 'low_rank'"),
        ({"bits": 2, "grup_size": 8}, r"grup_size is unknown; did you mean .group_size."),
        ({}, r"bits: Field required"),
        ({"bits": 3, "codebook": "e2m1"}, "an e2m1 codebook is stored in bits=4, got bits=3"),
        ({"bits": 3, "codebook": "ternary"}, "ternary codebook is stored in bits=2, got bits=3"),
        ({"bits": 1, "codebook": "int"}, "codebook=int needs bits >= 2; use codebook=seq"),
        ({"bits": 2, "scale": "low_rank"}, "scale=low_rank does not go with rank=0"),
        ({"bits": 2, "rank": 4}, "scale=group does not go with rank=4"),
        ({"bits": 2, "scale_bits": 12}, r"scale_bits=12: Input should be 32, 16, 8 or 5$"),
        (
            {"bits": 2, "scale": "low_rank", "rank": 4, "scale_bits": 8},
            "scale=low_rank is stored in scale_bits=16 or 32, got scale_bits=8",
        ),
        ({"bits": 8, "vector_size": 3}, "vector_size=3: Input should be 1, 2, 4 or 8"),
        ({"bits": 9, "vector_size": 4}, r"bits=9, expected one of \(1, 2, .* 10, 12\) with vector"),
        ({"bits": 8, "vector_size": 4, "group_size": 6}, "group_size=6 is no multiple of vector_s"),
        ({"bits": 4, "vector_size": 2, "codebook": "int"}, "codebook=int of bits=4 has vector_s"),
        ({"bits": 8, "vector_size": 4, "codebook": "ternary"}, "ternary of 5 bits with vector_s"),
        ({"bits": 8, "vector_size": 4, "level_bits": 32}, "vector_size=4 needs level_bits=8 or 16"),
    ]:
        with pytest.raises(ConfigError, match="^here: .*" + message):
            LutSpec.parse(values, "here")


def test_fixed_grids() -> None:
    for spec, levels in [
        (LutSpec(bits=1, codebook="seq"), [-0.5, 0.5]),
        (LutSpec(bits=2, codebook="seq"), [-0.75, -0.25, 0.25, 0.75]),
        (LutSpec(bits=3, codebook="seq"), [(2 * c - 7) / 8 for c in range(8)]),
        (LutSpec(bits=2, codebook="int"), [-2, -1, 0, 1]),
        (LutSpec(bits=4, codebook="int"), list(range(-8, 8))),
        (LutSpec(bits=2, codebook="ternary"), [-1, 0, 1]),
        (
            LutSpec(bits=4, codebook="e2m1"),
            [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6],
        ),
    ]:
        grid = fixed_grid(spec)
        assert grid.dtype == torch.float32 and grid.tolist() == levels
        assert spec.num_levels == len(levels)
    sparse = fixed_grid(SPARSE)
    assert sparse.shape == SPARSE.codebook_shape == (32, 4) and len(sparse.unique(dim=0)) == 32
    assert ((sparse == 0).sum(1) == 1).all() and {*sparse.unique().tolist()} == {-1, 0, 1}
    assert fixed_grid(FOUR) is None and FOUR.num_levels == 16  # a learned one


def test_shapes_that_do_not_fit() -> None:
    LutSpec(bits=2, group_size=16).check_shape("up", 3, 48)
    with pytest.raises(ConfigError, match="up: group_size=32 does not divide its 48 input feat"):
        TWO.check_shape("up", 64, 48)
    fours = LutSpec(bits=8, vector_size=4, group_size=64)
    with pytest.raises(ConfigError, match="features; choose a divisor of 288, such as 48"):
        fours.check_shape("up", 64, 288)
    low_rank = LutSpec(bits=2, scale="low_rank", rank=8, group_size=4)
    low_rank.check_shape("k", 8, 64)
    for O, I in ((7, 64), (64, 4)):
        with pytest.raises(ConfigError, match=rf"k: rank=8 is more than its {O} x {I} weight has"):
            low_rank.check_shape("k", O, I)
    vectors = LutSpec(bits=6, vector_size=4, scale="low_rank", rank=1, group_size=4)
    vectors.check_shape("v", 8, 32)
    with pytest.raises(ConfigError, match="v: vector_size=4 does not divide its 30 input features"):
        vectors.check_shape("v", 8, 30)
    with pytest.raises(
        ConfigError, match="make 64 codewords, more than the 56 vectors of 4 in its"
    ):
        vectors.check_shape("v", 7, 32)


@pytest.mark.parametrize(
    ("bits", "size", "found"), [(8, 4, 2), (6, 2, 3), (10, 4, 2.5), (3, 8, 0.375)]
)
def test_bits_of_a_weight_where_an_index_names_several(bits: int, size: int, found: float) -> None:
    spec = LutSpec(bits=bits, vector_size=size)
    assert spec.index_bits == found and isinstance(spec.index_bits, type(found))
    assert spec.codebook_shape == (2**bits, size) and spec.stored_bits("codebook") == 8


def test_levels_are_written_as_before_there_were_vectors() -> None:
    assert "vector_size" not in TWO.model_dump() and LutSpec(**TWO.model_dump()) == TWO
    pairs = LutSpec(bits=6, vector_size=2)
    assert pairs.model_dump()["vector_size"] == 2 and LutSpec(**pairs.model_dump()) == pairs
    given = plan(("a", TWO), ("b", pairs))
    found = QuantPlan.parse(json.loads(given.model_dump_json()), "p")
    assert found == given and "vector_size" not in given.model_dump()["rules"][0]["spec"]
    assert [type(rule.spec) for rule in found.rules] == [LutSpec, VectorSpec]
    assert [type(copy.deepcopy(spec)) for spec in (TWO, pairs)] == [LutSpec, VectorSpec]


def test_first_match_decides() -> None:
    specs = plan(("layers.0.mlp.*", FOUR), ("*.mlp.*", TWO), ("*", None)).assign(NAMES)
    assert specs == {
        "layers.0.mlp.up": FOUR,
        "layers.0.mlp.down": FOUR,
        "layers.1.mlp.up": TWO,
        "layers.1.mlp.down": TWO,
    }
    assert plan(("*.up", TWO)).spec_for("layers.0.mlp.down") is None
    # a rule that earlier ones hide still matches
    assert plan(("*", TWO), ("*.mlp.*", FOUR)).assign(NAMES) == dict.fromkeys(NAMES, TWO)
    assert set(plan(("layers.[1].mlp.?p", TWO)).assign(NAMES)) == {"layers.1.mlp.up"}


@pytest.mark.parametrize("pattern", ["*.experts.*", "*.MLP.*"])
def test_a_pattern_that_matches_nothing(pattern: str) -> None:
    message = re.escape(f"plan p: pattern {pattern!r} matches none of the model's 6 linear layers")
    with pytest.raises(ConfigError, match=message):
        plan(("*.mlp.*", TWO), (pattern, FOUR)).assign(NAMES)


def test_presets() -> None:
    for name, mlp, attention in [
        ("q4a4", (4, 1, 16, 0), (4, 1, 16, 0)),
        ("q2a4", (2, 1, 16, 0), (4, 1, 16, 0)),
        ("q2a2", (2, 1, 16, 0), (2, 1, 16, 0)),
        ("q4a4_r4", (4, 1, None, 4), (4, 1, None, 4)),
        ("q4a4_r32", (4, 1, None, 32), (4, 1, None, 32)),
        ("q2a4_r32", (2, 1, None, 32), (4, 1, None, 8)),
        ("v2a4", (8, 4, 64, 0), (4, 1, 16, 0)),
        ("v2a2", (8, 4, 64, 0), (8, 4, 64, 0)),
        ("v3a3", (6, 2, 64, 0), (6, 2, 64, 0)),
    ]:
        preset = PRESETS[name]
        for module, expected in (("a.mlp.up_proj", mlp), ("a.self_attn.q_proj", attention)):
            spec = preset.spec_for(module)
            bits, size, group_size, rank = expected
            assert (spec.bits, spec.vector_size, spec.rank) == (bits, size, rank), name
            assert spec.scale == ("low_rank" if rank else "group") and spec.codebook == "lut", name
            assert rank or spec.group_size == group_size, name
        assert preset.spec_for("lm_head", is_table=True) is None and preset.name == name, name
    for name, bits, codebook, group_size in [("b1", 1, "seq", 128), ("ternary", 2, "ternary", 64)]:
        found = LutSpec(bits=bits, codebook=codebook, group_size=group_size, scale_bits=8)
        assert {rule.spec for rule in PRESETS[name].rules} == {found}
        assert preset_called(f"{name}_a8") == PRESETS[name].with_activation("int8")
    assert {rule.spec for rule in PRESETS["sherry"].rules} == {SPARSE}
    assert SPARSE.bits / SPARSE.vector_size == 1.25 and len(PRESETS) == 12
    assert all(PRESETS[name].spec_for("a.mlp.up_proj").scale_bits == 8 for name in ("v2a4", "v3a3"))


def test_roles_across_families() -> None:
    for name, role in [
        ("model.layers.0.mlp.gate_proj", "mlp"),
        ("model.layers.0.self_attn.o_proj", "attention"),
        ("gpt_neox.layers.0.attention.dense", "attention"),
        ("gpt_neox.layers.0.mlp.dense_4h_to_h", "mlp"),
        ("model.decoder.layers.0.self_attn.out_proj", "attention"),
        ("model.decoder.layers.0.fc1", "mlp"),
        ("transformer.h.0.self_attention.query_key_value", "attention"),
        ("transformer.h.0.attn.q_proj", "attention"),
        ("transformer.h.0.mlp.fc_in", "mlp"),
        ("model.layers.0.conv.in_proj", "attention"),
        ("model.layers.0.feed_forward.w1", "mlp"),
        ("backbone.layers.0.mixer.in_proj", "attention"),
        ("layers.0.c_fc", "other"),
    ]:
        assert role_of(name) == role


def test_a_role_may_be_played_by_none_but_not_every_role() -> None:
    names = ["h.0.attn.q_proj", "h.0.odd"]
    specs = PRESETS["q2a4"].assign(names)
    assert {name: spec.bits for name, spec in specs.items()} == dict.fromkeys(names, 4)
    only = QuantPlan(name="p", rules=(PlanRule(role="mlp", spec=TWO),))
    with pytest.raises(ConfigError, match=r"of role mlp matches none of the model's 2 linear"):
        only.assign(names)


def test_a_rule_needs_a_pattern_or_a_role() -> None:
    with pytest.raises(ValidationError, match="a rule needs a pattern or a role"):
        PlanRule(spec=TWO)
    rule = PlanRule(role="mlp", pattern="*.0.*", spec=TWO)
    assert rule.catches("h.0.mlp.up") and not rule.catches("h.1.mlp.up")
    assert not rule.catches("h.0.mlp.up", is_table=True)


def test_a_group_of_any_size_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="group_size=10+:"):
        LutSpec.parse({"bits": 2, "group_size": 10**18}, "recipe.toml")
    with pytest.raises(ConfigError, match="group_size=16777216 .* such as 64"):
        LutSpec(bits=2, group_size=2**24).check_shape("it", 64, 64)
