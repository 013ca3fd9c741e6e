"""A count of what strangers or attackers found: findings whose tests fail, failed GPU tests.

    python speedrun/measure_contact.py points POINTS.toml --figures FIGURES.jsonl --reports gpu.xml
    python -m pytest -m gpu -p no:benchmark -n 6 -o junit_family=xunit2 --junitxml=gpu.xml
    python speedrun/measure_contact.py gpu gpu.xml --figures FIGURES.jsonl
    python speedrun/measure_contact.py suite suite.xml --figure suite_failed_avx2 --figures ...
    python speedrun/measure_contact.py suite-time suite.xml --figures FIGURES.jsonl

`--commit` and `--device` say where the tests ran if that was another checkout or machine.

`--figure` names the figure of another kind of findings: `fault_classes_open`.

POINTS.toml has a table `[[point]]` for each finding: its name, and the tests that show it mended.
A finding is open while it names no test, or one that fails, is skipped or is not there. Tests that
need a GPU do not run here: they count as in --reports, pytest's JUnit reports of a GPU.
"""

import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Literal

from cyclopts import App
from figures import ROOT, record

app = App(help=__doc__)
State = Literal["passed", "failed", "skipped"]
MARKS = "not gpu and not xla"
"""Pytest markers of the tests to run; unlike the project's default they include slow tests."""


@app.command
def points(
    file: Path,
    *,
    figures: Path,
    reports: tuple[Path, ...] = (),
    figure: str = "contact_findings_open",
) -> None:
    """Run the tests that FILE names and record how many of its findings are still open."""
    found = tomllib.loads(file.read_text(encoding="utf-8"))["point"]
    states = {name: state for report in reports for name, state in outcomes(report).items()}
    here = run({test for point in found for test in point["tests"]})
    states |= {name: state for name, state in here.items() if state != "skipped"}
    still_open = [
        point["name"]
        for point in found
        if not point["tests"] or not all(is_shown(test, states) for test in point["tests"])
    ]
    for name in still_open:
        print("open:", name)
    print(f"{len(found) - len(still_open)} of {len(found)} findings are mended")
    if not found:
        raise SystemExit(f"{file} names no finding; expected tables [[point]]")
    record(figures, figure, len(still_open), "findings", "0", runs=len(found))


@app.command
def gpu(
    reports: list[Path], *, figures: Path, commit: str | None = None, device: str | None = None
) -> None:
    """Record how many of the GPU tests in pytest's JUnit REPORTS failed, and how many passed."""
    states = [state for report in reports for state in outcomes(report).values()]
    passed, failed = (states.count(state) for state in ("passed", "failed"))
    if not passed:
        raise SystemExit("no GPU test passed, so nothing was measured; run pytest -m gpu on a GPU")
    print(f"{passed} passed, {failed} failed, {states.count('skipped')} skipped")
    told = {"commit": commit, "device": device}
    measured = {name: value for name, value in told.items() if value is not None}
    for figure, count, goal in (("failed", failed, "0"), ("passed", passed, "")):
        name = f"gpu_tests_{figure}"
        record(figures, name, count, "tests", goal, runs=len(states), measured=measured)


@app.command
def suite(report: Path, *, figure: str, figures: Path) -> None:
    """Record how many tests of a suite in pytest's JUnit REPORT failed, as FIGURE."""
    states = [*outcomes(report).values()]
    failed = states.count("failed")
    if "passed" not in states:
        raise SystemExit(f"{report}: no test passed, so nothing was measured; run the suite again")
    print(f"{states.count('passed')} passed, {failed} failed, {states.count('skipped')} skipped")
    record(figures, figure, failed, "tests", "0", runs=len(states))


@app.command
def suite_time(report: Path, *, figures: Path) -> None:
    """Record how long a suite took by pytest's JUnit REPORT, collection included, as `suite_s`."""
    suite = next(xml.parse(report).getroot().iter("testsuite")).attrib
    print(f"{suite['tests']} tests in {suite['time']} s")
    record(figures, "suite_s", round(float(suite["time"])), "s", "<= 220", runs=int(suite["tests"]))


def run(named: set[str]) -> dict[str, State]:
    """Run the tests that match `named` and return their states; other names are left out."""
    pytest = [sys.executable, "-m", "pytest", "-m", MARKS]
    files = sorted({name.split("::")[0] for name in named if (ROOT / name.split("::")[0]).exists()})
    listing = subprocess.run(
        [*pytest, "-n", "0", "--collect-only", *files], cwd=ROOT, capture_output=True, text=True
    )
    there = [line for line in listing.stdout.splitlines() if "::" in line]
    chosen = [test for test in there if any(is_part(test, name) for name in named)]
    if not chosen:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "points.xml"
        workers = str(min(2, len(chosen)))
        options = ["-n", workers, "-o", "junit_family=xunit2", f"--junitxml={report}"]
        subprocess.run([*pytest, *options, *chosen], cwd=ROOT, check=False)
        return outcomes(report)


def outcomes(report: Path) -> dict[str, State]:
    """Return the state of each test in a JUnit report by pytest's name `tests/x/test_y.py::z`."""
    found: dict[str, State] = {}
    for case in xml.parse(report).getroot().iter("testcase"):
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        tags = {each.tag for each in case}
        if tags & {"failure", "error"}:
            found[name] = "failed"
        elif found.get(name) != "failed":
            found[name] = "skipped" if "skipped" in tags else "passed"
    return found


def is_shown(test: str, states: dict[str, State]) -> bool:
    """Return whether a test, or all its parameters, or all tests of a file, ran and passed."""
    ended = [state for name, state in states.items() if is_part(name, test)]
    return bool(ended) and set(ended) == {"passed"}


def is_part(test: str, name: str) -> bool:
    """Return whether `test` is `name`, one of its parameters, or in the file `name`."""
    return test == name or test.startswith((f"{name}[", f"{name}::"))


if __name__ == "__main__":
    app()
