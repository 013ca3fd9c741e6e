"""`qat convert --attention` as a user meets it, and what a sparse student can go on to."""

import json
from pathlib import Path

import pytest
import torch
from cli_case import call
from nsa_model_case import SMALL
from tiny import tiny_model, tiny_tokenizer

from qat.convert.checkpoint import convert_checkpoint
from qat.convert.config import ConvertConfig
from qat.convert.forecast import forecast
from qat.errors import ExportError
from qat.export.targets import model_ships_to, shipping_to
from qat.extensions.nsa.swap import nsa_config
from qat.models.checkpoint import is_packed
from qat.models.load import load_model
from qat.nn.quant_linear import quant_linears

IDS = torch.arange(60)[None]
TOML = "".join(
    f"{key} = {json.dumps(value)}\n"
    for key, value in SMALL.model_dump(mode="json", exclude_none=True).items()
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, and settings that are sparse at its lengths."""
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("nsa")
    tiny_model().save_pretrained(place / "dense")
    tiny_tokenizer().save_pretrained(place / "dense")
    (place / "small.toml").write_text(TOML + "layers = [1]\n")
    (place / "text.txt").write_text("the cat sat on the mat and the dog saw it. " * 200)
    return place


def logits(source: Path) -> torch.Tensor:
    model = load_model(str(source), device="cpu", dtype="fp32").model
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_there_and_back(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    sparse, dense = tmp_path / "sparse", tmp_path / "dense"
    flags = ["--attention", place / "small.toml", "--device", "cpu"]
    assert call(monkeypatch, "convert", place / "dense", *flags, "--out", sparse) == 0
    found = last_line(capsys)
    assert found["plan"] == "none" and found["linear_bits"] is None
    expected = SMALL.model_copy(update={"layers": (1,)})
    assert nsa_config(load_model(str(sparse), device="cpu", dtype="fp32").model) == expected
    report = json.loads((sparse / "convert_report.json").read_text())
    assert report["nsa"] == expected.model_dump(mode="json")
    torch.testing.assert_close(logits(sparse), logits(place / "dense"), rtol=0, atol=1e-5)
    packed = ["--to", "packed", "--out", tmp_path / "packed"]
    assert call(monkeypatch, "export", sparse, *packed) == 1
    assert "holds no quantized weight, expected some; quantize it" in capsys.readouterr().err
    flags = ["--attention", "dense", "--device", "cpu"]
    assert call(monkeypatch, "convert", sparse, *flags, "--out", dense) == 0
    assert not is_packed(dense)
    assert torch.equal(logits(dense), logits(place / "dense"))


def test_with_bits_and_calibration(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "all.toml").write_text(TOML)
    monkeypatch.setattr("qat.quant.error_feedback.SWEEPS", 1)
    flags = ["--to", "q2a4", "--attention", tmp_path / "all.toml", "--device", "cpu"]
    text = ["--calibration", place / "text.txt", "--calibration-length", 100]
    text += ["--calibration-sequences", 2]
    text += ["--attention-steps", 0]  # else it is no longer dense up to its reach
    out = tmp_path / "q2"
    assert call(monkeypatch, "convert", place / "dense", *flags, *text, "--out", out) == 0
    assert last_line(capsys)["linears"] == 14
    model = load_model(str(out), device="cpu", dtype="fp32").model
    assert len(quant_linears(model)) == 14
    assert [type(layer.self_attn.nsa.gates) for layer in model.model.layers] == [
        torch.nn.Linear
    ] * 2
    dense = tmp_path / "q2_dense"
    again = ["convert", out, "--attention", "dense", "--device", "cpu", "--out", dense]
    assert call(monkeypatch, *again) == 0
    torch.testing.assert_close(logits(dense), logits(out), rtol=0, atol=1e-5)
    for name in ("gguf", "dense"):
        assert call(monkeypatch, "export", out, "--to", name, "--out", tmp_path / name) == 1
        assert f"{name} cannot hold sparse attention, expected dense" in capsys.readouterr().err
    assert call(monkeypatch, "export", out, "--to", "packed", "--out", tmp_path / "packed") == 0
    assert last_line(capsys)["logits_equal"]
    assert call(monkeypatch, "export", dense, "--to", "dense", "--out", tmp_path / "plain") == 0


def test_bad_input_is_one_line(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    for flags, message in (
        (
            ["--attention", "mra"],
            "attention=mra is neither a file nor known; use one of dense, nsa",
        ),
        (["--attention", "no.toml"], "no.toml is not TOML"),
        (["--attention", "bad.toml"], "bad.toml: compress_stride=3 does not divide"),
        (["--attention", "layer.toml"], "layers names 2, but the model's layers are 0 ... 1"),
        (["--attention", "nsa", "--for", "gguf"], "gguf cannot hold sparse attention, expected"),
        (["--attention", "nsa", "--kv", "int4"], "kv=int4 is given for Qwen3ForCausalLM with sp"),
    ):
        monkeypatch.chdir(tmp_path)
        Path("no.toml").write_text("window: 3")
        Path("bad.toml").write_text("compress_stride = 3")
        Path("layer.toml").write_text("layers = [2]")
        flags = [*flags, "--device", "cpu", "--out", "out"]
        assert call(monkeypatch, "convert", place / "dense", *flags) == 1
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in said
        assert not Path("out").exists()


def test_a_forecast_is_what_is_made(place: Path, tmp_path: Path) -> None:
    settings = {"attention": "nsa", "attention_steps": 1, "device": "cpu"}
    text = {"calibration": str(place / "text.txt"), "calibration_length": 8}
    source, config = str(place / "dense"), ConvertConfig(**settings, **text)
    expected = forecast(source, config)
    report = convert_checkpoint(source, config, tmp_path / "out")
    assert expected.sizes.megabytes == pytest.approx(report.megabytes, rel=0.03)
    places = [name for name, lack in model_ships_to(expected.model).items() if lack is None]
    assert places == ["packed"]
    with pytest.raises(ExportError, match="sparse attention"):
        forecast(source, ConvertConfig(**settings), shipping_to(["gguf"]))


def test_gates_are_fitted_to_a_text_that_they_act_on(
    place: Path, tmp_path: Path, monkeypatch, caplog
) -> None:
    flags = ["--attention", place / "small.toml", "--calibration", place / "text.txt"]
    flags += ["--calibration-sequences", 4, "--attention-steps", 30, "--device", "cpu"]
    for length in (100, SMALL.reach):
        out = tmp_path / f"sparse_{length}"
        again = ["--calibration-length", length, "--out", out]
        assert call(monkeypatch, "convert", place / "dense", *flags, *again) == 0
        report = json.loads((out / "convert_report.json").read_text())
        if length == 100:
            (fit,) = report["attention_fit"]
            assert fit["name"] == "model.layers.1.self_attn"
            assert fit["error_after"] < fit["error_before"]
        else:
            assert report["attention_fit"] == []
            assert "rows have 64 tokens" in caplog.text
