"""Embedding and head of a student: their default bits, no more than the source has, tied again."""

import json
from pathlib import Path

import pytest
import torch
from families import build
from gguf_tables_case import TYPES, gguf_of
from tiny import save_tiny, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from qat.convert.checkpoint import convert_checkpoint
from qat.convert.config import REPORT_NAME, ConvertConfig
from qat.convert.quantize import QuantizeReport
from qat.convert.stored_tables import join_tables
from qat.convert.tables import BUDGET_BITS, StoredTable, plan_tables, tables_in_budget
from qat.errors import ConfigError
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.export.targets import load_target, shipping_to, target_names
from qat.extensions.targets.gguf import FILE_NAME
from qat.models.checkpoint import load_checkpoint
from qat.models.gguf_header import read_header
from qat.models.load import load_model
from qat.models.stored_state import packed_state_dict
from qat.nn.lut_embedding import QuantTable, TiedLutHead, quant_tables
from qat.nn.swap import is_tied, table_names
from qat.quant.fit import fit_weight
from qat.quant.integers import integer_spec
from qat.quant.spec import PRESETS, LutSpec, PlanRule, preset_called
from qat.quant.weight import dequantize

pytestmark = pytest.mark.usefixtures("short_fits")

pytest.importorskip("gguf")


def converted(source: Path, out: Path, **values: object) -> tuple[QuantizeReport, PreTrainedModel]:
    targets = values.pop("targets", ())
    shipping = shipping_to(targets)
    config = ConvertConfig(**{"to": "q2a4", "embedding_bits": 8, "device": "cpu", **values})
    report = convert_checkpoint(str(source), config, out, shipping)
    return report, load_checkpoint(out, torch.float32)


def table_values(model: PreTrainedModel) -> Tensor:
    embedding = model.get_input_embeddings()
    is_table = isinstance(embedding, QuantTable)
    return embedding.quantized_weight() if is_table else embedding.weight.detach()


@pytest.mark.parametrize(
    ("kind", "targets"), [*((kind, ("gguf",)) for kind in TYPES), (next(iter(TYPES)), ())]
)
def test_a_table_that_ggml_rounded_is_not_rounded_again(
    kind: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    file = gguf_of(tmp_path, kind, "")
    _, student = converted(file, tmp_path / "student", targets=targets)
    (table,) = quant_tables(student).values()
    assert table.spec == integer_spec(TYPES[kind])
    source = load_model(str(file), device="cpu", dtype="fp32").model
    assert torch.equal(table.quantized_weight(), table_values(source))
    if targets:
        export_model(str(tmp_path / "student"), ExportConfig(to="gguf"), tmp_path / "again")
        assert read_header(tmp_path / "again" / FILE_NAME)["token_embd.weight"].type == kind


def test_two_roundings_of_one_table_become_the_finer_one(tmp_path: Path) -> None:
    file = gguf_of(tmp_path, "Q5_0", "Q8_0")
    source = load_model(str(file), device="cpu", dtype="fp32").model
    _, student = converted(file, tmp_path / "student", targets=("gguf",))
    assert isinstance(student.get_output_embeddings(), TiedLutHead)
    assert torch.equal(table_values(student), source.lm_head.weight)
    export_model(str(tmp_path / "student"), ExportConfig(to="gguf"), tmp_path / "again")
    header = read_header(tmp_path / "again" / FILE_NAME)
    assert header["token_embd.weight"].type == "Q8_0" and "output.weight" not in header


def test_a_base_that_holds_one_table_twice_gives_the_finer_one(tmp_path: Path) -> None:
    file = gguf_of(tmp_path, "Q5_0", "Q8_0")
    _, student = converted(file, tmp_path / "student", embedding_bits=4)
    _, again = converted(tmp_path / "student", tmp_path / "again", base=str(file))
    source = load_model(str(file), device="cpu", dtype="fp32").model
    assert is_tied(student) and is_tied(again)
    fine, coarse = source.lm_head.weight, source.model.embed_tokens.weight
    far = [(table_values(again) - each).norm() for each in (fine, coarse)]
    assert far[0] < far[1] / 4


def test_floats_of_a_file_have_its_finer_table_for_both(tmp_path: Path) -> None:
    file = gguf_of(tmp_path, "Q5_0", "Q8_0")
    source = load_model(str(file), device="cpu", dtype="fp32").model
    config = ConvertConfig(to="float", device="cpu")
    report = convert_checkpoint(str(file), config, tmp_path / "teacher")
    teacher = load_model(str(tmp_path / "teacher"), device="cpu", dtype="fp32").model
    assert report.modules == [] and is_tied(teacher) and not is_tied(source)
    assert torch.equal(table_values(teacher), source.lm_head.weight)
    for name, weight in source.model.layers.named_parameters():
        assert torch.equal(teacher.model.layers.get_parameter(name), weight), name


def test_floats_are_asked_for_of_floats_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path / "float")
    converted(tmp_path / "float", tmp_path / "student")
    for source, budget in (("student", None), ("float", 3.0)):
        config = ConvertConfig(to="float", bits_budget=budget, device="cpu")
        with pytest.raises(ConfigError, match="to=float"):
            convert_checkpoint(str(tmp_path / source), config, tmp_path / "again")


def test_two_tables_stay_two(tmp_path: Path) -> None:
    file = gguf_of(tmp_path, "Q5_0", "Q8_0", same=False)
    _, student = converted(file, tmp_path / "student")
    assert [table.spec.bits for table in quant_tables(student).values()] == [5, 8]


def test_tables_are_one_where_rounding_explains_their_distance() -> None:
    for apart, joined in ((0.02, True), (0.2, False)):
        model = tiny_model(tie_word_embeddings=False)
        table = model.lm_head.weight.detach()
        other = table * (1 + apart)
        stored = {
            "model.embed_tokens": StoredTable(4.5, other),
            "lm_head": StoredTable(6.5625, table),
        }
        assert join_tables(model, stored).keys() == (
            {"model.embed_tokens"} if joined else {*stored}
        )
        assert is_tied(model) == joined
        assert (model.model.embed_tokens.weight is model.lm_head.weight) == joined


def planned(**values: object) -> dict[str, int]:
    """Bits of the tables of a small model."""
    targets = values.pop("targets", ())
    shipping = shipping_to(targets)
    model = values.pop("model", None) or tiny_model(tie_word_embeddings=False)
    plan = values.pop("plan", None) or preset_called(values.setdefault("to", "q2a4"))
    stored = values.pop("stored", {})
    made = plan_tables(plan, model, ConvertConfig(**values), stored=stored, shipping=shipping)
    found = {name: made.spec_for(name, is_table=True) for name in table_names(model)}
    return {name: spec.bits for name, spec in found.items() if spec is not None}


def test_tables_have_4_bits_beside_fewer_and_8_beside_4() -> None:
    both = {"model.embed_tokens": 4, "lm_head": 4}
    assert planned() == planned(to="v2a2") == planned(to="q2a4_a8") == both
    assert planned(to="q4a4") == planned(embedding_bits=8) == dict.fromkeys(both, 8)
    assert planned(embedding_bits=2) == dict.fromkeys(both, 2)
    assert planned(embedding_bits=16) == {}
    assert planned(to="q4a4_r4") == planned(to="q2a4_r32") == {}  # the reference's
    own = PRESETS["q2a4"].model_copy(
        update={"rules": (PlanRule(pattern="*embed*", spec=LutSpec(bits=4, group_size=16)),)}
    )
    assert planned(plan=own) == {"model.embed_tokens": 4}


def test_tables_are_quantized_for_targets_that_hold_them() -> None:
    for name in target_names():
        bits = planned(targets=(name,))
        assert bool(bits) == load_target(name).HOLDS_TABLES


def test_a_table_gets_no_more_bits_than_its_source_had() -> None:
    for stored, bits in ((6.5625, 6), (6.0, 5), (5.5, 5), (5.0, 4), (4.25, 4), (3.4375, 4)):
        sample = torch.randn(8, 32)
        tables = {"model.embed_tokens": StoredTable(stored, sample)}
        found = planned(stored=tables, embedding_bits=8)
        assert found == {"model.embed_tokens": bits, "lm_head": 8}


def test_what_a_budget_may_give_tables(tmp_path: Path) -> None:
    model, plan = tiny_model(tie_word_embeddings=False), PRESETS["q2a4"]
    rounded = exact_integers_of(torch.randn(8, 32), 4)
    stored = {"lm_head": StoredTable(4.5, rounded)}

    def tried(to: tuple[str, ...] = (), **values: object) -> dict[str, list[int]] | None:
        config = ConvertConfig(**values)
        found = tables_in_budget(plan, model, config, stored=stored, shipping=shipping_to(to))
        return found and {name: [spec.bits for spec in specs] for name, specs in found.items()}

    expected = {"model.embed_tokens": [*BUDGET_BITS], "lm_head": [2, 3, 4]}  # as in the file
    assert tried() == tried(("gguf",)) == expected
    # tables that have their bits already, or none: the budget is of the linears
    assert tried(embedding_bits=8) is tried(embedding_bits=16) is tried(("compressed-tensors",))
    assert tried(embedding_bits=8) is None
    save_tiny(tmp_path / "float")
    _, model = converted(tmp_path / "float", tmp_path / "eight")
    assert tried() is None


def exact_integers_of(weight: Tensor, bits: int) -> Tensor:
    """A weight that integers of `bits` bits hold exactly."""
    return dequantize(fit_weight(weight, integer_spec(bits)))


def test_floats_are_refused_where_tables_are_quantized_already(tmp_path: Path) -> None:
    save_tiny(tmp_path / "float")
    converted(tmp_path / "float", tmp_path / "eight")
    config = ConvertConfig(to="q4a4", embedding_bits=16, device="cpu")
    with pytest.raises(ConfigError, match="embedding_bits=16, but model.embed_tokens"):
        convert_checkpoint(str(tmp_path / "eight"), config, tmp_path / "again")
    report, student = converted(tmp_path / "eight", tmp_path / "four", to="q4a4")
    assert report.num_tables == 0 and quant_tables(student)  # they stay as they are


def test_float_tables_never_have_32_bits(tmp_path: Path) -> None:
    save_tiny(tmp_path / "float")  # in float32, with values that 16 bits do not hold
    source = load_model(str(tmp_path / "float"), device="cpu", dtype="fp32").model
    gguf = {"targets": ("gguf",)}
    for name, asked, dtype in (
        ("q", gguf, torch.bfloat16),
        ("kv", {"to": None, "kv": "int8"}, None),
    ):
        _, student = converted(tmp_path / "float", tmp_path / name, embedding_bits=16, **asked)
        for key in ("model.embed_tokens.weight", "lm_head.weight"):
            stored, own = packed_state_dict(student)[key], source.state_dict()[key]
            assert torch.equal(stored, own if dtype is None else own.to(dtype)), name
    export_model(str(tmp_path / "q"), ExportConfig(to="gguf"), tmp_path / "gguf")
    header = read_header(tmp_path / "gguf" / FILE_NAME)
    assert {header[f"{name}.weight"].type for name in ("token_embd", "output")} == {"BF16"}


def test_float_tables_of_a_quantized_file_have_16_bits(tmp_path: Path) -> None:
    file = gguf_of(tmp_path, "Q5_0", "")
    _, student = converted(file, tmp_path / "student", embedding_bits=16)
    assert not quant_tables(student)
    stored = packed_state_dict(student)["model.embed_tokens.weight"]
    assert stored.dtype == torch.bfloat16
    source = load_model(str(file), device="cpu", dtype="fp32").model
    assert torch.equal(table_values(student), table_values(source).bfloat16().float())
    values = json.loads((tmp_path / "student" / REPORT_NAME).read_text())
    assert values["num_tables"] == 0


def test_a_table_that_the_models_own_code_reads_is_not_quantized() -> None:
    model, rest = build("MambaForCausalLM"), {"stored": {}, "shipping": None}
    plan = PRESETS["q2a4"]
    (name,) = table_names(model)
    assert plan_tables(plan, model, ConvertConfig(to="q2a4"), **rest) == plan
    rule = PlanRule(pattern=name, spec=LutSpec(bits=4, group_size=32))
    for asked, bits in ((plan, 4), (plan.model_copy(update={"rules": (rule,)}), None)):
        with pytest.raises(ConfigError, match=f"{name} .*mamba.* --embedding-bits"):
            plan_tables(asked, model, ConvertConfig(to="q2a4", embedding_bits=bits), **rest)
