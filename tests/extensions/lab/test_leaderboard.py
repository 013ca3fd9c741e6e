"""`qat report --leaderboard`: every record's figures on one page, which asks no server."""

import json
import re
from pathlib import Path

import pytest
from cli_case import call

from qat.errors import ConfigError
from qat.extensions.lab.leaderboard import (
    RecordFigure,
    best_of,
    by_device,
    by_figure,
    curves,
    read_records,
    write_leaderboard,
)

ROOT = Path(__file__).parents[3]
GPU, CPU = "NVIDIA H200", "cpu, 2 threads, x86_64"


def line(figure: str, value: float, device: str = GPU, **more: object) -> str:
    keys = {"unit": "s", "goal": "<= 2", "command": "python <measure>.py", "commit": "abc"}
    return json.dumps({"figure": figure, "value": value, "device": device, **keys, **more})


def write(records: Path, name: str, *lines: str) -> None:
    (records / name).mkdir(parents=True)
    (records / name / "figures.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    where = tmp_path / "records"
    write(where, "2026-02-01_second", line("step", 1.5, spread=0.1, runs=3), line("max", 9.0))
    write(where, "2026-01-01_first", line("step", 3.0), line("help", 0.3, CPU))
    return where


def test_entries_are_by_device_and_in_time(records: Path) -> None:
    devices = by_device(read_records(records))
    assert list(devices) == [GPU, CPU]
    steps = by_figure(devices[GPU])["step"]
    assert [entry.day for entry in steps] == ["2026-01-01", "2026-02-01"]
    assert best_of(steps) is steps[1]
    assert [chart.title for chart in curves("gpu", devices[GPU])] == ["step"]


def test_the_page_shows_every_figure_and_is_self_contained(
    records, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "new" / "page.html"
    assert call(monkeypatch, "report", "--leaderboard", "--records", records, "--out", out) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"page": str(out)}
    html = out.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href|srcset)=["'](?!data:)""", html)
    assert "4 figures of 2 records on 2 devices" in html and "1 of 3 goals met" in html
    for text in (GPU, CPU, "1.50 +- 0.100", "2026-02-01 second", "python &lt;measure&gt;.py"):
        assert text in html
    assert html.count("<figure") == 1 and html.count('class="best"') == 1


def test_a_goal_is_met_by_its_bound() -> None:
    for goal, value, is_met in (
        ("== 0", 0.0, True),
        ("== 0", 0.1, False),
        ("<= 240", 240, True),
        ("< 1", 1, False),
        (">= 20, all byte-equal", 19, False),
        ("> 1e-3", 0.01, True),
        ("stated", 1, None),
        ("", 1, None),
    ):
        assert RecordFigure(figure="x", value=value, device=GPU, goal=goal).is_met is is_met


def test_a_records_last_word_counts(tmp_path: Path) -> None:
    write(tmp_path, "2026-01-01_x", line("step", 3.0), line("step", 2.0))
    (found,) = by_figure(read_records(tmp_path))["step"]
    assert found.figure.value == 2.0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("2026-01-01_x", "nothing", "'nothing' is no JSON object; write it by a script"),
        ("2026-01-01_x", line("x", 1).replace('"value"', '"v"'), "value: Field required; see spee"),
        ("x", line("x", 1), "x is no record's name; call it YYYY-MM-DD_SLUG"),
        ("2026-01-01_x", "", "has no DATE_SLUG/figures.jsonl, expected records; make one with"),
    ],
)
def test_what_cannot_be_read_is_refused(name, text, message, tmp_path: Path) -> None:
    if text:
        write(tmp_path / "records", name, text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        write_leaderboard(tmp_path / "records", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--leaderboard"], "no --out with --leaderboard, expected --records and --out alone"),
        (["run", "--leaderboard", "--out", "p.html"], "RUNS=run with --leaderboard, expected"),
    ],
)
def test_a_mistake_is_one_line(tokens, message, monkeypatch, capsys) -> None:
    assert call(monkeypatch, "report", *tokens) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
