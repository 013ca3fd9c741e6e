"""The prediction before a run: what it measures, and that it leaves no trace."""

import json
import re
from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER, build, texts
from cli_case import call
from quantized import SPECS, tiny_quantized
from safetensors.torch import load_file
from train_case import config, make_place

from qat.backend.base import Backend
from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.models.checkpoint import save_checkpoint
from qat.train import preflight as check
from qat.train.preflight import examine, guessed_hours, predict
from qat.train.run import resolved
from qat.train.start import train_student


def words(place: Path, **values: object) -> list[object]:
    """`train STUDENT` and its flags."""
    settings = resolved(config(place, **values), "")
    del settings["student"]
    pairs = ([f"--{key.replace('_', '-')}", value] for key, value in settings.items())
    flags = [word for pair in pairs if pair[1] is not False for word in pair]
    return ["train", place / "student", *flags]


def test_sizes_are_those_on_disk_and_nothing_else_moves(place: Path, tmp_path: Path) -> None:
    settings, student = config(place, max_steps=2, save_every=2), str(place / "student")
    before = torch.get_rng_state()
    found = predict(settings, student, TeacherCache.open(place / "cache"))
    assert torch.equal(torch.get_rng_state(), before)
    report = train_student(settings, student, tmp_path / "run", resume=False)
    for directory, predicted in (
        (tmp_path / "run" / "checkpoints" / "step-000002", found.checkpoint_bytes),
        (report.final, found.final_bytes),
    ):
        written = sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())
        assert predicted == pytest.approx(written, rel=0.15)
    state = load_file(tmp_path / "run/checkpoints/step-000002/trainer/state.safetensors")
    own_bytes = sum(t.nbytes for name, t in state.items() if not name.startswith("rng."))
    assert found.checkpoint_bytes - found.final_bytes == own_bytes
    assert 0 < found.step_s < 5 and 0 < found.eval_s < 5 and found.peak_gib > 0
    assert found.pinned_gib == 0
    assert found.tokens_per_s == pytest.approx(4 * 16 / found.step_s)
    assert found.attention == "sdpa" and found.fallback is None


def test_a_dry_run_leaves_nothing(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "run"
    tokens = [*words(place, max_steps=5000, price_per_hour=2.5), "--out", out, "--dry-run"]
    assert call(monkeypatch, *tokens) == 0
    assert [*tmp_path.iterdir()] == []
    shown, last = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert "toy" in shown and "warning" in shown
    result = json.loads(last)
    assert result["errors"] == 0 and result["hours"] > 0 and result["disk_bytes"] > 0


def test_errors_stop_and_force_is_recorded(
    place: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    out = tmp_path / "run"
    tokens = [*words(place, max_steps=2, lr_scales=1.5), "--out", out]
    assert call(monkeypatch, *tokens, "--dry-run") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["errors"] == 1
    assert captured.err.startswith("qat: preflight: lr: lr_scales=1.5, a step would move")
    assert call(monkeypatch, *tokens) == 1 and not out.exists()
    assert capsys.readouterr().err.count("\n") == 1
    assert call(monkeypatch, *tokens, "--force") == 0
    assert json.loads((out / "run.json").read_text())["forced"] == ["lr"]
    assert call(monkeypatch, *tokens, "--resume") == 0  # looked at once
    assert json.loads((out / "run.json").read_text())["forced"] == ["lr"]


def test_a_day_on_a_gpu_with_the_settings_of_a_test_is_refused(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    build(tmp_path / "cache", documents=texts(900), sequence_length=128, num_sequences=64)
    shape = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 128}
    student = tiny_quantized("qwen3", SPECS["lut2"], **shape)
    save_checkpoint(student, TOKENIZER, tmp_path / "student")
    monkeypatch.setattr(Backend, "name", lambda _: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(Backend, "has_bf16", lambda _: True)
    run = {"max_steps": 50_000, "batch_size": 8, "dtype": "fp32", "save_every": 0}
    tokens = [*words(tmp_path, **run), "--out", tmp_path / "run"]
    assert call(monkeypatch, *tokens) == 1 and not (tmp_path / "run").exists()
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].endswith("--force (3 more in the table)")
    for code in ("dtype", "save_every_off", "epochs", "toy"):
        assert re.search(rf"error\W+{code}\b|{code}\b.*error", captured.out), captured.out
    assert "6,250.0" in captured.out


def test_a_cache_that_does_not_fit_is_a_finding(place: Path, tmp_path: Path) -> None:
    settings = config(place, loss="tail:1", max_steps=2)
    short = examine(settings, str(place / "student"), tmp_path)
    assert short.prediction is None and not short.is_long and short.errors() == []
    with pytest.raises(ConfigError, match="global_batch_size=6 .* 2 ranks"):
        examine(config(place, global_batch_size=6), str(place / "student"), tmp_path, world=2)
    other = make_place(tmp_path, layers=1)
    values = json.loads((other / "student" / "config.json").read_text())
    values["max_position_embeddings"] = 8
    (other / "student" / "config.json").write_text(json.dumps(values))
    (other / "student" / "checksums.json").unlink()
    checked = examine(config(other), str(other / "student"), tmp_path, measures=True)
    assert [each.code for each in checked.errors()] == ["cache"] and checked.prediction is None
    assert "reads at most 8" in checked.errors()[0].found


def test_memory_that_runs_out_is_a_finding(place: Path, tmp_path: Path, monkeypatch) -> None:
    def run_out(*_arguments: object, **_named: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(check, "predict", run_out)
    checked = examine(config(place), str(place / "student"), tmp_path, measures=True)
    assert [each.code for each in checked.errors()] == ["memory"]


def test_a_short_run_is_not_rehearsed_unasked(place: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(check, "predict", None)
    assert examine(config(place), str(place / "student"), tmp_path).prediction is None


def test_hours_are_guessed_from_flops(place: Path, tmp_path: Path, monkeypatch) -> None:
    cache, student = TeacherCache.open(place / "cache"), str(place / "student")
    assert guessed_hours(config(place), student, cache) is None  # nobody knows this CPU
    monkeypatch.setattr(Backend, "name", lambda _: "NVIDIA H200")
    hours = guessed_hours(config(place, dtype="fp32"), student, cache)
    more = guessed_hours(config(place, dtype="fp32", max_steps=12), student, cache)
    assert more == pytest.approx(2 * hours) and 0 < hours < 1e-6
