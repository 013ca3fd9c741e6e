"""Students that have the levels and scales of a llama.cpp file, and become the same file again."""

import json
from pathlib import Path

import gguf as library
import numpy as np
import pytest
import torch
from cache_case import build
from cli_case import call
from gguf_case import write_gguf
from gguf_tables_case import gguf_of
from tiny import logits, tiny_model, tiny_tokenizer
from train_case import config

from qat.cli import run_verb
from qat.convert.quantize import quantize_model
from qat.errors import ConfigError
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.extensions.targets.gguf import FILE_NAME
from qat.extensions.targets.keep import LEVELS, read_levels
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.gguf import GgufFile, dequantize, type_number
from qat.models.gguf_header import block_size, read_header
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.models.sizes import tensor_sizes
from qat.models.stored_state import quantized_modules
from qat.nn.lut_embedding import QuantTable, quant_tables
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import linear_names, table_names
from qat.quant.spec import LutSpec, PlanRule, QuantPlan
from qat.quant.weight import dequantize as form
from qat.train.start import train_student

FORMATS = {
    "Q1_0": LutSpec(bits=1, codebook="seq", group_size=128),
    "TQ1_0": LutSpec(bits=2, codebook="ternary", group_size=256),
    "Q2_0": LutSpec(bits=2, codebook="ternary", group_size=64),
    "Q2_0 with all codes": LutSpec(bits=2, codebook="int", group_size=64),
    "Q4_0": LutSpec(bits=4, codebook="int", group_size=32),
    "Q5_0": LutSpec(bits=5, codebook="int", group_size=32),
    "Q8_0": LutSpec(bits=8, codebook="int", group_size=32),
}


def exported(place: Path, architecture: str, shift: int = 0) -> tuple[Path, dict[str, LutSpec]]:
    """A file whose tables and linears have all types in turn, and their formats by name."""
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
    model = tiny_model(architecture, tie_word_embeddings=False, initializer_range=0.1, **shape)
    names = [*table_names(model), *linear_names(model)]
    specs = {n: [*FORMATS.values()][(i + shift) % len(FORMATS)] for i, n in enumerate(names)}
    rules = tuple(PlanRule(pattern=name, spec=spec) for name, spec in specs.items())
    quantize_model(LanguageModel(model), QuantPlan(name="all", rules=rules))
    save_checkpoint(model, tiny_tokenizer(), place / "packed")
    export_model(str(place / "packed"), ExportConfig(to="gguf"), place / "out")
    return place / "out" / FILE_NAME, specs


@pytest.mark.parametrize(("head", "same"), [("Q8_0", True), ("Q8_0", False), ("", True)])
def test_a_table_that_the_file_holds_twice_is_named(
    head: str, same: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = gguf_of(tmp_path, "Q5_0", head, same=same)
    run_verb(["convert", str(file), "--keep", "--out", str(tmp_path / "kept")])
    said = [line for line in caplog.messages if "one table twice" in line]
    if not (head and same):
        assert not said
        return
    (line,) = said
    sizes = tensor_sizes(tmp_path / "kept").items()
    size = sum(n for name, n in sizes if name.startswith("model.embed_tokens."))
    assert len(quant_tables(load_checkpoint(tmp_path / "kept"))) == 2
    assert size > 5000 and f" {size / 1e6:.2f} MB" in line
    assert "in 5.5 bits" in line and "in 8.5" in line


@pytest.mark.parametrize(("architecture", "shift"), [("llama", 0), ("qwen3", 3)])
def test_a_file_becomes_a_student_and_the_same_file(architecture, shift, tmp_path: Path) -> None:
    file, specs = exported(tmp_path, architecture, shift)
    student = tmp_path / "kept"
    report = run_verb(["convert", str(file), "--keep", "--out", str(student)])
    assert report["kept"] == len(specs) and report["linears"] == 0 and report["plan"] == "kept"
    kept, was = load_checkpoint(student), load_checkpoint(tmp_path / "packed")
    modules = quantized_modules(kept)
    assert {name: module.spec for name, module in modules.items()} == specs
    for name, module in quantized_modules(was).items():
        assert torch.equal(module.indices(), modules[name].indices())
        assert torch.equal(
            module.quantized().scales.scales, modules[name].quantized().scales.scales
        )
    assert torch.equal(logits(kept), logits(was))
    export_model(str(student), ExportConfig(to="gguf"), tmp_path / "again")
    again = {tensor.name: tensor for tensor in GgufFile(tmp_path / "again" / FILE_NAME).tensors}
    for tensor in GgufFile(file).tensors:
        assert again[tensor.name].tensor_type == tensor.tensor_type
        assert np.array_equal(again[tensor.name].data, tensor.data), tensor.name


@pytest.mark.slow
def test_a_kept_student_learns_and_goes_out_in_the_same_types(tmp_path: Path) -> None:
    file, _ = exported(tmp_path, "qwen3")
    run_verb(["convert", str(file), "--keep", "--out", str(tmp_path / "kept")])
    build(tmp_path / "cache", tokenizer=load_tokenizer(str(tmp_path / "kept")))
    settings = config(tmp_path, learn="weights,scales", max_steps=3, lr=0.05)
    report = train_student(settings, str(tmp_path / "kept"), tmp_path / "run", resume=False)
    export_model(str(report.final), ExportConfig(to="gguf"), tmp_path / "again")
    was, now = (GgufFile(path).tensors for path in (file, tmp_path / "again" / FILE_NAME))
    types = [{tensor.name: tensor.tensor_type for tensor in each} for each in (was, now)]
    assert types[0] == types[1]
    values = [{tensor.name: tensor.data for tensor in each} for each in (was, now)]
    moved = {n for n, data in values[0].items() if not np.array_equal(data, values[1][n])}
    assert {name for name in moved if name.startswith("blk.") and "norm" not in name} == {
        name for name in values[0] if name.startswith("blk.") and "norm" not in name
    }
    lora = config(tmp_path, learn="lora", lora_rank=2, lr_lora=1e-2, max_steps=2)
    adapted = train_student(lora, str(tmp_path / "kept"), tmp_path / "adapted", resume=False)
    kept = quant_linears(load_checkpoint(tmp_path / "kept"))
    for name, linear in quant_linears(load_checkpoint(adapted.final)).items():
        assert torch.equal(linear.packed, kept[name].packed) and linear.lora_out.abs().max() > 0


@pytest.mark.parametrize("kind", LEVELS)
def test_any_bytes_of_a_type_are_levels_times_scales(kind: str, tmp_path: Path) -> None:
    size, octets = block_size(kind)
    path, rng = tmp_path / "it.gguf", np.random.default_rng(0)
    rows = rng.integers(0, 256, (6, 4, octets), np.uint8)
    halves = rng.normal(size=(6, 4, 1)).astype(np.float16)  # of both signs
    halves[0] = 0
    place = slice(-2, None) if kind.startswith("TQ") else slice(2)
    rows[..., place] = halves.view(np.uint8)
    if kind == "TQ2_0":  # a fourth code stands for nothing there
        rows[..., :-2] &= 0b10101010
    writer = library.GGUFWriter(path, "llama")
    data, number = rows.reshape(6, -1), type_number(kind)
    writer.add_tensor("it", data.view(np.int8), raw_shape=(6, 4 * size), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    order = torch.randperm(6)
    spec, found = read_levels(path, read_header(path)["it"], order)
    expected = torch.from_numpy(dequantize(data, kind))
    assert torch.equal(form(found)[order], expected) and spec.group_size == size
    assert spec.codebook == ("int" if kind == "Q2_0" else FORMATS.get(kind, spec).codebook)


def test_a_table_without_levels_stays_in_floats(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "Q4_0", embedding="Q5_1")
    run_verb(["convert", str(file), "--keep", "--out", str(tmp_path / "kept")])
    kept, floats = load_checkpoint(tmp_path / "kept", torch.float32), load_model(str(file)).model
    table = kept.get_input_embeddings().weight
    assert torch.equal(table, floats.get_input_embeddings().weight)
    assert isinstance(kept.get_output_embeddings(), QuantTable)
    torch.testing.assert_close(logits(kept), logits(floats), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "kind"), [(2, "Q2_0"), (4, "Q4_0"), (8, "Q8_0"), (16, "BF16")])
def test_a_table_without_levels_takes_the_bits_of_the_flag(
    bits: int, kind: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    file = write_gguf(tmp_path / "model.gguf", "Q4_0", embedding="Q5_1")
    words = ["convert", str(file), "--keep", "--out"]
    assert call(monkeypatch, *words, tmp_path / "wide") == 0
    shown = capsys.readouterr()
    wide = json.loads(shown.out.splitlines()[-1])
    assert "WARNING" in shown.out + shown.err and wide["megabytes"] > wide["source_megabytes"]
    found = run_verb([*words, str(tmp_path / "kept"), "--embedding-bits", str(bits)])
    saved = wide["megabytes"] - found["megabytes"]
    assert wide["savings"].keys() == {"--embedding-bits 8"}
    if bits == 8:
        assert saved == pytest.approx(wide["savings"]["--embedding-bits 8"], abs=1e-3)
    kept = load_checkpoint(tmp_path / "kept", torch.float32).get_input_embeddings()
    table = kept.quantized_weight() if isinstance(kept, QuantTable) else kept.weight
    exact = load_model(str(file)).model.get_input_embeddings().weight
    error = (table - exact).norm() / exact.norm()
    assert 0 < error < {2: 0.6, 4: 0.12, 8: 0.01, 16: 0.003}[bits]
    export_model(str(tmp_path / "kept"), ExportConfig(to="gguf"), tmp_path / "again")
    header = read_header(tmp_path / "again" / FILE_NAME)
    assert header["token_embd.weight"].type == kind


def test_a_linear_without_levels_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "Q5_1")
    with pytest.raises(ConfigError, match="attn_q.weight as Q5_1, expected .*Q1_0, Q2_0"):
        run_verb(["convert", str(file), "--keep", "--out", str(tmp_path / "out")])


@pytest.mark.usefixtures("no_extensions")
def test_without_its_extension_nothing_is_kept(tmp_path: Path) -> None:
    file = str(write_gguf(tmp_path / "model.gguf", "Q4_0"))
    with pytest.raises(ConfigError, match="'keep' is not installed .*pip install"):
        run_verb(["convert", file, "--keep", "--out", str(tmp_path / "out")])


def test_what_has_no_meaning_with_kept_weights_is_refused(tmp_path: Path) -> None:
    file = str(write_gguf(tmp_path / "model.gguf", "Q4_0"))
    for words, named in (
        (["--to", "b1"], "to=b1"),
        (["--for", "gguf"], "--for"),
        (["--dry-run"], "--dry-run"),
        (["--device", "cpu"], "device=cpu"),
    ):
        with pytest.raises(ConfigError, match=f"^{named} is given with --keep"):
            run_verb(["convert", file, "--keep", *words, "--out", str(tmp_path / "out")])
    tiny_model().save_pretrained(tmp_path / "floats")
    with pytest.raises(ConfigError, match="expected a GGUF file of llama, qwen2"):
        run_verb(["convert", str(tmp_path / "floats"), "--keep", "--out", str(tmp_path / "out")])
