"""`qat bench record`: what it freezes, and what it refuses."""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from cli_case import call

from qat.errors import ConfigError
from qat.extensions.lab.compare import compare_files, read_cases, write_record
from qat.extensions.lab.leaderboard import read_records
from qat.logs import read_json_lines

ENVIRONMENT = {"command": "qat bench tiny", "commit": "a" * 40, "device": "cpu", "torch": "2.9"}
CONFIG = {"steps": 20, "dtype": "fp32"}


def row(case: str, mean: float, seed: int = 0, **more: object) -> dict[str, object]:
    samples = np.random.default_rng(seed).normal(mean, 0.01, 9).tolist()
    facts = {"kind": "step", "case": case, "unit": "s", "device": "cpu", "dirty": False}
    return {**facts, "samples": samples, "tokens_per_s": 100 / mean, "peak_gib": 0.5, **more}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    where = tmp_path / "result"
    rows = [row("step, batch 2", 1.0), row("step, batch 2", 1.1, 1), row("step, batch 8", 2.0)]
    fill(where, *rows)
    whole = {"environment": {**ENVIRONMENT, "config": CONFIG}, "rows": rows}
    (where / "results.json").write_text(json.dumps(whole))
    return where


def fill(where: Path, *rows: dict[str, object]) -> None:
    where.mkdir(exist_ok=True)
    (where / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def test_a_record_holds_what_it_takes_to_judge_it(source, tmp_path, monkeypatch, capsys) -> None:
    flags = ["--from", str(source), "--records", str(tmp_path / "r"), "--date", "2026-01-31"]
    assert call(monkeypatch, "bench", "record", "two-steps", *flags) == 0
    out = tmp_path / "r" / "2026-01-31_two-steps"
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"record": str(out)}
    assert (out / "results.jsonl").read_text() == (source / "results.jsonl").read_text()
    assert tomllib.loads((out / "recipe.toml").read_text()) == {"bench": CONFIG}
    assert json.loads((out / "environment.json").read_text())["commit"] == "a" * 40
    assert (out / "medians.svg").read_text().startswith("<?xml")
    page = (out / "README.md").read_text()
    for text in ("# 2026-01-31: two steps", "qat bench tiny", "nothing changed besides", "| 2 |"):
        assert text in page
    samples = 9 * (1.0 + 1.1 + 2.0)  # about, and 100 tokens each
    hours, tokens = re.search(r"took ([\d.]+) hours and ([\d,]+) tokens", page).groups()
    assert float(hours) == pytest.approx(samples / 3600, rel=0.02)
    assert int(tokens.replace(",", "")) == pytest.approx(27 * 100, rel=0.02)
    assert "between runs of a case" in page and "medians.svg" in page
    assert compare_files(source, out).exit_code == 0  # a record can be compared with
    assert {entry.figure.figure for entry in read_records(tmp_path / "r")} == {
        *("step_batch_2_s", "step_batch_2_tok_s", "step_batch_8_s", "step_batch_8_tok_s")
    }


def test_a_figure_is_the_median_of_runs(source: Path, tmp_path: Path) -> None:
    out = write_record("x", source, tmp_path / "r")
    found = {line["figure"]: line for line in read_json_lines(out / "figures.jsonl")}
    two = found["step_batch_2_s"]
    medians = read_cases(source)["step, batch 2"].medians
    assert two["value"] == pytest.approx(np.median(medians)) and two["runs"] == 2
    assert two["spread"] == pytest.approx(np.std(medians, ddof=1))
    assert two["samples"] == 18 and two["low"] < two["high"]
    assert found["step_batch_8_s"]["spread"] is None and two["commit"] == "a" * 12


def test_figures_and_recipes_of_the_result_come_along(source: Path, tmp_path: Path) -> None:
    (source / "figures.jsonl").write_text('{"figure": "mine", "value": 1}\n')
    (source / "sweep.toml").write_text('name = "mine"\n')
    out = write_record("x", source, tmp_path / "r")
    assert read_json_lines(out / "figures.jsonl")[0] == {"figure": "mine", "value": 1}
    assert (out / "sweep.toml").read_text() == 'name = "mine"\n'
    assert not (out / "recipe.toml").exists()


def test_a_sweep_brings_its_recipe_and_all_its_commits(source: Path, tmp_path: Path) -> None:
    fill(source, row("x", 1.0, commit="a" * 40), row("x", 1.0, commit="b" * 40))
    recipe = {"name": "matrix", "student": None, "groups": [{"name": "x", "steps": 2}]}
    (source / "results.json").write_text(json.dumps({"recipe": recipe, "rows": []}))
    out = write_record("x", source, tmp_path / "r")
    found = tomllib.loads((out / "recipe.toml").read_text())
    assert found == {"name": "matrix", "groups": [{"name": "x", "steps": 2}]}
    assert json.loads((out / "environment.json").read_text())["device"] == "cpu"
    commits = read_json_lines(out / "figures.jsonl")[0]["commit"]
    assert commits == f"{'a' * 12} {'b' * 12}"


@pytest.mark.parametrize(
    ("dirty", "words", "commit"),
    [
        (True, "the tree had changes that are in no commit", "a" * 12 + "-dirty"),
        (None, "whether the tree had changes besides is not known", "a" * 12),
    ],
)
def test_a_dirty_tree_is_said(dirty, words, commit, source: Path, tmp_path: Path) -> None:
    fill(source, row("x", 1.0, dirty=dirty))
    out = write_record("x", source, tmp_path / "r")
    assert words in (out / "README.md").read_text()
    assert read_json_lines(out / "figures.jsonl")[0]["commit"] == commit


def test_rows_alone_are_enough(source: Path, tmp_path: Path) -> None:
    (source / "results.json").unlink()
    out = write_record("x", source / "results.jsonl", tmp_path / "r")
    assert json.loads((out / "environment.json").read_text()) == {"device": "cpu", "dirty": False}


@pytest.mark.parametrize(
    ("rows", "slug", "day", "message"),
    [
        ([row("x", 1.0, samples=[1.0])], "x", None, "case=x has 1 samples, expected at least 3 re"),
        ([{"case": "x"}], "x", None, "no raw samples, expected rows with `samples`"),
        ([row("x", 1.0)], "X y", None, "slug=X y, expected two or three lower-case words"),
        ([row("x", 1.0)], "x", "today", "date=today, expected a day; write it as 2026-01-31"),
    ],
)
def test_what_is_no_record_is_refused(rows, slug, day, message, source, tmp_path) -> None:
    fill(source, *rows)
    with pytest.raises(ConfigError, match=message):
        write_record(slug, source, tmp_path / "r", day)
    assert not (tmp_path / "r").exists()


def test_a_record_is_never_overwritten(source: Path, tmp_path: Path) -> None:
    write_record("x", source, tmp_path / "r", "2026-01-31")
    with pytest.raises(
        ConfigError, match="2026-01-31_x exists, expected a new record; choose anot"
    ):
        write_record("x", source, tmp_path / "r", "2026-01-31")
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["2026-01-31_x"]
