"""`qat run` and `qat demo`: one engine, every stage once, whatever stops it."""

import html
import json
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import without_extras
from cache_case import TOKENIZER, texts
from cli_case import call
from tiny import tiny_model

from qat.cli import run_verb
from qat.cli.demo import demo
from qat.errors import ConfigError, ExportError, Stopped
from qat.observe.page import Written

FEW = {"--max-steps": 4, "--sequence-length": 16, "--device": "cpu", "--dtype": "fp32"}
STAGES = ("cache", "convert", "train", "eval", "export")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model with its tokenizer, and a text."""
    place = tmp_path_factory.mktemp("run")
    tiny_model(num_hidden_layers=1).save_pretrained(place / "model")
    TOKENIZER.save_pretrained(place / "model")
    (place / "texts.txt").write_text("\n\n".join(texts(150)))
    (place / "recipe.toml").write_text(
        "[convert]\ngroup_size = 16\ncalibration-sequences = 8\n[train]\nbatch_size = 4\n"
    )
    return place


def words(place: Path, out: Path, *more: object) -> list[str]:
    flags = {"--data": place / "texts.txt", "--out": out, **FEW}
    flags |= dict(zip(more[::2], more[1::2], strict=True))
    return ["run", str(place / "model"), *(str(word) for pair in flags.items() for word in pair)]


def go(place: Path, out: Path, *more: object) -> dict:
    return run_verb(words(place, out, *more), place / "recipe.toml")


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    go(place, place / "finished")
    return place / "finished"


def test_it_makes_all_that_it_says(finished: Path) -> None:
    recipe = tomllib.loads((finished / "recipe.toml").read_text())
    assert recipe.keys() == {"run", *STAGES}
    assert recipe["train"]["max_steps"] == 4 and recipe["convert"]["group_size"] == 16
    assert recipe["cache"]["held_out"] == 0.2 and recipe["cache"]["num_sequences"] == 16
    exams = json.loads((finished / "eval.json").read_text())
    assert [*exams] == ["teacher", "converted", "trained"]
    assert exams["trained"]["megabytes"] < exams["teacher"]["megabytes"]
    assert (finished / "export/packed/model.safetensors").exists()
    page = (finished / "report.html").read_text()
    for found in exams.values():  # the page shows what the terminal does
        assert f"<td>{found['top1_frac']:.1%}</td><td>{found['kl_nats']:.4f}</td>" in page
    sample = json.loads((finished / "samples.json").read_text())
    assert [*sample["texts"]] == ["teacher", "converted", "trained"]
    assert f"<b>prompt</b>  {html.escape(sample['prompt'])}" in page
    assert "<h1>model, trained on texts.txt</h1>" in page


def test_a_second_call_does_nothing_again(finished: Path, place: Path, capsys) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*.safetensors")}
    assert go(place, finished)["kl_nats"]["teacher"] == 0
    said = " ".join(capsys.readouterr().out.split())
    for stage in STAGES:
        assert f"{stage}: done before" in said or f"{stage} trained: done before" in said
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*.safetensors")} == before


def test_its_recipe_is_one(finished: Path, place: Path, monkeypatch) -> None:
    again = ["--recipe", str(finished / "recipe.toml"), "run", "--out", str(finished)]
    assert call(monkeypatch, *again) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--to", "q4a4"], r"\[convert\] to='q4a4', but that stage is done in .* with 'q2a4'"),
        (["--max-steps", 9], r"\[train\] max_steps=9, but that stage is done"),
        (["--sequence-length", 8], r"\[cache\] sequence_length=8, but that stage is done"),
        (["--data", "other.txt"], r"\[run\] data='other.txt', but that stage is done"),
        (["--for", "gguf"], r"\[run\] for=\['gguf'\], but that stage is done"),
        (["--max-steps", 0], r"\[train\] .*max_steps"),
    ],
)
def test_other_settings_of_what_is_done_are_refused(finished, place, more, message) -> None:
    with pytest.raises(ConfigError, match=message):
        go(place, finished, *more)


def test_a_recipe_sets_no_stage_against_another(place: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[train]\ncache_dir = "elsewhere"\n')
    with pytest.raises(ConfigError, match=r"\[train\] cache_dir is for 'qat run' itself to say"):
        run_verb(words(place, tmp_path / "out"), recipe)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_behind", [True, False])
@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("[run]\nlrr = 1\n", "[run] has no key 'lrr'"),
        ("[runn]\nlr = 1\n", "no verb is called [runn]; did you mean 'run'?"),
        ("[train]\nlrr = 1\n", "[train] has no key 'lrr'; did you mean 'lr'?"),
        ("[train]\ntrust_remote_code = true\n", "which runs code of others"),
        ("[run\n", "is not TOML"),
        ('[run]\ndata = "nowhere.txt"\n', "nowhere.txt"),
    ],
)
def test_a_recipe_is_checked_and_read_wherever_it_stands(
    place: Path, tmp_path: Path, monkeypatch, capsys, recipe: str, message: str, is_behind: bool
) -> None:
    (tmp_path / "r.toml").write_text(recipe)
    run = ["run", place / "model", "--out", tmp_path / "out"]
    given = ["--recipe", tmp_path / "r.toml"]
    assert call(monkeypatch, *(run + given if is_behind else given + run)) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "--data is missing" not in said
    assert not (tmp_path / "out").exists()


def test_a_directory_of_others_is_refused_and_stays(
    place: Path, tmp_path: Path, monkeypatch
) -> None:
    mine = tmp_path / "mine" / "thesis" / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("ten years of work")
    (tmp_path / "mine" / "demo.txt").write_text("x")
    for verb in (words(place, tmp_path / "mine"), ["demo", "--out", str(tmp_path / "mine")]):
        with pytest.raises(ConfigError, match="mine is not empty"):
            run_verb(verb)
    assert mine.read_text() == "ten years of work"
    assert call(monkeypatch, "demo", "--out", tmp_path / "new", "--steps", 0) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "number", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)), 2, 3, 4], ids=STAGES
)
def test_stopped_behind_any_stage_it_goes_on(
    finished, place, tmp_path, monkeypatch, number
) -> None:
    real, verb, out = run_verb, STAGES[number], tmp_path / "out"

    def stopped(tokens: list[str]) -> dict:
        found = real(tokens)
        if tokens[0] == verb:
            raise KeyboardInterrupt
        return found

    shutil.copytree(finished, out)
    for name in ("cache", "converted", "trained", "eval.json", "export")[number:]:
        shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(import_module("qat.cli.run"), "run_verb", stopped)
        with pytest.raises(Stopped, match=f"stage {verb}.* was stopped; the same command goes on"):
            real(words(place, out), place / "recipe.toml")
    monkeypatch.setattr("qat.observe.page.write_report", lambda runs, page: Written(page, []))
    go(place, out)
    for name in ("converted", "export/packed"):
        file = f"{name}/model.safetensors"
        assert (out / file).read_bytes() == (finished / file).read_bytes()
    ours, theirs = (json.loads((each / "eval.json").read_text()) for each in (out, finished))
    assert ours["trained"]["kl_nats"] == theirs["trained"]["kl_nats"]


@pytest.mark.slow
def test_it_needs_no_extra(place: Path, tmp_path: Path) -> None:
    alone = Path(without_extras.__file__)
    command = [sys.executable, "-W", "error", alone, "--recipe", place / "recipe.toml"]
    command += words(place, tmp_path / "out", "--for", "dense")
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "out/export/dense/model.safetensors").is_file()
    assert (tmp_path / "out/report.html").is_file()


def test_a_library_that_a_target_needs_is_asked_for_before_any_work(
    place: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ExportError, match=r"^gguf does not load .*; run: .*\[ship\]"):
        go(place, tmp_path / "out", "--for", "gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(finished: Path, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "qat", *words(place, out), "--recipe", place / "recipe.toml"]
    for seconds in (6, 9, 12, 15):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    go(place, out)
    file = "export/packed/model.safetensors"
    assert (out / file).read_bytes() == (finished / file).read_bytes()


@pytest.mark.slow
def test_the_demo_goes_on_and_says_what_its_page_says(place: Path, tmp_path: Path) -> None:
    found = demo(out=tmp_path / "demo", teacher=place / "model", steps=4)
    assert [*found["kl_nats"]] == ["teacher", "converted", "trained"]
    page = found["report"].read_text()
    for name, kl in found["kl_nats"].items():
        assert f"<td>{name}</td>" in page and f"<td>{kl:.4f}</td>" in page
    assert (
        demo(out=tmp_path / "demo", teacher=place / "model", steps=4)["kl_nats"]
        == (found["kl_nats"])
    )
    with pytest.raises(ConfigError, match=r"\[demo\] steps=5, but that stage is done"):
        demo(out=tmp_path / "demo", teacher=place / "model", steps=5)
