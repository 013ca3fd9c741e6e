"""`qat train` as a user meets it."""

import json
import shlex
from pathlib import Path

import pytest
from cli_case import call, said
from train_case import config, flags
from transformers import AutoTokenizer

from qat.cli.train import _next, show_findings, show_health
from qat.data.reader import TeacherCache
from qat.export.targets import target_names
from qat.logs import read_json_lines
from qat.models.hf_quantizer import FORMAT
from qat.observe.health import Check
from qat.train.preflight import LESS_MEMORY, Checked, RunFinding
from qat.train.start import train_student


def test_a_run_by_flags_equals_one_by_its_own_recipe(place, tmp_path, monkeypatch, capsys) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = flags(place, max_steps=3, mlp_only=True)
    read, load = [], AutoTokenizer.from_pretrained
    with monkeypatch.context() as patch:
        patch.setattr(
            AutoTokenizer,
            "from_pretrained",
            lambda path, **how: (read.append(path), load(path, **how))[1],
        )
        assert call(patch, "train", place / "student", *words, "--out", first) == 0
    assert read == [str(place / "student")]  # the check before the run hands it on
    shown = capsys.readouterr().out
    others = "".join(line for line in shown.splitlines() if line.startswith("not to "))
    if "gguf" in target_names():  # .ci/core runs this file without extensions
        assert "gguf" in others and ": its codebook is lut (" in others
    result = json.loads(shown.splitlines()[-1])
    assert result["run"] == str(first) and result["steps"] == 3
    assert result["final"].startswith(str(first / "q2a2_mlp_")) and result["best_nats"] > 0
    assert call(monkeypatch, "--recipe", first / "recipe.toml", "train", "--out", second) == 0
    for name in ("metrics.jsonl", "recipe.toml"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    again = said(capsys)
    weights = [Path(r["final"], "model.safetensors").read_bytes() for r in (result, again)]
    assert weights[0] == weights[1]
    # a finished run goes on to the same end
    resumed = [*words, "--out", first, "--resume", "auto"]
    assert call(monkeypatch, "train", place / "student", *resumed) == 0
    assert said(capsys) == result


def test_a_run_says_what_it_does_and_what_it_came_to(
    place: Path, tmp_path: Path, monkeypatch, capsys, caplog
) -> None:
    caplog.set_level("INFO", logger="qat")
    out = tmp_path / "my runs" / "one"
    words = flags(place, max_steps=3, grad_accum_steps=2, mlp_only=True, learn="scales")
    assert call(monkeypatch, "train", place / "student", *words, "--out", out) == 0
    count = TeacherCache.open(place / "cache").num_sequences("train")
    assert caplog.messages[:2] == [
        "training on cpu in fp32: 384 values learn (scales of 3 linears in the MLPs)",
        f"3 steps, each of 128 tokens (8 sequences of 16): {24 / count:.3g} passes over the "
        f"{count} sequences of {place / 'cache'}",
    ]
    shown, result = capsys.readouterr().out.rsplit("\n", 2)[:2]
    final = json.loads(result)["final"]
    evals = [row for row in read_json_lines(out / "metrics.jsonl") if row["kind"] == "eval"]
    before, after = evals[0], min(evals[1:], key=lambda row: row["kl_tail_nats"])
    (line,) = [line for line in shown.splitlines() if "KL, nats" in line]
    assert f"{before['kl_tail_nats']:.4f}" in line and f"{after['kl_tail_nats']:.4f}" in line
    assert f"MB: {final}\n" in shown
    verbs = [shlex.split(line) for line in shown.splitlines() if line.startswith("  qat ")]
    assert [words[1] for words in verbs] == ["eval", "generate", "export"]
    assert all(words[2] == final for words in verbs)
    # a command can be copied, although its path has a space in it
    capsys.readouterr()
    cached = verbs[0][: verbs[0].index("--teacher")]
    assert call(monkeypatch, *cached[1:]) == 0
    for command in verbs[1:]:
        assert call(monkeypatch, *command[1:]) == 0


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("look", 1), ("bad", 1)])
def test_strict_health_reaches_the_exit_code_after_the_student_is_written(
    place: Path, tmp_path: Path, monkeypatch, capsys, state: str, code: int
) -> None:
    checks = [Check("stalls", state, "1 (step 2)", "none"), Check("speed", "ok", "3 %", "10 %")]
    monkeypatch.setattr("qat.observe.health.health", lambda _: checks)
    words = ["train", place / "student", *flags(place, max_steps=1), "--out", tmp_path / "run"]
    assert call(monkeypatch, *words, "--strict-health") == code
    shown = capsys.readouterr()
    assert Path(json.loads(shown.out.splitlines()[-1])["final"]).is_dir()
    assert ("qat: stalls: 1 (step 2), expected none: see 'qat report" in shown.err) == bool(code)


def test_settings_of_rollouts_that_nobody_asked_for_are_told(
    place: Path, tmp_path: Path, monkeypatch, caplog
) -> None:
    words = ["train", tmp_path / "none", "--cache-dir", place / "cache", "--out", tmp_path / "run"]
    assert call(monkeypatch, *words, "--rollout-every", 4) == 1
    assert caplog.messages == ["rollout_every=4 does nothing without --on-policy SHARE"]


def test_a_run_directory_is_a_student_too(place: Path, tmp_path: Path) -> None:
    settings = config(place, max_steps=2, learn="scales")
    first = train_student(settings, str(place / "student"), tmp_path / "one", resume=False)
    second = train_student(settings, str(tmp_path / "one"), tmp_path / "two", resume=False)
    assert first.final.name != second.final.name or first.best != second.best


def test_mistakes_are_one_line(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    for tokens, message in (
        ([], "--cache-dir"),
        (["--cache-dir", "nowhere"], "nowhere"),
        (["--cache-dir", "{}/cache", "--learn", "bias"], "learn='bias': choose among weights"),
        (["--cache-dir", "{}/cache", "--mlp-only", "--e2e"], "exclude each other; give one"),
        (["--cache-dir", "{}/cache", "--loss", "tial"], "did you mean tail?"),
        (["--cache-dir", "{}/cache", "--batch-size", "100000"], "expected no more in one forward"),
        (["--cache-dir", "{}/cache", "--max-steps", "many"], "max_steps='many'"),
        (["--cache-dir", "{}/cache", "--max-stesp", "3"], "did you mean --max-steps?"),
    ):
        words = [token.format(place) for token in tokens]
        out = tmp_path / "run"
        assert call(monkeypatch, "train", place / "student", *words, "--out", out) == 1
        error = capsys.readouterr().err
        assert error.startswith("qat: ") and error.count("\n") == 1 and message in error
        assert not out.exists()


@pytest.mark.parametrize(
    ("lacking", "to"), [((), "gguf"), (("gguf",), "dense"), (("gguf", "dense"), "packed")]
)
def test_the_export_that_comes_next_holds_the_student(lacking, to, tmp_path, monkeypatch) -> None:
    lacks = {name: "cannot" if name in lacking else None for name in ("gguf", "dense", "packed")}
    monkeypatch.setattr("qat.export.targets.ships_to", lambda _: lacks)
    final = finished_as(tmp_path, {"format": FORMAT, "features": ["kv"], "kv": {"bits": 8}})
    *_, export = _next(final, "c", "The", {})
    assert export == ["qat", "export", str(final), "--to", to, "--out", f"{final}-{to}"]


@pytest.mark.parametrize(("features", "is_served"), [(["kv"], True), (["kv", "nsa"], False)])
def test_an_engine_comes_next_only_for_a_student_that_it_takes(
    features: list, tmp_path: Path, monkeypatch, *, is_served: bool
) -> None:
    lacks = dict.fromkeys(("gguf", "dense", "packed"))
    monkeypatch.setattr("qat.export.targets.ships_to", lambda _: lacks)
    final = finished_as(tmp_path, {"format": FORMAT, "features": features, "kv": {"bits": 8}})
    programs = [words[0] for words in _next(final, "c", "The", {})]
    assert programs == ["qat", "qat", *["vllm"] * is_served, "qat"]


def finished_as(place: Path, quantization: dict) -> Path:
    (place / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return place


def test_what_is_not_well_is_coloured_and_not_spelt(tmp_path: Path, monkeypatch, capsys) -> None:
    checks = [Check("speed", "look", "[red]half[/]", "10 %"), Check("memory", "ok", "1", "2")]
    monkeypatch.setattr("qat.observe.runs.read_directory", lambda run: run)
    monkeypatch.setattr("qat.observe.health.health", lambda found: checks)
    show_health(tmp_path)
    told = capsys.readouterr().out
    assert "look" in told and "[red]half[/]" in told
    assert "yellow" not in told and "memory" not in told


def test_a_hopeless_batch_is_refused_in_one_line(place, tmp_path, monkeypatch, capsys) -> None:
    words = flags(place, batch_size=10**6)
    assert call(monkeypatch, "train", place / "student", *words, "--out", tmp_path / "out") == 1
    told = capsys.readouterr()
    assert "Finding" not in told.out and "batch_size=1000000, but" in told.err
    assert "use --batch-size" in told.err.splitlines()[-1] and not (tmp_path / "out").exists()


def test_no_flag_is_broken_on_a_narrow_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    reason = "memory runs out before the end of the run"
    found = RunFinding("save_every_off", "error", "attention=something_long", reason, LESS_MEMORY)
    show_findings(Checked([found], None, is_long=True))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for flag in (
        "save_every_off",
        "--batch-size",
        "--grad-accum-steps,",
        "--gradient-checkpointing",
    ):
        assert flag in said
