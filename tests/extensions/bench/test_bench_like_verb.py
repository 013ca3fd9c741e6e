"""`qat bench --like RUN` as a user meets it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_case import build
from cli_case import call, said
from train_case import config, make_place

from qat.logs import HEARTBEAT, read_json_lines
from qat.train.start import train_student

QUICK = ["--steps", "2", "--warmup", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_place(tmp_path_factory.mktemp("like-verb"), layers=1)
    train_student(config(place), str(place / "student"), place / "run", resume=False)
    return place


def test_the_run_is_told_beside_its_step(place: Path, tmp_path, monkeypatch, capsys) -> None:
    same = ["--batch-size", "4", "--dtype", "fp32", "--device", "cpu"]  # what it has anyway
    words = ["--like", place / "run", *QUICK, *same, "--strict", "--out", tmp_path / "out"]
    assert call(monkeypatch, "bench", *words) == 0
    printed = capsys.readouterr().out
    last = json.loads(printed.splitlines()[-1])
    (row,) = read_json_lines(tmp_path / "out" / "results.jsonl")
    assert last["real_run_over_bench"] == pytest.approx(row["real_run_over_bench"], rel=1e-5)
    assert last["run_tokens_per_s"] == pytest.approx(row["run_tokens_per_s"], rel=1e-5)
    assert last["run_mfu_frac"] is row["run_mfu_frac"] is None  # of a device without known peak
    assert last["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=1e-5)
    assert f"{row['real_run_over_bench']:.3f}" in printed and "waiting for" in printed
    whole = json.loads((tmp_path / "out" / "results.json").read_text())
    assert whole["environment"]["config"]["like"] == str(place / "run")
    assert whole["environment"]["config"]["batch_size"] == 4


def test_other_rows_and_summaries_have_no_run(tmp_path: Path, monkeypatch, capsys) -> None:
    words = ["tiny", "--device", "cpu", "--seq-len", "8", *QUICK, "--out", tmp_path / "out"]
    assert call(monkeypatch, "bench", *words) == 0
    assert not any(name.startswith("run_") for name in said(capsys))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--batch-size", "8"], "batch_size=8 beside like=RUN, which has 4,"),
        (["--loss", "candidates"], "loss=candidates beside like=RUN, which has tail,"),
        (["--learn", "scales"], "learn=scales beside like=RUN, which has weights,scales,codebook"),
        (["--find-max-batch"], "find_max_batch=True beside like=RUN, which has no such setting"),
        (["--plan", "v5e"], "plan=v5e beside like=RUN, which has no such setting"),
        (["--seq-len", "16"], "seq_len=16 beside like=RUN, which has no such setting"),
        (["--shape", "tiny"], "shape=tiny beside like=RUN, which has no such setting"),
        (["STUDENT"], "student=STUDENT beside like=RUN, which has its own"),
        (["--cache-dir", "nowhere"], "nowhere is not there, expected a teacher cache"),
        (["--cache-dir", "OTHER"], "OTHER has seed=1, but the run in RUN was begun with 0"),
        (["--out", "CACHE"], "is not empty, expected a new or empty directory"),
    ],
)
def test_what_contradicts_the_run_is_refused(
    place: Path, tmp_path, monkeypatch, capsys, words: list[str], found: str
) -> None:
    paths = {"STUDENT": place / "student", "CACHE": place / "cache", "RUN": place / "run"}
    if "OTHER" in words:
        paths["OTHER"] = tmp_path / "other"
        build(paths["OTHER"], seed=1)
    words = [str(paths.get(word, word)) for word in words]
    for name, path in paths.items():
        found = found.replace(name, str(path))
    assert call(monkeypatch, "bench", "--like", place / "run", *QUICK, *words) == 1
    assert found in only_line(capsys)


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("qat: ")]
    return line


def _without(*names: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        for name in names:
            (run / name).unlink()

    return spoil


def _with_fact(name: str, value: object) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        facts = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**facts, name: value}))

    return spoil


def _with_recipe(old: str, new: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        text = (run / "recipe.toml").read_text()
        assert old in text
        (run / "recipe.toml").write_text(text.replace(old, new))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (shutil.rmtree, "RUN is not there, expected a run or a converted checkpoint"),
        (_without(HEARTBEAT), "like=RUN is a run of 'qat train' that has logged no speed"),
        (_without("recipe.toml"), "RUN/recipe.toml: No such file"),
        (_with_fact("device", "NVIDIA H100"), "like=RUN was trained on 1 x NVIDIA H100, expected"),
        (_with_fact("world_size", 8), "like=RUN was trained on 8 x cpu, expected 1 x cpu"),
        (_with_fact("student_fingerprint", "0"), "student_fingerprint="),
        (
            _with_recipe("trust_remote_code = false", "trust_remote_code = true"),
            "recipe.toml has trust_remote_code = True, which runs code of others",
        ),
        (_with_recipe("/cache", "/gone"), "/gone is not there, expected a teacher cache"),
    ],
)
def test_a_run_that_cannot_be_timed_is_one_line(
    place: Path, tmp_path, monkeypatch, capsys, spoil: Callable[[Path], None], found: str
) -> None:
    run = shutil.copytree(place / "run", tmp_path / "run")
    spoil(run)
    assert call(monkeypatch, "bench", "--like", run, *QUICK, "--out", tmp_path / "out") == 1
    assert found.replace("RUN", str(run)) in only_line(capsys)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_no_run(place: Path, monkeypatch, capsys) -> None:
    assert call(monkeypatch, "bench", "--like", place / "student", *QUICK) == 1
    assert str(place / "student") in only_line(capsys)
