"""`qat convert` as a user meets it."""

import json
from pathlib import Path

import pytest
from cache_case import build
from cli_case import call, said
from rich.console import Console
from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokenizer

from qat.cli.convert import _formats
from qat.convert.quantize import ModuleReport
from qat.data.reader import TeacherCache
from qat.evaluate.config import EvalConfig
from qat.evaluate.judge import judge
from qat.export.targets import target_names


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("verb")
    tiny_model(initializer_range=0.2).save_pretrained(place / "float")
    tiny_model(initializer_range=0.2, num_hidden_layers=1).save_pretrained(place / "one layer")
    for name in ("float", "one layer"):
        tiny_tokenizer().save_pretrained(place / name)
    build(place / "cache")
    return place


def test_a_table_and_a_last_line(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out, cache = tmp_path / "out", place / "cache"
    flags = ["--to", "q2a4", "--calibration", cache, "--calibration-sequences", 8]
    judged = ["--eval", "--cache-dir", cache, "--device", "cpu"]
    assert call(monkeypatch, "convert", place / "float", *flags, *judged, "--out", out) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result["out"] == str(out) and result["plan"] == "q2a4"
    assert result["linears"] == 14 and result["tables"] == 2 and result["kept"] == 0
    assert 2.5 < result["linear_bits"] < result["bits_per_weight"] < 5
    assert result["megabytes"] < result["source_megabytes"] and "WARNING" not in printed
    for when, source in (("before", place / "float"), ("after", out)):
        expected = judge(str(source), EvalConfig(cache_dir=cache, device="cpu")).cached
        assert result[when] == expected._asdict()
    assert result["before"]["num_tokens"] > 0
    assert result["after"]["kl_tail_nats"] != result["before"]["kl_tail_nats"]
    assert "KD (nats)" in printed and "perplexity" in printed and "outputs'" in printed
    # one row for what every layer has; the name of each weight is in the report beside the tensors
    (row,) = [line for line in printed.splitlines() if "mlp.down_proj" in line]
    assert " 2 " in row and "lut2 g16 s8" in row and "layer" in row
    assert TeacherCache.open(cache).num_sequences("held_out") > 0


@pytest.mark.slow
def test_sizes_of_source_and_student_and_what_dominates(
    place: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    flags = ["--to", "q2a4", "--device", "cpu", "--embedding-bits", 16]
    assert call(monkeypatch, "convert", place / "float", *flags, "--out", tmp_path / "out") == 0
    printed = " ".join(capsys.readouterr().out.split())
    result = json.loads(printed[printed.rindex('{"out"') :])
    report = json.loads((tmp_path / "out/convert_report.json").read_text())
    for key in ("bits_per_weight", "linear_bits"):
        assert result[key] == round(report[key], 4)
    assert result["tables"] == 0
    source = (place / "float" / "model.safetensors").stat().st_size / 1e6
    assert result["source_megabytes"] == round(source, 4)
    assert result["savings"]["--embedding-bits 8"] > 0 and "--embedding-bits 8 saves" in printed
    assert "without --calibration so few bits make a student that says little" in printed
    tensors = load_file(tmp_path / "out/model.safetensors")
    bytes_of = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    tables = sum(bytes_of[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    parts = {part["name"]: part["megabytes"] for part in report["parts"]}
    assert parts["embedding"] + parts["head"] == pytest.approx(tables / 1e6)
    assert sum(parts.values()) == pytest.approx(sum(bytes_of.values()) / 1e6)
    assert all(name in printed for name in parts)
    small = ["--to", "q4a4", "--device", "cpu", "--out", tmp_path / "small"]
    assert call(monkeypatch, "convert", place / "float", *small) == 0
    printed = capsys.readouterr().out
    assert "--embedding-bits 8" not in printed and "--calibration" not in printed


def test_a_student_that_is_not_smaller_is_a_warning_at_the_top(
    place: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    model = tiny_model(tie_word_embeddings=True).bfloat16()
    model.save_pretrained(tmp_path / "brain")
    tiny_tokenizer().save_pretrained(tmp_path / "brain")
    flags = ["--to", "q2a2", "--device", "cpu"]
    assert call(monkeypatch, "convert", tmp_path / "brain", *flags, "--out", tmp_path / "two") == 0
    capsys.readouterr()
    more = ["--to", "q4a4", "--device", "cpu", "--out", tmp_path / "four"]
    assert call(monkeypatch, "convert", tmp_path / "two", *more) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("WARNING: ") and "more than" in first
    assert "--to q4a4 leaves" in first and "--to q2a4 saves" in first
    dense = ["--to", "dense", "--dtype", "fp32", "--out", tmp_path / "dense"]
    assert call(monkeypatch, "export", tmp_path / "two", *dense) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["bits_per_weight"] > 31 and found["linear_bits"] == 32
    assert first.startswith("WARNING: ") and "--to packed" in first and "--dtype bf16" in first


@pytest.mark.slow
@pytest.mark.usefixtures("short_fits")
def test_a_dry_run_says_what_the_conversion_then_makes(
    place: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    cases = (["q2a4"], ["q2a4", "--for", "gguf,mlx"], ["q2a4", "--embedding-bits", 16], ["q4a4_r4"])
    for number, case in enumerate(cases):
        out = tmp_path / str(number)
        flags = ["--to", *case, "--device", "cpu", "--out", out]
        assert call(monkeypatch, "convert", place / "float", *flags, "--dry-run") == 0
        expected = said(capsys)
        assert not out.exists()
        assert call(monkeypatch, "convert", place / "float", *flags) == 0
        found = said(capsys)
        for key in ("source_megabytes", "linear_bits", "ships_to"):
            assert expected[key] == found[key], key
        # norms of a random model, all ones, are stored in 16 bits
        assert expected["megabytes"] == pytest.approx(found["megabytes"], rel=0.03)
        assert expected["minutes"] >= 0 and expected["memory_gib"] >= 0


@pytest.mark.slow
def test_more_bits_without_the_float_weights_are_remarked(
    place: Path, tmp_path: Path, monkeypatch, capsys, caplog: pytest.LogCaptureFixture
) -> None:
    two, four = tmp_path / "two", tmp_path / "four"
    cpu = ["--device", "cpu"]
    assert call(monkeypatch, "convert", place / "float", "--to", "q2a2", *cpu, "--out", two) == 0
    assert "quantized already" not in caplog.text
    with caplog.at_level("WARNING", logger="qat"):
        assert call(monkeypatch, "convert", two, "--to", "q4a4", *cpu, "--out", four) == 0
    assert "14 linears and tables are quantized already" in caplog.text
    assert "in 2 bits, now 4" in caplog.text and "--base" in caplog.text
    caplog.clear()
    with_base = ["--base", place / "float", "--out", tmp_path / "based"]
    assert call(monkeypatch, "convert", two, "--to", "q4a4", *cpu, *with_base) == 0
    assert "quantized already" not in caplog.text


@pytest.mark.slow
def test_a_budget_of_bits(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out, cache = tmp_path / "out", place / "cache"
    flags = ["--bits-budget", 4.4, "--to", "q2a4", "--calibration", cache, "--device", "cpu"]
    few = ["--calibration-sequences", 4]
    assert call(monkeypatch, "convert", place / "one layer", *flags, *few, "--out", out) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result["plan"] == "mixed-4.4" and result["bits_budget"] == 4.4
    assert result["budget_bits_per_weight"] <= 4.4 and result["predicted_kl_nats"] > 0
    assert "KL alone (nats)" in printed and "embed_tokens" in printed and "8 g32" in printed
    assert (out / "plan.toml").exists()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_tables_get_the_bits_of_the_flag(bits: int, place, tmp_path, monkeypatch, capsys) -> None:
    flags = ["--to", "q4a4", "--embedding-bits", bits, "--device", "cpu"]
    assert call(monkeypatch, "convert", place / "float", *flags, "--out", tmp_path / "out") == 0
    report = json.loads((tmp_path / "out" / "convert_report.json").read_text())
    found = {module["name"]: module["bits"] for module in report["modules"]}
    assert found["model.embed_tokens"] == bits
    result = said(capsys)
    assert result["linears"] == 14 and result["tables"] == len(found) - 14 > 0


def test_what_keys_and_values_take_is_said(place: Path, tmp_path, monkeypatch, capsys) -> None:
    flags = ["--to", "q4a4_kv4", "--device", "cpu", "--out", tmp_path / "out"]
    assert call(monkeypatch, "convert", place / "float", *flags) == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["kv_bytes_per_token"] == 2 * 2 * 20
    assert "keys and values in 4 bits: 80 bytes a token, 0.312 of bfloat16's" in said.out + said.err


def test_mistakes_are_one_line(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    for tokens, message in (
        (["--to", "q4a4", "--eval"], "--eval is given without a cache"),
        (["--bits-budget", "2.5"], "add --calibration TEXT"),
        (["--bits-budget", "-1"], "bits_budget"),
        (["--to", "q4a4", "--group-size", "7"], "group_size=7 does not divide its 32 input"),
        (["--to", "q4a4", "--workers", "-1"], "workers"),
        (["--to", "q4a4", "--kv", "int2"], "kv"),
        (["--to", "q4a4_kv8", "--kv", "int4"], "to=q4a4_kv8 keeps keys and values in 8 bits, but"),
        (
            ["--to", "q4a4", "--embedding-bits", "5"],
            "embedding_bits=5: Input should be 2, 3, 4, 8 or 16",
        ),
        (["--to", "q4a4", "--eval", "--cache-dir", "nowhere"], "nowhere"),
    ):
        out = tmp_path / "out"
        assert call(monkeypatch, "convert", place / "float", *tokens, "--out", out) == 1
        error = capsys.readouterr().err
        assert error.startswith("qat: ") and error.count("\n") == 1 and message in error
        assert not out.exists()


def test_bits_of_formats_are_called_packed_beside_a_file(
    place, tmp_path, monkeypatch, capsys
) -> None:
    pytest.importorskip("gguf")
    if "gguf" not in target_names():
        pytest.skip("the extension that writes GGUF files is not installed")
    for targets in ("gguf", "packed"):
        flags = ["--to", "q4a4", "--for", targets, "--device", "cpu", "--out", tmp_path / targets]
        assert call(monkeypatch, "convert", place / "one layer", *flags) == 0
        assert ("packed checkpoint" in capsys.readouterr().out) == (targets == "gguf")


def test_numbers_are_whole_on_a_narrow_terminal(capsys) -> None:
    report = ModuleReport(
        name="model.layers.29.linear_attention.in_proj_qkv",
        bits=2,
        vector_size=1,
        codebook="seq",
        scale="group",
        group_size=256,
        rank=0,
        scale_bits=8,
        relative_error=0.70514,
        weighted_error=0.14424,
        bits_per_weight=2.03125,
        seconds=1.0,
    )
    Console(width=80).print(_formats([report]))
    printed = capsys.readouterr().out
    for cell in ("seq2 g256 s8", "2.031", "0.7051", "0.1442", "layer 29"):
        assert cell in printed
