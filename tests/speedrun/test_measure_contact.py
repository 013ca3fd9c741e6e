"""A finding counts as mended only where all of its tests ran and passed."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

SPEEDRUN = Path(__file__).resolve().parents[2] / "speedrun"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_b" name="test_c[1]"/>
<testcase classname="tests.a.test_b" name="test_c[2]"/>
<testcase classname="tests.a.test_b" name="test_d"><failure/></testcase>
<testcase classname="tests.a.test_b" name="test_e"><skipped/></testcase>
<testcase classname="tests.a.test_f" name="test_g"/>
<testcase classname="tests.a.test_f" name="test_g"><error/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    return importlib.import_module("measure_contact")


@pytest.mark.parametrize(
    ("test", "is_mended"),
    [
        ("tests/a/test_b.py::test_c", True),
        ("tests/a/test_b.py::test_c[1]", True),
        ("tests/a/test_b.py::test_d", False),
        ("tests/a/test_b.py::test_e", False),
        ("tests/a/test_b.py::test_missing", False),
        ("tests/a/test_b.py", False),
        ("tests/a/test_f.py::test_g", False),
    ],
)
def test_only_tests_that_ran_and_passed_count(
    test: str, is_mended: bool, tmp_path: Path, counted: ModuleType
) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert counted.is_shown(test, counted.outcomes(report)) == is_mended


def test_points_and_gpu_tests_are_counted(
    tmp_path: Path, counted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p xdist\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("def test_b(): pass\n")
    points, figures = tmp_path / "points.toml", tmp_path / "figures.jsonl"
    points.write_text(
        '[[point]]\nname = "shown"\ntests = ["tests/test_a.py"]\n'
        '[[point]]\nname = "untested"\ntests = []\n'
        '[[point]]\nname = "gone"\ntests = ["tests/test_a.py::test_not_there"]\n'
    )
    report = tmp_path / "gpu.xml"
    report.write_text(REPORT)
    named = ["points", points, "--figure", "fault_classes_open"]
    for words in (["points", points], named, ["gpu", report, "--device", "a GPU"]):
        counted.app([*map(str, words), "--figures", str(figures)], result_action="return_value")
    found = {line["figure"]: line for line in map(json.loads, figures.read_text().splitlines())}
    for figure in ("contact_findings_open", "fault_classes_open"):
        assert (found[figure]["value"], found[figure]["runs"]) == (2, 3)
        assert found[figure]["device"] != "a GPU"
    assert found["gpu_tests_failed"]["device"] == "a GPU"
    assert (found["gpu_tests_failed"]["value"], found["gpu_tests_passed"]["value"]) == (2, 2)
