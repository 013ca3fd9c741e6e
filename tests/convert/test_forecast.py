"""The forecast of a conversion before it begins, and what the conversion then makes."""

import math
import re
from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER
from gguf_tables_case import gguf_of
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model

from qat.cli import run_verb
from qat.convert import forecast as forecasts
from qat.convert.bits_budget import JUDGED_TOKENS
from qat.convert.checkpoint import convert_checkpoint
from qat.convert.config import ConvertConfig
from qat.convert.forecast import Forecast, forecast
from qat.convert.quantize import QuantizeReport
from qat.errors import ConfigError
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.export.targets import model_ships_to, shipping_to, ships_to
from qat.extensions.targets.gguf import FILE_NAME
from qat.models.checkpoint import load_skeleton
from qat.models.cost import parameter_count, parts_of
from qat.models.gguf_header import read_header
from qat.models.gguf_layout import gguf_sizes
from qat.models.sizes import checkpoint_sizes
from qat.nn.swap import linear_names

MLP = r"ffn_(gate|up|down)\."
"""Names of the linears of an MLP in GGUF."""
pytestmark = pytest.mark.usefixtures("short_fits")


def tensor_megabytes(out: Path) -> float:
    """The size of a checkpoint without the header of its file, which is much of a tiny one."""
    return sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values()) / 1e6


def both(
    source: Path, out: Path, targets: tuple[str, ...] = (), **values: object
) -> tuple[Forecast, QuantizeReport]:
    shipping = shipping_to(targets)
    config = ConvertConfig(**{"to": "q2a4", "device": "cpu", **values})
    expected = forecast(str(source), config, shipping)
    return expected, convert_checkpoint(str(source), config, out, shipping).of_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"targets": ("compressed-tensors",)},
        {"to": "v2a4", "embedding_bits": 4, "group_size": 8},
        {"to": "q2a4_a8s_kv8", "group_size": 8},
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_forecast_is_what_is_made(values: dict, tied: bool, tmp_path: Path) -> None:
    save_tiny(tmp_path / "float", "llama", tie_word_embeddings=tied)
    if "a8s" in values.get("to", ""):
        (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
        values = {**values, "calibration": str(tmp_path / "text.txt"), "calibration_length": 8}
    expected, report = both(tmp_path / "float", tmp_path / "out", **values)
    assert expected.sizes.linear_bits == pytest.approx(report.linear_bits)
    # norms of a random model, all ones, are stored in 16 bits
    near = {"rel": 0.03}
    size = tensor_megabytes(tmp_path / "out")
    bits = report.bits_per_weight * size / report.megabytes
    assert expected.sizes.megabytes == pytest.approx(size, **near)
    assert expected.sizes.bits_per_weight == pytest.approx(bits, **near)
    for one, other in zip(expected.parts, report.parts, strict=True):
        assert (one.name, one.num_weights) == (other.name, other.num_weights)
        assert one.megabytes == pytest.approx(other.megabytes, rel=0.03, abs=4e-4)
    assert [each.flag for each in expected.savings] == [each.flag for each in report.savings]
    assert model_ships_to(expected.model) == ships_to(tmp_path / "out")
    assert expected.minutes > 0 and expected.memory_gib > 0
    found = checkpoint_sizes(tmp_path / "out", str(tmp_path / "float"))
    assert found.source_megabytes == expected.sizes.source_megabytes
    assert found.linear_bits == expected.sizes.linear_bits


def test_a_rotated_model_has_two_tables(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    torch.nn.init.normal_(model.model.norm.weight, 1.0, 0.1)  # or the two stay one
    model.save_pretrained(tmp_path / "float")
    TOKENIZER.save_pretrained(tmp_path / "float")
    expected, report = both(tmp_path / "float", tmp_path / "out", rotate=True)
    assert report.num_tables == 2
    assert expected.sizes.megabytes == pytest.approx(tensor_megabytes(tmp_path / "out"), rel=0.03)


def test_a_student_in_new_formats_is_foretold_from_its_packed_files(tmp_path: Path) -> None:
    save_tiny(tmp_path / "float", "llama")
    both(tmp_path / "float", tmp_path / "q4", to="q4a4")
    base = str(tmp_path / "float")
    expected, report = both(tmp_path / "q4", tmp_path / "q2", base=base)
    assert report.kept > 0
    assert expected.sizes.linear_bits == pytest.approx(report.linear_bits)
    assert expected.sizes.megabytes == pytest.approx(tensor_megabytes(tmp_path / "q2"), rel=0.03)


@pytest.mark.parametrize(
    ("kinds", "embedding_bits"), [(("Q5_0", "Q8_0"), None), (("Q8_0", ""), 16)]
)
def test_a_gguf_file_is_foretold_from_its_header(
    kinds: tuple[str, str], embedding_bits: int | None, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    file = gguf_of(tmp_path, *kinds)
    expected, report = both(file, tmp_path / "s", ("gguf",), embedding_bits=embedding_bits)
    assert expected.sizes[1:] == (report.megabytes, report.bits_per_weight, report.linear_bits)
    assert expected.parts == report.parts
    assert expected.sizes.source_megabytes == file.stat().st_size / 1e6


def test_floats_of_a_gguf_file_are_foretold_and_go_nowhere(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    command = ["convert", str(gguf_of(tmp_path, "Q5_0", "Q8_0")), "--to", "float", "--out"]
    expected, made = (run_verb([*command, str(tmp_path / "s"), *w]) for w in (["--dry-run"], []))
    size = tensor_megabytes(tmp_path / "s")
    assert expected["megabytes"] == pytest.approx(size, rel=0.03)
    assert expected["ships_to"] == made["ships_to"] == [] and made["plan"] == "float"


@pytest.mark.parametrize(
    ("family", "own", "values"),
    [
        ("llama", {"tie_word_embeddings": True}, {"to": "q2a4"}),
        ("qwen3", {"tie_word_embeddings": False}, {"to": "b1", "embedding_bits": 16}),
        ("gemma3", {"query_pre_attn_scalar": 32}, {"to": "ternary"}),
    ],
)
def test_a_student_for_gguf_is_counted_as_its_file(
    family: str, own: dict, values: dict, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    save_tiny(tmp_path / "float", family, hidden_size=256, intermediate_size=512, **own)
    expected, report = both(tmp_path / "float", tmp_path / "s", ("gguf",), **values)
    assert expected.parts == report.parts
    exported = export_model(str(tmp_path / "s"), ExportConfig(to="gguf"), tmp_path / "out")
    assert exported.bits_per_weight == report.bits_per_weight
    file, model = tmp_path / "out" / FILE_NAME, load_skeleton(tmp_path / "s")
    assert report.megabytes == pytest.approx(file.stat().st_size / 1e6, rel=0.01)
    assert sum(part.megabytes for part in report.parts) == pytest.approx(report.megabytes)
    sizes = gguf_sizes(file, model)
    assert report.bits_per_weight == 8 * sum(sizes.values()) / parameter_count(model)
    written = {part.name: part.megabytes for part in parts_of(model, sizes)}
    counted = {part.name.split(",")[0]: part for part in report.parts if part.num_weights}
    assert {name: part.megabytes for name, part in counted.items()} == pytest.approx(written)
    assert model_ships_to(expected.model) == ships_to(tmp_path / "s")
    found = {each.type for name, each in read_header(file).items() if re.search(MLP, name)}
    assert counted["mlp linears"].name == ", ".join(["mlp linears", *sorted(found)])


def test_a_text_to_calibrate_on_need_not_be_there(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    alone = ConvertConfig(to="q2a4", device="cpu")
    fitted = alone.model_copy(update={"calibration": "no/cache"})
    one, other = (forecast(str(tmp_path), config) for config in (alone, fitted))
    assert one.sizes == other.sizes and one.memory_gib < other.memory_gib


def test_a_budget_is_a_size(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    config = ConvertConfig(bits_budget=4, calibration="no/cache", device="cpu")
    sizes = forecast(str(tmp_path), config).sizes
    assert sizes.bits_per_weight == pytest.approx(4, rel=1e-4) and math.isnan(sizes.linear_bits)
    assert sizes.megabytes == pytest.approx(4 * parameter_count(tiny_model()) / 8e6, rel=1e-4)
    fixed = config.model_copy(update={"embedding_bits": 8})
    sizes = forecast(str(tmp_path), fixed).sizes
    assert sizes.linear_bits == 4 < sizes.bits_per_weight < 8.5
    with pytest.raises(ConfigError, match="bits_budget=2, but all weights"):
        forecast(str(tmp_path), config.model_copy(update={"bits_budget": 2}))


def test_a_group_size_that_a_target_replaces_is_named(tmp_path: Path, caplog) -> None:
    save_tiny(tmp_path / "float", "llama")
    for to, group_size, lines in (("gguf", 8, 1), ("gguf", 32, 0), ("packed", 8, 0)):
        caplog.clear()
        config = ConvertConfig(to="q4a4", group_size=group_size, device="cpu")
        forecast(str(tmp_path / "float"), config, shipping_to((to,)))
        said = [record.getMessage() for record in caplog.records if "group_size" in record.msg]
        assert len(said) == lines, (to, group_size)
        assert all("group_size=8" in line and "groups of 32" in line for line in said)


@pytest.mark.parametrize(
    ("hidden", "values", "said"),
    [
        (96, {"to": "b1"}, [("mlp.gate_proj", "Q4_0 (4.5", "Q1_0 (1.125)", "128", "96", "4 bits")]),
        (
            64,
            {"to": "b1"},
            [("mlp.gate_proj", "Q2_0 (2.25", "Q1_0 (1.125)", "128", "64", "2 bits")],
        ),
        (256, {"to": "b1"}, []),
        (96, {"to": "q4a4"}, []),
        (64, {"to": "q4a4", "embedding_bits": 3}, [("model.embed_tokens", "Q4_0", "Q3_K", "64")]),
    ],
)
def test_a_weight_whose_rows_fill_no_small_blocks_is_named(
    hidden: int, values: dict, said: list[tuple[str, ...]], tmp_path: Path, caplog
) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": hidden // 2}
    save_tiny(tmp_path / "float", "llama", **sizes, **heads)
    config = ConvertConfig(device="cpu", **values)
    forecast(str(tmp_path / "float"), config, shipping_to(("gguf",)))
    foretold = [line for line in caplog.messages if "gguf holds" in line]
    caplog.clear()
    convert_checkpoint(str(tmp_path / "float"), config, tmp_path / "s", shipping_to(("gguf",)))
    assert foretold == [line for line in caplog.messages if "gguf holds" in line]
    assert len(foretold) == len(said)
    for line, words in zip(foretold, said, strict=True):
        assert all(word in line for word in words) and "down_proj" not in line


def test_a_type_that_another_target_rules_out_is_named(tmp_path: Path, caplog) -> None:
    save_tiny(tmp_path / "float", "llama", hidden_size=256, intermediate_size=256)
    shipping, plan = shipping_to(("mlx", "gguf")), tmp_path / "threes.toml"
    plan.write_text('name = "threes"\n[[rules]]\npattern = "*_proj"\nspec = { bits = 3 }\n')
    forecast(str(tmp_path / "float"), ConvertConfig(to=str(plan), device="cpu"), shipping)
    (line,) = (line for line in caplog.messages if "down_proj" in line)
    assert "Q3_K (3.438)" in line and "groups of 128" in line


def test_the_trials_of_a_budget_are_foretold(tmp_path: Path, monkeypatch) -> None:
    save_tiny(tmp_path / "float")
    monkeypatch.setattr(forecasts, "product_flops", lambda *_: 1e7)

    def minutes(**more: float) -> float:
        settings = ConvertConfig(to="q2a2", calibration="text.txt", device="cpu", **more)
        return forecast(str(tmp_path / "float"), settings).minutes

    model = tiny_model()
    formats = 3 * len(linear_names(model))
    least = formats * parameter_count(model) * JUDGED_TOKENS / 1e7 / 60
    assert minutes(bits_budget=4.0) > minutes() + least
