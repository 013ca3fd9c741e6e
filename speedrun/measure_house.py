"""Measure how much there is to read: lines, imports of a verb, files of a training step.

    python speedrun/measure_house.py --figures figures.jsonl

All is read from the source but `help_s`, which wants an idle machine.
"""

import ast
import collections
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp
from cyclopts import App
from figures import ROOT, record
from settings_walk import Package, SettingsTrace

QAT = ROOT / "qat"
FIGURES = {  # unit, goal
    "core_lines": ("lines", "<= 44000"),
    "python_lines_all": ("lines", "<= 104000"),
    "tests_lines": ("lines", "<= 42000"),
    "tests_cases": ("cases", "<= 5500"),
    "speedrun_lines": ("lines", "<= 5000"),
    "docs_words": ("words", "<= 34000"),
    "docstring_fragments_percent": ("%", "<= 2"),
    "closure_train_step_lines": ("lines", "<= 15000"),
    "closure_convert_lines": ("lines", "<= 15000"),
    "backend_methods": ("methods", "<= 38"),
    "road_train_files": ("files", "<= 10"),
    "road_train_lines": ("lines", "<= 3000"),
    "config_rooms": ("rooms", "<= 25"),
    "config_climbs": ("climbs", "<= 20"),
    "repeated_lines_percent": ("%", "<= 2"),
    "import_cycles": ("cycles", "<= 0"),
    "help_s": ("s", "<= 0.4"),
}
# a docstring that begins with one of these words, or in small letters, is no sentence
FRAGMENTS = frozenset(
    """
    after against among and as at because before behind beside besides between but by during for
    from here how if in into likewise not of off on only onto or out over same since so than that
    there through to too under until what when where whether which while who whoever whom whose why
    with within without
""".split()
)
WINDOW = 6  # lines: shorter repetitions are mostly signatures and keyword arguments
HELP_RUNS = 20
app = App(help=__doc__)


@app.default
def measure(*, figures: Path | None = None) -> None:
    """Print every figure and append them to FIGURES."""
    tracked = [ROOT / name for name in git("ls-files").splitlines()]
    python = [path for path in tracked if path.suffix == ".py" and path.exists()]
    core = [p for p in python if inside(p, "qat") and not inside(p, "qat/extensions")]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    road = road_on_page()
    trace = SettingsTrace(Package(QAT), "qat.cli.train.train", "qat.train.config.TrainConfig")
    helps = [seconds(sys.executable, "-m", "qat", "--help") for _ in range(HELP_RUNS)]
    found = {
        "core_lines": lines_of(core),
        "python_lines_all": lines_of(python),
        "tests_lines": lines_of(p for p in python if inside(p, "tests")),
        "tests_cases": cases(),
        "speedrun_lines": lines_of(p for p in python if inside(p, "speedrun")),
        "docs_words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "docstring_fragments_percent": fragments(p for p in python if inside(p, "qat")),
        "closure_train_step_lines": lines_of(closure("qat.train.step")),
        "closure_convert_lines": lines_of(closure("qat.convert.convert")),
        "backend_methods": methods(QAT / "backend" / "base.py", "Backend"),
        "road_train_files": len(road),
        "road_train_lines": lines_of(road),
        "config_rooms": trace.rooms,
        "config_climbs": trace.climbs,
        "repeated_lines_percent": repeated(core),
        "import_cycles": len(cycles()),
        "help_s": round(statistics.median(helps), 3),
    }
    for name, value in found.items():
        unit, goal = FIGURES[name]
        print(f"{name}: {value:,} {unit} (goal {goal})")
        runs = {"runs": HELP_RUNS, "spread": round(statistics.stdev(helps), 3)}
        record(figures, name, value, unit, goal, **(runs if name == "help_s" else {}))


def git(*words: str) -> str:
    """Return what git prints in the root of the repository."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def inside(path: Path, folder: str) -> bool:
    """Return whether a file lies in a folder of the repository."""
    return path.is_relative_to(ROOT / folder)


def lines_of(paths: Iterator[Path] | list[Path] | set[Path]) -> int:
    """Lines of all files, empty ones and comments too."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def cases() -> int:
    """Return how many test cases the README's test command runs."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sum(int(count) for count in re.findall(r"^tests/\S+: (\d+)$", listed, flags=re.M))


def fragments(paths: Iterable[Path]) -> float:
    """Return the percentage of docstrings, those of attributes included, that begin mid-sentence.

    Sentences begin with a capital letter and with no word of `FRAGMENTS`.
    """
    found = [text for path in paths for text in docstrings(path)]
    firsts = [text.split()[0].strip(",.:;()") for text in found if text.split()]
    begun = sum(w.lower() in FRAGMENTS or (w[:1].islower() and w.isalpha()) for w in firsts)
    return round(100 * begun / max(1, len(found)), 1)


def docstrings(path: Path) -> Iterator[str]:
    """Yield the strings that document a module, a class, a function or an assignment above."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = node.body if isinstance(getattr(node, "body", None), list) else []
        for number, each in enumerate(body):
            is_string = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            owner = node if number == 0 else body[number - 1]
            kinds = documented if number == 0 else (ast.Assign, ast.AnnAssign)
            if is_string and isinstance(each.value.value, str) and isinstance(owner, kinds):
                yield each.value.value.strip()


def road_on_page() -> list[Path]:
    """Files of `qat/` named in docs/architecture.md under the first heading that says `road`."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    sections = re.split(r"^#+ ", page, flags=re.M)
    road = next((each for each in sections if "road" in each.partition("\n")[0].lower()), "")
    return [ROOT / name for name in dict.fromkeys(re.findall(r"\bqat/[\w/]+\.py", road))]


def closure(module: str) -> set[Path]:
    """Files of `qat/` that importing a module executes: imports in functions are left out."""
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = file_of(name)
        if file is None or file in found:
            continue
        found.add(file)
        parents = name.split(".")
        waiting += [".".join(parents[:count]) for count in range(1, len(parents))]
        waiting += imports(ast.parse(file.read_text(encoding="utf-8")))
    return found


def file_of(module: str) -> Path | None:
    """The file of a module of the package; None for a name that is no module of it."""
    path = ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if inside(file, "qat") and file.exists()), None)


def imports(node: ast.AST) -> Iterator[str]:
    """Names that a file's import statements may mean, without those of functions and of types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ClassDef):
            if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
                yield from imports(child)


def methods(file: Path, name: str) -> int:
    """Public methods of a class."""
    (found,) = [
        node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    own = [node.name for node in found.body if isinstance(node, ast.FunctionDef)]
    return sum(not each.startswith("_") for each in own)


def repeated(paths: list[Path]) -> float:
    """Percent of lines that lie in a window of lines found elsewhere too.

    Lines are stripped; empty ones, comments, imports and lone brackets are left out first.
    """
    noise = re.compile(r"#|import |from |[\])},]*$")
    windows = collections.defaultdict(list)
    total = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines = [each for each in map(str.strip, text.splitlines()) if not noise.match(each)]
        for i in range(len(lines) - WINDOW + 1):
            windows[tuple(lines[i : i + WINDOW])].append((path, i))
        total += len(lines)
    twice = [places for places in windows.values() if len(places) > 1]
    covered = {(path, i + k) for places in twice for path, i in places for k in range(WINDOW)}
    return round(100 * len(covered) / total, 1)


def cycles() -> list[str]:
    """Groups of modules that import each other, at the top of a file or inside of a function.

    Imports that only type checkers read are left out.
    """
    graph = grimp.build_graph("qat", exclude_type_checking_imports=True, cache_dir=None)
    groups = set()
    for module in graph.modules:
        imported = graph.find_upstream_modules(module)
        groups.add(frozenset(imported & graph.find_downstream_modules(module)) | {module})
    return sorted(", ".join(sorted(group)) for group in groups if len(group) > 1)


def seconds(*command: str) -> float:
    """Wall-clock seconds of a command that must succeed."""
    began = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    app()
