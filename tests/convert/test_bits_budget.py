"""A budget of bits, spent where it buys the most."""

import math
from pathlib import Path

import pytest
import torch
from test_sensitivity import tokens
from tiny import tiny_model

from qat.convert.bits_budget import BudgetReport, Room, formats_to_try, plan_within_budget
from qat.convert.quantize import quantize_model
from qat.errors import ConfigError, ExportError
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.export.targets import shipping_to
from qat.models.checkpoint import save_checkpoint
from qat.models.cost import bits_per_weight, linear_bits, whole_model_bits
from qat.models.language_model import LanguageModel
from qat.nn.lut_embedding import quant_tables
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import linear_names, table_names, table_spec, weight_shape
from qat.quant.spec import LutSpec, PlanRule, QuantPlan

pytestmark = pytest.mark.usefixtures("short_fits")

EIGHTS = LutSpec(bits=2, group_size=8)
FOURS = LutSpec(bits=8, vector_size=4, group_size=16, scale_bits=8)
SEVENS = LutSpec(bits=7, vector_size=4, group_size=16, scale_bits=8)
WIDE = LutSpec(bits=8, vector_size=4, group_size=48, scale_bits=8)
ALL = QuantPlan(name="all", rules=(PlanRule(pattern="*", spec=EIGHTS),))
MLP = QuantPlan(name="mlp", rules=(PlanRule(pattern="*.mlp.*", spec=EIGHTS),))


def student(**overrides: object) -> LanguageModel:
    return LanguageModel(tiny_model(initializer_range=0.2, **overrides))


def chosen(report: BudgetReport) -> dict[str, tuple[int, int]]:
    return {
        name: next((t.bits, t.group_size) for t in trials if t.is_chosen)
        for name, trials in report.modules.items()
    }


SHORT = EIGHTS.model_copy(update={"scale_bits": 8})
TWO_KINDS = (PlanRule(pattern="*.down_proj", spec=FOURS), PlanRule(pattern="*.o_proj", spec=EIGHTS))


def test_a_budget_tries_the_form_of_the_plan_too() -> None:
    rules = tuple(
        PlanRule(pattern=f"*.{name}", spec=spec)
        for name, spec in (("down_proj", SEVENS), ("o_proj", EIGHTS))
    )
    found = formats_to_try(student().model, QuantPlan(name="p", rules=rules), 6.0).formats
    for name, specs in found.items():
        forms = [(spec.bits, spec.vector_size) for spec in specs]
        sevens = [(8, 4), (6, 2), (8, 2), (7, 4)]
        assert forms == (sevens if "down_proj" in name else [(2, 1), (3, 1), (4, 1)])


@pytest.mark.parametrize(
    ("rules", "budget", "least"),
    [
        (ALL.rules, 5.6, 5.3),
        ((PlanRule(pattern="*", spec=SHORT),), 4.6, 4.3),  # with scales of 16 bits out of reach
        (TWO_KINDS, 5.5, 0.0),
    ],
)
def test_the_budget_is_met_and_the_plan_is_what_the_report_says(
    rules: tuple[PlanRule, ...], budget: float, least: float
) -> None:
    model, wished = student(num_hidden_layers=1), QuantPlan(name="p", rules=rules)
    plan, report = plan_within_budget(model, wished, budget, tokens(6))
    assert report.bits_budget == budget and plan.name == f"mixed-{budget}-of-linears"
    quantize_model(model, plan)
    linears = quant_linears(model.model)
    assert report.modules.keys() == linears.keys()
    assert linear_bits(model.model) == pytest.approx(report.bits_per_weight)
    assert least < report.bits_per_weight <= budget
    predicted = 0.0
    for name, trials in report.modules.items():
        spec = linears[name].spec
        assert [t.bits for t in trials] == [2, 3, 4]
        (mine,) = (t for t in trials if t.is_chosen)
        found = mine.bits, mine.vector_size, mine.group_size
        assert found == (spec.index_bits, spec.vector_size, spec.group_size)
        assert spec.scale_bits == wished.spec_for(name).scale_bits
        assert mine.bits_per_weight == bits_per_weight(linears[name])
        predicted += mine.kl_nats
    assert report.predicted_kl_nats == pytest.approx(predicted)


def test_bits_go_where_they_count() -> None:
    model = student()
    with torch.no_grad():  # what layer 1's MLP adds is lost
        model.model.get_submodule("model.layers.1.mlp.down_proj").weight.mul_(1e-4)
    _, report = plan_within_budget(model, ALL, 5.6, tokens(6))
    bits = {name: pair[0] for name, pair in chosen(report).items()}
    assert all(b == 2 for name, b in bits.items() if "layers.1.mlp" in name)
    assert max(bits.values()) > 2


def test_the_plan_says_which_linears_and_in_which_groups() -> None:
    spec = LutSpec(bits=4, group_size=16, codebook="int")
    plan = QuantPlan(name="mlp", rules=(PlanRule(pattern="*.mlp.*", spec=spec),))
    found, report = plan_within_budget(student(num_hidden_layers=1), plan, 4.0, tokens(6))
    assert all(".mlp." in name for name in report.modules) and len(report.modules) == 3
    assert all(r.spec.group_size == 16 and r.spec.codebook == "lut" for r in found.rules)


OF_VECTORS = QuantPlan(
    name="v", rules=(PlanRule(role="mlp", spec=FOURS), PlanRule(role="attention", spec=EIGHTS))
)


def test_vectors_are_tried_where_the_plan_has_vectors() -> None:
    model = student(num_hidden_layers=1)
    _, formats, bits, *_ = formats_to_try(model.model, OF_VECTORS, 6.0)
    for name, specs in formats.items():
        forms = [(s.bits, s.vector_size, s.group_size, s.scale_bits) for s in specs]
        if ".mlp." in name:
            assert forms == [(8, 4, 16, 8), (6, 2, 16, 8), (8, 2, 16, 8)]
            indices, scales = (2048 * s.index_bits for s in specs), 8 * 2048 // 16
            books = (8 * 256 * 4, 8 * 64 * 2, 8 * 256 * 2)
            found = [i + scales + book for i, book in zip(indices, books, strict=True)]
            assert bits[name] == found
        else:
            assert forms == [(2, 1, 8, 16), (3, 1, 8, 16), (4, 1, 8, 16)]


def test_what_does_not_fit_a_shape_is_not_tried() -> None:
    model = student(num_hidden_layers=1, head_dim=16)  # keys: 128 vectors of 4, 256 of 2
    every = QuantPlan(name="v", rules=(PlanRule(pattern="*", spec=FOURS),))
    formats = formats_to_try(model.model, every, 7.0).formats
    tried = {name.rsplit(".", 1)[1]: [s.vector_size for s in f] for name, f in formats.items()}
    assert tried["k_proj"] == tried["v_proj"] == [2, 2] and tried["up_proj"] == [4, 2, 2]
    wide = FOURS.model_copy(update={"group_size": 24})
    with pytest.raises(ConfigError, match="q_proj: group_size=24"):
        formats_to_try(
            model.model, QuantPlan(name="v", rules=(PlanRule(pattern="*", spec=wide),)), 7.0
        )


BY_64 = FOURS.model_copy(update={"group_size": 64})
EVERY = QuantPlan(name="v", rules=(PlanRule(pattern="*", spec=BY_64),))


def test_groups_that_do_not_divide_a_row_give_way_to_the_next_that_does() -> None:
    model = student(num_hidden_layers=1, hidden_size=96, intermediate_size=288, head_dim=32)
    formats = formats_to_try(model.model, EVERY, 3.5, Room(wider_groups=True)).formats
    groups = {name: sorted({spec.group_size for spec in specs}) for name, specs in formats.items()}
    assert groups["model.layers.0.mlp.up_proj"] == [96]
    assert groups["model.layers.0.mlp.down_proj"] == [96, 288]
    assert groups["model.layers.0.self_attn.o_proj"] == [64]
    with pytest.raises(ConfigError, match="group_size=64 does not divide its 96 input"):
        formats_to_try(model.model, EVERY, 3.5)


def test_levels_stand_in_where_vectors_cannot_be() -> None:
    model = student(num_hidden_layers=1, hidden_size=32, intermediate_size=128, head_dim=16)
    levels = LutSpec(bits=4, group_size=16, scale_bits=8)
    room = Room(levels=levels, wider_groups=True)
    formats = formats_to_try(model.model, EVERY, 3.5, room).formats
    tried = {
        name.rsplit(".", 1)[1]: [(s.bits, s.vector_size, s.group_size) for s in specs]
        for name, specs in formats.items()
    }
    # rows of 128 take both, and 4 bits of levels; rows of 32 hold no group of 64
    both = [(8, 4), (6, 2), (8, 2)]
    assert tried["down_proj"] == [(*f, g) for f in both for g in (64, 128)] + [(4, 1, 16)]
    assert tried["up_proj"] == [(b, 1, g) for b in (2, 3, 4) for g in (16, 32)]

    def bend(name: str, spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
        if spec.vector_size > 1:
            raise ExportError("levels only")
        return spec

    formats = formats_to_try(model.model, EVERY, 3.5, room._replace(bend=bend)).formats
    assert {s.vector_size for specs in formats.values() for s in specs} == {1}
    with pytest.raises(ExportError, match="levels only"):  # the plan itself asks for vectors
        rule = PlanRule(pattern="*.down_proj", spec=BY_64)
        formats_to_try(model.model, QuantPlan(name="v", rules=(rule,)), 3.5, Room(bend=bend))
    odd = student(num_hidden_layers=1, hidden_size=28, head_dim=16)
    with pytest.raises(ConfigError, match="group_size=16 does not divide its 28 input"):
        formats_to_try(odd.model, EVERY, 3.5, Room(levels=levels))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("plan", [ALL, MLP])
def test_with_tables_the_budget_is_of_all_weights(tied: bool, plan: QuantPlan) -> None:
    model = student(tie_word_embeddings=tied, num_hidden_layers=1)
    names = table_names(model.model)
    tables = dict.fromkeys(names, [table_spec(bits, 32) for bits in (2, 4, 8)])
    budget = 5.5 if plan is ALL else 7.6  # linears outside of the plan have 16 bits
    least = budget - 0.6
    plan, report = plan_within_budget(model, plan, budget, tokens(6), room=Room(tables))
    assert report.is_of_file and plan.name == f"mixed-{budget}"
    linears = [n for n in linear_names(model.model) if plan.spec_for(n) is not None]
    assert set(report.modules) == {*names, *linears}
    for name in names:
        assert [t.bits for t in report.modules[name]] == [2, 4, 8]
        nats = [t.kl_nats for t in report.modules[name]]
        assert nats[0] > nats[1] > nats[2] > 0
    quantize_model(model, plan)
    model.model.to(torch.bfloat16)  # as many bits as floats are reckoned with
    modules = {**quant_tables(model.model), **quant_linears(model.model)}
    assert set(modules) == set(report.modules)
    assert whole_model_bits(model.model) == pytest.approx(report.bits_per_weight)
    assert least < report.bits_per_weight <= budget


def test_tables_that_the_plan_names_stay_out_of_the_budget() -> None:
    four = LutSpec(bits=4, group_size=32)
    rules = (PlanRule(pattern="*embed*", spec=four), *MLP.rules)
    plan = QuantPlan(name="p", rules=rules)
    plan, report = plan_within_budget(student(num_hidden_layers=1), plan, 5.0, tokens(6))
    assert plan.spec_for("model.embed_tokens", is_table=True) == four
    assert "model.embed_tokens" not in report.modules


def test_tables_may_have_vectors_where_the_plan_has_them() -> None:
    many = {"vocab_size": 1024, "tie_word_embeddings": True}
    model = student(num_hidden_layers=1, intermediate_size=96, **many)
    (name,) = table_names(model.model)
    room = Room({name: [table_spec(4, 32)]})
    plan = QuantPlan(name="fours", rules=(PlanRule(pattern="*", spec=FOURS),))
    forms = [(4, 1), (8, 4), (6, 2), (8, 2), (12, 4)]
    found = formats_to_try(model.model, plan, 5.0, room).formats[name]
    assert [(s.bits, s.vector_size) for s in found] == forms
    few = student(num_hidden_layers=1, tie_word_embeddings=True)  # less than 4,096 vectors
    found = formats_to_try(few.model, plan, 5.0, room).formats[name]
    assert [(s.bits, s.vector_size) for s in found] == forms[:-1]
    levels = formats_to_try(model.model, ALL, 5.0, room).formats[name]
    assert levels == [table_spec(4, 32)]
    wide = QuantPlan(name="wide", rules=(PlanRule(pattern="*.mlp.down_proj", spec=WIDE),))
    assert formats_to_try(model.model, wide, 7.5, room).formats[name] == levels  # 48 > 32


@pytest.mark.parametrize("budget", [4.0, 7.0])
def test_a_budget_out_of_reach_names_the_range(budget: float) -> None:
    message = (
        rf"bits_budget={budget:g}, but these 14 linears can take 4\.\d+ to 6\.\d+ bits per weight, "
        "scales and codebooks included; give a budget between, or another --group-size"
    )
    with pytest.raises(ConfigError, match=message):
        plan_within_budget(student(), ALL, budget, tokens(2))


def test_a_file_out_of_reach_names_the_least() -> None:
    model = student(num_hidden_layers=1)
    tables = dict.fromkeys(table_names(model.model), [table_spec(2, 32)])
    message = r"bits_budget=3, but all weights of this model can take 3\.\d+ to \d\.\d+ bits"
    with pytest.raises(ConfigError, match=message):
        plan_within_budget(model, ALL, 3, tokens(2), room=Room(tables))


def test_a_budget_for_llama_cpp_counts_the_blocks_of_its_file(tmp_path: Path) -> None:
    """Q4_0 holds 3 and 4 bits alike in rows that wider groups do not divide, so 4 cost no more."""
    pytest.importorskip("gguf")
    shipping = shipping_to(("gguf",))
    model = student(num_hidden_layers=1, hidden_size=32, intermediate_size=96, head_dim=16)
    tables = dict.fromkeys(table_names(model.model), [table_spec(bits, 32) for bits in (2, 4, 8)])
    room = Room(tables, bend=shipping.bend, size=shipping.stored_bits)
    rule = PlanRule(pattern="*", spec=LutSpec(bits=4, group_size=32, scale_bits=8))
    plan = QuantPlan(name="levels", rules=(rule,))
    trials = formats_to_try(model.model, plan, 5.0, room)
    name = "model.layers.0.mlp.down_proj"
    shape = weight_shape(model.model.get_submodule(name))
    assert [spec.bits for spec in trials.formats[name]] == [2, 3, 4]
    assert trials.bits[name] == [math.prod(shape) * 4.5] * 3
    plan, report = plan_within_budget(model, plan, 5.0, tokens(6), room=room)
    assert {t.bits for t in report.modules[name] if t.is_chosen} == {4}
    quantize_model(model, plan)
    save_checkpoint(model.model, None, tmp_path / "student")
    found = export_model(str(tmp_path / "student"), ExportConfig(to="gguf"), tmp_path / "gguf")
    assert found.linear_bits == 4.5
