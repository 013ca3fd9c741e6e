"""A finding counts as mended only where all of its tests ran and passed."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_b" name="test_c[1]"/>
<testcase classname="tests.a.test_b" name="test_c[2]"/>
<testcase classname="tests.a.test_b" name="test_d"><failure/></testcase>
<testcase classname="tests.a.test_b" name="test_e"><skipped/></testcase>
<testcase classname="tests.a.test_f" name="test_g"/>
<testcase classname="tests.a.test_f" name="test_g"><error/></testcase>
</testsuite></testsuites>"""


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
    test: str, is_mended: bool, tmp_path, monkeypatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "speedrun"))
    counted = importlib.import_module("measure_contact")
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert counted.is_shown(test, counted.outcomes(report)) == is_mended


def test_points_and_gpu_tests_are_counted(tmp_path: Path) -> None:
    points, figures = tmp_path / "points.toml", tmp_path / "figures.jsonl"
    points.write_text(
        '[[point]]\nname = "shown"\ntests = ["tests/test_folders.py"]\n'
        '[[point]]\nname = "untested"\ntests = []\n'
        '[[point]]\nname = "gone"\ntests = ["tests/test_folders.py::test_not_there"]\n'
    )
    report = tmp_path / "gpu.xml"
    report.write_text(REPORT)
    for words in (["points", points], ["gpu", report, "--device", "a GPU"]):
        command = [sys.executable, ROOT / "speedrun/measure_contact.py", *words]
        subprocess.run([*command, "--figures", figures], check=True, capture_output=True)
    found = {line["figure"]: line for line in map(json.loads, figures.read_text().splitlines())}
    assert found["contact_findings_open"]["value"] == 2
    assert found["contact_findings_open"]["runs"] == 3
    assert (
        found["gpu_tests_failed"]["device"] == "a GPU" != found["contact_findings_open"]["device"]
    )
    assert (found["gpu_tests_failed"]["value"], found["gpu_tests_passed"]["value"]) == (2, 2)
