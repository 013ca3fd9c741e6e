"""The count of small mistakes in the core that tests notice: mutants killed, survived, equivalent.

A mutant is the project with one change: another comparison, + for -, a number one larger, `or` for
`and`, a `not` or a statement dropped, nothing returned, nothing raised. Four steps, of which the
first alone needs mutmut (pip install mutmut):

    python tests/stress/measure_mutants.py draw MUTANTS.json
    python -m pytest -n auto --cov=qat --cov-context=test --cov-report= --junitxml=map.xml
    TRITON_INTERPRET=1 python tests/stress/measure_mutants.py run MUTANTS.json OUTCOMES.jsonl
    python tests/stress/measure_mutants.py count OUTCOMES.jsonl --equivalent E.toml --figures F

`draw` takes a seeded sample. `run` imports the large libraries once and forks a process for each
mutant, where that module has the mutant's text and those tests that passed and ran the mutant's
line run until one fails; no file is changed, and processes that tests start have no mutant. Killed
mutants are not run again. EQUIVALENT lists mutants that no test can tell from the project, each a
table [NAME] with `is`, the change as `count` prints it, and a `reason`.

    TRITON_INTERPRET=1 python tests/stress/measure_mutants.py check LIST.jsonl --figures F

`check` measures a list of mutants again that names the `tests` which kill each, or why none can
(`equivalent`). It needs no coverage: these tests run with the mutant, then without it.
"""

import ast
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as xml
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from importlib import import_module
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
from coverage import CoverageData
from cyclopts import App

app = App(help=__doc__)
ROOT = Path(__file__).resolve().parents[2]
SIZE = 240
FIGURE, GOAL = "mutants_killed_percent", 92
TESTS, TESTS_S = 300, 150.0
"""How many tests a mutant may have, and how long they may take together."""
CPU_S, LIMIT_S = 60, 400
"""Seconds of computing and of waiting after which the tests of a mutant never end."""
MEMORY = 8 * 2**30
"""Bytes that a mutant may take: one that allocates for ever must not stop the others."""
LARGE = (
    "hypothesis",
    "matplotlib.axes",
    "pydantic",
    "rich.progress",
    "torch._dynamo",
    "triton.language",
    "safetensors.torch",
)
MODELS = tuple(f"transformers.models.{name}" for name in ("llama", "qwen2", "qwen3"))
FORK = multiprocessing.get_context("fork")


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
    report: tuple[Path, ...] = (Path("map.xml"),),
    workers: int = 2,
) -> None:
    """Run the tests of each mutant, and add the outcomes to OUT."""
    drawn = [located(Mutant(**each)) for each in json.loads(mutants.read_text(encoding="utf-8"))]
    killed = {name for name, each in read(out).items() if is_killed(each)}
    tests = Tests(coverage, report)
    left = [each for each in drawn if each.name not in killed]
    jobs = [(each, tests.of(each) if each.line else {}) for each in left]
    with out.open("a", encoding="utf-8") as file:
        for outcome in outcomes(jobs, workers):
            file.write(json.dumps(outcome) + "\n")
            file.flush()


@app.command
def check(mutants: Path, *, figures: Path | None = None, workers: int = 1) -> None:
    """Run the tests that MUTANTS names for each mutant, and record how many mutants they kill."""
    listed = [json.loads(line) for line in mutants.read_text(encoding="utf-8").splitlines()]
    jobs = []
    for each in listed:
        if bool(each["tests"]) == bool(each.get("equivalent")):
            raise SystemExit(f"{each['name']} needs tests, or a reason why it is equivalent")
        mutant = located(Mutant(**{key: each[key] for key in Mutant._fields}))
        if mutant.line and each["tests"]:
            sound = mutant._replace(name=f"{mutant.name}, sound", after=mutant.before)
            jobs += [(mutant, each["tests"]), (sound, each["tests"])]
    ended = {outcome["name"]: outcome for outcome in outcomes(jobs, workers)}
    there = [mutant.name for mutant, _ in jobs[::2]]
    if not there:
        raise SystemExit(f"{mutants}: no mutant is left in these sources, so nothing was measured")
    killed = [name for name in there if is_killed(ended[name])]
    killed = [name for name in killed if ended[f"{name}, sound"]["outcome"] == "survived"]
    equivalent = sum("equivalent" in each for each in listed)
    gone, value = len(listed) - equivalent - len(there), round(100 * len(killed) / len(there), 1)
    print(f"{len(killed)} of {len(there)} killed: {value} %; {equivalent} equivalent, {gone} gone")
    if figures is not None:
        from fault_records import record  # imports the project, which no process may have before

        record(figures, FIGURE, value, "%", f">= {GOAL}", runs=len(there))


def outcomes(
    jobs: list[tuple[Mutant, Collection[str]]], workers: int
) -> Iterator[dict[str, str | float]]:
    """Run each mutant's tests in a fork of this process, with all loaded; yield the outcomes."""
    for name in (*LARGE, *MODELS, *(f"{each}.modeling_{each.split('.')[-1]}" for each in MODELS)):
        import_module(name)
    with ProcessPoolExecutor(workers, FORK) as pool:
        for job in as_completed([pool.submit(judge, *each) for each in jobs]):
            outcome = job.result()
            print(
                f"{outcome['outcome']:9s}{outcome['seconds']:6.1f} s  {outcome['is']}", flush=True
            )
            yield outcome


class Tests:
    """Which tests passed, how long they took, and which lines they ran."""

    def __init__(self, coverage: Path, reports: tuple[Path, ...]) -> None:
        self._took = {name: s for report in reports for name, s in seconds(report).items()}
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


def judge(mutant: Mutant, tests: Collection[str]) -> dict:
    """What came of a mutant, and the test that killed it."""
    start, outcome, killer = time.monotonic(), "survived" if mutant.line else "gone", ""
    if tests and mutant.line:
        outcome, killer = outcome_of(ROOT / mutant.file, changed(mutant), list(tests))
    rest = {"outcome": outcome, "by": killer, "tests": len(tests), "is": str(mutant)}
    return {"name": mutant.name, "seconds": round(time.monotonic() - start, 1), **rest}


def located(mutant: Mutant) -> Mutant:
    """The mutant with the line where its lines are by now; 0 if they are gone."""
    path = ROOT / mutant.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines, before = text.splitlines(), mutant.before.splitlines()
    places = [at for at in range(len(lines)) if lines[at : at + len(before)] == before]
    nearest = min(places, key=lambda at: abs(at + 1 - mutant.line), default=-1)
    return mutant._replace(line=nearest + 1)


def changed(mutant: Mutant) -> str:
    """The file with the mutant."""
    lines = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines(keepends=True)
    end = mutant.line - 1 + len(mutant.before.splitlines())
    return "".join([*lines[: mutant.line - 1], mutant.after, *lines[end:]])


def outcome_of(path: Path, text: str, tests: list[str]) -> tuple[str, str]:
    """What came of tests in a process where a module has another text, and which test failed."""
    receiver, sender = FORK.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        words = ["-x", "-p", "no:xdist", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp"]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning", *tests]  # imported before
        child = FORK.Process(target=pytest_with, args=(path, text, words, sender))
        child.start()
        child.join(LIMIT_S)
        code = child.exitcode
        with suppress(ProcessLookupError):  # also what the tests have started
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
    killer = receiver.recv() if receiver.poll() else ""
    if code in {None, -signal.SIGXCPU}:
        return "timeout", ""
    return "killed" if killer or code < 0 else "unsure" if code else "survived", killer


def pytest_with(path: Path, text: str, words: list[str], sender: Connection) -> None:
    """Leave the process with pytest's exit code, having sent the test that failed."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sound = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> object:
        is_mutant = loader.path == str(path)
        return compile(text, path, "exec", dont_inherit=True) if is_mutant else sound(loader, name)

    class Failure:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                sender.send(report.nodeid)

        pytest_collectreport = pytest_runtest_logreport

    SourceFileLoader.get_code = get_code
    os._exit(pytest.main(words, plugins=[Failure()]))


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
        from fault_records import record  # imports the project, which `run` must not

        goal = f">= {GOAL} of at least 200"
        record(figures, FIGURE, value, "%", goal, runs=len(found))


def seconds(report: Path) -> dict[str, float]:
    """How long each test of a JUnit report took that passed, by its name in pytest."""
    took, left_out = {}, set()
    for case in xml.parse(report).getroot().iter("testcase"):
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        took[name] = float(case.attrib["time"])
        if {each.tag for each in case} & {"failure", "error", "skipped"}:
            left_out.add(name)
    return {name: s for name, s in took.items() if name not in left_out}


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
