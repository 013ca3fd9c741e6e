"""How many small mistakes in the core the tests notice: mutants killed, survived, equivalent.

A mutant is the project with one change: another comparison, + for -, a number one larger, `or` for
`and`, a `not` or a statement dropped, nothing returned, nothing raised. Four steps, of which the
first alone needs mutmut (pip install mutmut):

    python speedrun/measure_mutants.py draw MUTANTS.json
    python -m pytest -n auto --cov=qat --cov-context=test --cov-report= --junitxml=map.xml
    python speedrun/measure_mutants.py run MUTANTS.json OUTCOMES.jsonl --workers 32
    python speedrun/measure_mutants.py count OUTCOMES.jsonl --equivalent FILE.toml --figures FILE

`draw` takes a seeded sample. `run` works in copies of the project, where it runs those tests that
passed and ran the mutant's line, until one fails; that one must pass again without the mutant, else
the outcome is `unsure`, which counts as survived. Killed mutants are not run again. EQUIVALENT
lists mutants that no test can tell from the project, each a table [NAME] with `is`, the change as
`count` prints it, and a `reason`.
"""

import ast
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as xml
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

from coverage import CoverageData
from cyclopts import App
from figures import ROOT, record
from measure_contact import outcomes

app = App(help=__doc__)
SIZE = 240
GOAL = 92
TESTS, TESTS_S = 300, 40.0
"""How many tests a mutant may have, and how long they may take together."""
START_S = 60
MEMORY = 16 * 2**30
"""Bytes that a mutant may take: one that allocates for ever must not stop the others."""


class Mutant(NamedTuple):
    """A change of some lines of a file."""

    name: str
    file: str
    line: int
    kind: str
    before: str
    after: str

    def __str__(self) -> str:
        """Where it is, and what it does to which line."""
        return f"{self.file}:{self.line} {self.kind}: {flat(self.before)} -> {flat(self.after)}"


@app.command
def draw(out: Path, *, size: int = SIZE, seed: int = 19) -> None:
    """Write a sample of mutants to OUT."""
    from code_mutants import drawn  # needs mutmut

    out.write_text(json.dumps([each._asdict() for each in drawn(size, seed)], indent=1), "utf-8")


@app.command
def run(
    mutants: Path,
    out: Path,
    *,
    coverage: Path = Path(".coverage"),
    report: Path = Path("map.xml"),
    workers: int = 2,
) -> None:
    """Run the tests of each mutant, and add the outcomes to OUT."""
    drawn = [Mutant(**each) for each in json.loads(mutants.read_text(encoding="utf-8"))]
    killed = {name for name, each in read(out).items() if is_killed(each)}
    tests = Tests(coverage, report)
    with tempfile.TemporaryDirectory() as folder:
        first = copy_project(Path(folder) / "0")
        copies: queue.Queue[Path] = queue.Queue()
        copies.put(first)
        for number in range(1, workers):
            copies.put(Path(shutil.copytree(first, Path(folder) / str(number), symlinks=True)))
        with ThreadPoolExecutor(workers) as pool, out.open("a", encoding="utf-8") as file:
            left = [each for each in drawn if each.name not in killed]
            jobs = [pool.submit(judge, each, tests.of(each), copies) for each in left]
            for job in as_completed(jobs):
                outcome = job.result()
                print(f"{outcome['outcome']:9s}{outcome['seconds']:6.1f} s  {outcome['is']}")
                file.write(json.dumps(outcome) + "\n")
                file.flush()


class Tests:
    """Which tests passed, how long they took, and which lines they ran."""

    def __init__(self, coverage: Path, report: Path) -> None:
        passed = {name for name, state in outcomes(report).items() if state == "passed"}
        self._took = {name: s for name, s in seconds(report).items() if name in passed}
        data = CoverageData(str(coverage))
        data.read()
        self._runs: dict[str, dict[int, set[str]]] = defaultdict(dict)
        for file in data.measured_files():
            name = f"qat/{file.rpartition('/qat/')[2]}"
            for line, contexts in data.contexts_by_lineno(file).items():
                tests = {each.rpartition("|")[0] for each in contexts if "|" in each}
                self._runs[name][line] = tests & self._took.keys()

    def of(self, mutant: Mutant) -> dict[str, float]:
        """Seconds of the tests to run, those of mirrored files first, until the time is over."""
        floor, name = Path(mutant.file).parent.name, Path(mutant.file).stem
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in sorted(self._running(mutant), key=lambda test: self._took[test]):
            by_file[test.partition("::")[0]].append(test)

        def rank(file: str) -> tuple[bool, bool, float]:
            is_mirrored = file.endswith(f"/test_{name}.py")
            total_s = sum(self._took[test] for test in by_file[file])
            return not is_mirrored, f"/{floor}/" not in file, total_s

        found, left_s = {}, TESTS_S
        for test in (test for file in sorted(by_file, key=rank) for test in by_file[file]):
            left_s -= self._took[test]
            if found and (left_s < 0 or len(found) == TESTS):
                break
            found[test] = self._took[test]
        return found

    def _running(self, mutant: Mutant) -> set[str]:
        """The tests that run a line; if it runs on import only, those that run any of the file."""
        runs = self._runs[mutant.file]
        tree = ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        begins = [
            each.body[0].lineno
            for each in functions
            if each.body[0].lineno <= mutant.line <= each.end_lineno
        ]
        if not begins:
            return set().union(*runs.values())
        above = range(mutant.line, max(begins) - 1, -1)  # an expression may go on for some lines
        return next((runs[line] for line in above if line in runs), set())


def copy_project(to: Path) -> Path:
    """A copy without history and environments, with the package compiled."""
    ignored = shutil.ignore_patterns(".git", ".venv*", ".whl", "runs", "shared", "__pycache__")
    shutil.copytree(ROOT, to, ignore=ignored, symlinks=True)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "qat"], cwd=to, check=True)
    return to


def judge(mutant: Mutant, tests: dict[str, float], copies: queue.Queue[Path]) -> dict:
    """What came of a mutant, and the test that killed it."""
    copy = copies.get()
    start, killer = time.monotonic(), ""
    try:
        with applied(mutant, copy) as is_there:
            outcome = "survived" if is_there else "gone"
            if tests and is_there:
                code, told = pytest(copy, ["-x", *tests], START_S + 3 * sum(tests.values()))
                outcome = {0: "survived", None: "timeout"}.get(code, "killed")
                found = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", told, re.MULTILINE)
                killer = found[1] if found else ""
        if outcome == "killed":  # not if the test fails, or is not found, without the mutant, too
            control = [killer] if killer in tests else ["--collect-only", *tests]
            code, _ = pytest(copy, control, START_S + sum(tests.values()))
            outcome = "killed" if code == 0 else "unsure"
    finally:
        copies.put(copy)
    rest = {"outcome": outcome, "by": killer, "tests": len(tests), "is": str(mutant)}
    return {"name": mutant.name, "seconds": round(time.monotonic() - start, 1), **rest}


@contextmanager
def applied(mutant: Mutant, copy: Path) -> Iterator[bool]:
    """The mutant in a copy, and whether its lines are still there, be it some lines up or down."""
    path = copy / mutant.file
    sound = path.read_text(encoding="utf-8") if path.exists() else ""
    lines, before = (text.splitlines(keepends=True) for text in (sound, mutant.before))
    places = [at for at in range(len(lines)) if lines[at : at + len(before)] == before]
    if not places:
        yield False
        return
    at = min(places, key=lambda place: abs(place + 1 - mutant.line))
    path.write_text("".join([*lines[:at], mutant.after, *lines[at + len(before) :]]), "utf-8")
    Path(cache_from_source(path)).unlink(missing_ok=True)
    try:
        yield True
    finally:
        path.write_text(sound, encoding="utf-8")


def pytest(copy: Path, words: list[str], limit_s: float) -> tuple[int | None, str]:
    """The exit code of the tests in a copy, None if they took too long, and what they printed."""
    limited = (
        f"import resource, sys, pytest; resource.setrlimit(resource.RLIMIT_DATA, 2 * ({MEMORY},));"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", f"--basetemp={copy}.tmp", "--tb=no"]
    own = (
        f"PYTHONPATH={copy}{os.pathsep}{copy / 'tests'}",
        "PYTHONDONTWRITEBYTECODE=1",  # a mutant of the same second and size would not be compiled
        "OMP_NUM_THREADS=1",
        "CUDA_VISIBLE_DEVICES=",
        "TRITON_INTERPRET=1",
    )
    process = subprocess.Popen(
        ["env", *own, sys.executable, "-c", limited, "-q", "-rfE", *options, *words],
        cwd=copy,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=limit_s)
        return process.returncode, told
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with suppress(ProcessLookupError):  # also what the tests have started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@app.command
def count(out: Path, *, equivalent: Path | None = None, figures: Path | None = None) -> None:
    """Print the survivors, and record how many of the mutants that differ were killed."""
    found = {name: each for name, each in read(out).items() if each["outcome"] != "gone"}
    listed = tomllib.loads(equivalent.read_text(encoding="utf-8")) if equivalent else {}
    for name, entry in listed.items():
        if not entry.get("reason") or name not in found or is_killed(found[name]):
            raise SystemExit(f"[{name}] needs a reason, and a mutant that no test has killed")
    differing = {name: each for name, each in found.items() if name not in listed}
    for name, each in sorted(differing.items(), key=lambda item: item[1]["is"]):
        if not is_killed(each):
            print(f"survived, {each['tests']} tests: [{name}] {each['is']}")
    ends = Counter(each["is"].split("/")[1] for each in differing.values() if not is_killed(each))
    for floor, number in Counter(each["is"].split("/")[1] for each in found.values()).items():
        print(f"{floor:8s}{number:5d} mutants, {ends[floor]} survived")
    killed = sum(is_killed(each) for each in differing.values())
    value = round(100 * killed / len(differing), 1)
    print(f"{len(found)} mutants, {len(listed)} equivalent, {killed} killed: {value} %")
    if figures is not None:
        goal = f">= {GOAL} of at least 200"
        record(figures, "mutants_killed_percent", value, "%", goal, runs=len(found))


def seconds(report: Path) -> dict[str, float]:
    """How long each test of a JUnit report took."""
    return {
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": float(
            case.attrib["time"]
        )
        for case in xml.parse(report).getroot().iter("testcase")
    }


def read(out: Path) -> dict[str, dict]:
    """The latest outcome of each mutant."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {each["name"]: each for each in map(json.loads, lines)}


def is_killed(outcome: dict) -> bool:
    """Whether a test failed, or never ended."""
    return outcome["outcome"] in {"killed", "timeout"}


def flat(lines: str) -> str:
    """Lines of code as one."""
    return " ".join(lines.split())


if __name__ == "__main__":
    app()
