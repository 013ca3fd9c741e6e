"""A suite in a report: its table and its chart, alone and beside what was trained."""

from pathlib import Path

import pytest
from cli_case import call, said
from matplotlib.figure import Figure
from observe.synthetic import write_run

from qat.extensions.suite.compare import Judged
from qat.extensions.suite.results import COLUMNS, Results, read_results
from qat.extensions.suite.section import section
from qat.files import write_atomically
from qat.observe.page import write_report

SIDES = {"student": "students/q2", "teacher": "models/teacher"}


def results(sides: dict[str, str] = SIDES) -> Results:
    """Two tasks of four questions: of three right answers the student keeps two and one."""
    right = Judged(1.0, "a", [1, 2])
    wrong = Judged(0.0, "b", [1, 3])
    teacher = dict(enumerate([right, right, right, wrong]))
    students = {
        "code": dict(enumerate([right, right, wrong, wrong])),
        "sums": dict(enumerate([right, wrong, wrong, wrong])),
    }
    found = {"student": students, "teacher": dict.fromkeys(students, teacher)}
    return Results.of({side: found[side] for side in sides}, sides, {}, suite="mine.toml")


def write_suite(folder: Path, sides: dict[str, str] = SIDES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "suite.json", results(sides).model_dump_json())
    return folder / "suite.json"


def test_the_file_holds_what_the_table_shows(tmp_path: Path) -> None:
    found = read_results(write_suite(tmp_path))
    assert found == results()
    code, sums, both = (dict(zip(COLUMNS, row, strict=True)) for row in found.rows())
    assert code["teacher, %"].startswith("75.0 +- ") and code["student, %"].startswith("50.0 +- ")
    assert (code["flips"], sums["flips"]) == ("-1 +0", "-2 +0")
    assert (code["same, %"], code["shared tokens"]) == ("75.0", "2 (1.8)")
    assert both["task"] == "mean" and both["retention, %"].startswith("50.0 +- ")


def test_bars_are_as_long_as_the_scores(tmp_path: Path) -> None:
    (chart,) = section(write_suite(tmp_path)).charts
    axes = Figure().subplots()
    chart.paint(axes)
    assert sorted(bar.get_width() for bar in axes.patches) == [25.0, 50.0, 75.0, 75.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["code", "sums"]
    teacher, student = axes.patches[0], axes.patches[2]
    assert (teacher.get_width(), student.get_width()) == (75.0, 50.0)
    assert teacher.get_y() < student.get_y() < axes.patches[1].get_y()


def test_a_student_without_a_teacher_has_a_section(tmp_path: Path) -> None:
    found = section(write_suite(tmp_path, {"student": "students/q2"}))
    assert [row[2:3] + row[4:] for row in found.rows] == [[""] * 5] * 2
    found.charts[0].render("svg")


def test_a_page_about_suites_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    for name in ("one", "two"):
        write_suite(tmp_path / name)
    page = tmp_path / "page.html"
    assert call(monkeypatch, "report", tmp_path / "one", tmp_path / "two", "--out", page) == 0
    pictures = [Path(path).name for path in said(capsys)["pictures"]]
    assert pictures == ["page-suite.png", "page-suite-2.png"]
    html = page.read_text()
    assert html.count("Tasks: q2 beside teacher") == 2 and html.count("75.0 +- ") == 4


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_holds_a_suite_shows_both(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    write_suite(tmp_path / "run")
    html = write_report([tmp_path / "run"], tmp_path / "page.html").page.read_text()
    assert "Tasks: q2" in html and "Run: run" in html


def test_a_damaged_suite_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    file = write_suite(tmp_path)
    for content in ("{", "[]", file.read_text().replace('"format":1', '"format":2')):
        file.write_text(content)
        assert call(monkeypatch, "report", tmp_path) == 1
        error = capsys.readouterr().err.strip()
        assert str(file) in error and "\n" not in error
