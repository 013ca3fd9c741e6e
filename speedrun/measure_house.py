"""How much there is to read in `qat/`, and how deep it is: files, lines, calls, words.

    python speedrun/measure_house.py --figures figures.jsonl

Three verbs run on the tiny teacher to count what they go through (about a minute); the rest is
read from the source. `help_seconds` wants an idle machine.
"""

import ast
import collections
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated

import grimp
from cyclopts import App, Parameter
from figures import ROOT, record

QAT = ROOT / "qat"
FIGURES = {  # unit, goal
    "house_files": ("files", "<= 240"),
    "house_lines": ("lines", "<= 41000"),
    "road_train_files": ("files", "<= 16"),
    "road_train_lines": ("lines", "<= 3000"),
    "road_traced_files": ("files", ""),
    "road_traced_lines": ("lines", ""),
    "road_train_frames": ("frames", "<= 6"),
    "road_convert_frames": ("frames", "<= 6"),
    "road_cache_frames": ("frames", "<= 6"),
    "single_use_helpers_percent": ("%", "<= 5"),
    "files_under_50_lines": ("files", "<= 15"),
    "homonyms": ("names", "<= 0"),
    "rooms_of_anemll": ("folders", "<= 1"),
    "rooms_of_nsa": ("folders", "<= 1"),
    "repeated_lines_percent": ("%", "<= 2"),
    "readme_table_percent": ("%", "<= 25"),
    "import_cycles": ("cycles", "<= 0"),
    "typed": ("errors", "<= 0"),
    "help_seconds": ("s", "<= 0.4"),
}
TOPICS = {
    "rooms_of_anemll": re.compile(r"anemll|reference system", re.I),
    "rooms_of_nsa": re.compile(r"\bnsa|sparse attention", re.I),
}
"""What a file's name, or the first line of its docstring, says when it is about a topic."""
HELPER_LINES = 5  # a body of so many lines is read sooner than its name is looked up
WINDOW = 6  # lines: shorter repetitions are mostly signatures and keyword arguments
TYPED_ROOMS = ("quant", "losses", "nn", "train")
HELP_RUNS = 20
STEP_TO_WATCH = 2  # the first one also compiles and warms up
QUANTIZERS = {"fit_weight", "fit_all_to_inputs"}
"""Functions of `qat/quant/` that turn the weight of one linear into indices."""
VERBS = {
    "cache": "--teacher checkpoints/tiny-qwen3 --data stdlib --num-sequences 64 "
    "--sequence-length 64 --device cpu --out {0}/cache",
    "convert": "checkpoints/tiny-qwen3 --to q2a4 --device cpu --out {0}/student",
    "train": "{0}/student --cache-dir {0}/cache --batch-size 4 --max-steps 3 --device cpu --force "
    "--out {0}/run",
}
app = App(help=__doc__)


@app.default
def measure(
    *,
    figures: Path | None = None,
    road: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    types: Path = ROOT / "pyproject.toml",
) -> None:
    """Print every figure, with what it counts where that is short; append them to FIGURES.

    Args:
        road: files of `qat/` that one reads to understand a training step. By default those that
            docs/architecture.md names under its heading about the road of a training step; the
            files that were seen running are counted either way (`road_traced_files`).
        types: configuration of mypy; of a commit that has none yet, a later one's is meant.
    """
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(QAT.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    found: dict[str, float] = {
        "house_files": len(sources),
        "house_lines": sum(map(lines_of, sources.values())),
        **roads(road),
        "single_use_helpers_percent": percent(len(helpers(trees)), len(list(functions(trees)))),
        "files_under_50_lines": len([*short_files(sources)]),
        "homonyms": len(told("homonyms", homonyms(trees))),
        **{name: len(told(name, rooms(trees, topic))) for name, topic in TOPICS.items()},
        "repeated_lines_percent": repeated(sources),
        "readme_table_percent": table_share((ROOT / "README.md").read_text(encoding="utf-8")),
        "import_cycles": len(told("import_cycles", cycles())),
        "typed": type_errors(types),
    }
    helps = [seconds(sys.executable, "-m", "qat", "--help") for _ in range(HELP_RUNS)]
    found["help_seconds"] = round(statistics.median(helps), 3)
    for name, value in found.items():
        unit, goal = FIGURES[name]
        print(f"{name}: {value:,} {unit}" + f" (goal {goal})" * bool(goal))
        if figures is not None:
            runs = {"runs": HELP_RUNS, "spread": round(statistics.stdev(helps), 3)}
            record(figures, name, value, unit, goal, **(runs if name == "help_seconds" else {}))


def lines_of(text: str) -> int:
    """Lines of a file, empty ones and comments too."""
    return len(text.splitlines())


def percent(part: int, whole: int) -> float:
    """A share with one digit."""
    return round(100 * part / whole, 1)


def told(name: str, found: list[str]) -> list[str]:
    """The same list, printed under the figure's name."""
    print(f"{name}: {'; '.join(found) or '-'}")
    return found


def roads(named: tuple[str, ...]) -> dict[str, float]:
    """What one reads to understand a training step, and how deep each verb goes."""
    seen = watch_verbs()
    traced = told("road_traced_files", seen.pop("files"))
    files = [*named] or told("road_train_files", road_on_page())
    both = (("road_train", files), ("road_traced", traced))
    found: dict[str, float] = {}
    for name, paths in both:
        if paths:
            texts = [(ROOT / path).read_text(encoding="utf-8") for path in paths]
            found |= {f"{name}_files": len(paths), f"{name}_lines": sum(map(lines_of, texts))}
    for verb in ("train", "convert", "cache"):
        found[f"road_{verb}_frames"] = len(told(f"road_{verb}_frames", seen[verb]))
    return found


def road_on_page() -> list[str]:
    """Files of `qat/` named in docs/architecture.md under the first heading that says `road`."""
    page = ROOT / "docs" / "architecture.md"
    sections = re.split(
        r"^#+ ", page.read_text(encoding="utf-8") if page.exists() else "", flags=re.M
    )
    (road,) = [each for each in sections if "road" in each.partition("\n")[0].lower()][:1] or [""]
    return list(dict.fromkeys(re.findall(r"\bqat/[\w/]+\.py", road)))


def watch_verbs() -> dict[str, list[str]]:
    """`files` that a training step enters or hangs from, and our frames of each verb, by its name.

    Each verb runs in a process of its own, so that what it imports is imported afresh.
    """
    seen: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for verb in VERBS:
            command = [sys.executable, __file__, "watch", verb, folder]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            seen |= json.loads(Path(folder, f"{verb}.json").read_text(encoding="utf-8"))
    return seen


@app.command(show=False)
def watch(verb: str, folder: Path) -> None:
    """Run VERB on the tiny teacher and write what was seen of it to FOLDER/VERB.json."""
    sys.path.insert(0, str(ROOT))
    from qat.cli import main

    watcher = Watcher()
    try:
        with_starters()
        {"train": watcher.steps, "convert": watcher.quantizer, "cache": watcher.shard}[verb]()
        sys.argv = ["qat", verb, *VERBS[verb].format(folder).split()]
        main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    (folder / f"{verb}.json").write_text(json.dumps(watcher.seen), encoding="utf-8")


class Watcher:
    """Notes where a process is when it comes to what it was started for."""

    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {}

    def steps(self) -> None:
        """At an optimizer's step: the frames, and the files entered since the step before."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        entered: set[CodeType] = set()
        steps = 0

        def note(*_: object) -> None:
            nonlocal steps
            steps += 1
            frames = our_frames(sys._getframe(1))
            self.seen["train"] = list(map(named, frames))
            if steps == STEP_TO_WATCH - 1:
                threading.setprofile(profile)
                sys.setprofile(profile)
            elif steps == STEP_TO_WATCH:
                sys.setprofile(None)
                files = {each.co_filename for each in (*entered, *frames)}
                self.seen["files"] = sorted(
                    str(Path(file).relative_to(ROOT)) for file in files if is_ours(file)
                )

        def profile(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                entered.add(frame.f_code)

        register_optimizer_step_pre_hook(note)

    def quantizer(self) -> None:
        """At the first linear that is quantized."""

        def profile(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_name in QUANTIZERS and "convert" not in self.seen:
                self.seen["convert"] = list(map(named, our_frames(frame.f_back)))

        threading.setprofile(profile)
        sys.setprofile(profile)

    def shard(self) -> None:
        """At the file of a shard appearing under its name."""

        def hook(event: str, arguments: tuple) -> None:
            if event == "os.rename" and str(arguments[1]).endswith(".safetensors"):
                self.seen["cache"] = list(map(named, our_frames(sys._getframe(1))))

        sys.addaudithook(hook)


HANDED = threading.local()
"""Frames of the thread that handed over what this thread is doing."""


def with_starters() -> None:
    """From now on a pool's thread knows the frames that its work was submitted from."""
    submit = ThreadPoolExecutor.submit

    def submitted(
        self: ThreadPoolExecutor, work: Callable, *args: object, **more: object
    ) -> object:
        frames = our_frames(sys._getframe(1))

        def run() -> object:
            HANDED.frames = frames
            return work(*args, **more)

        return submit(self, run)

    ThreadPoolExecutor.submit = submitted


def our_frames(frame: FrameType | None) -> list[CodeType]:
    """Functions of `qat/` that are running, from the command line inwards.

    Comprehensions are no functions here. Work of a pool hangs from where it was submitted.
    """
    found = []
    while frame is not None:
        code = frame.f_code
        if is_ours(code.co_filename) and not re.fullmatch("<(list|set|dict)comp>", code.co_name):
            found.append(code)
        frame = frame.f_back
    return getattr(HANDED, "frames", []) + found[::-1]


def is_ours(file: str) -> bool:
    """Whether a file of code belongs to `qat/`."""
    return Path(file).is_relative_to(QAT)


def named(code: CodeType) -> str:
    """A function as one reads it: `train/loop.py:train`."""
    return f"{Path(code.co_filename).relative_to(QAT)}:{code.co_name}"


def functions(trees: dict[Path, ast.Module]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    for tree in trees.values():
        yield from (
            n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        )


def helpers(trees: dict[Path, ast.Module]) -> list[str]:
    """Functions with a short body that the package mentions once: in a call, or handed to one.

    A name that is defined twice is not counted (which one is meant cannot be told without types),
    nor is what something else calls: methods with two underscores, and what is decorated, but for
    properties and caches.
    """
    names = collections.Counter(function.name for function in functions(trees))
    mentioned = collections.Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    own = {"property", "staticmethod", "classmethod", "contextmanager", "cache", "cached_property"}
    return [
        each.name
        for each in functions(trees)
        if names[each.name] == 1
        and mentioned[each.name] == 1
        and not each.name.startswith("__")
        and all(ast.unparse(d).rpartition(".")[2] in own for d in each.decorator_list)
        and body_lines(each) <= HELPER_LINES
    ]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, without its docstring."""
    body = function.body[bool(ast.get_docstring(function)) :]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def short_files(sources: dict[Path, str]) -> Iterator[Path]:
    """Files that one opens for little; the doors of packages are none."""
    for path, text in sources.items():
        if lines_of(text) < 50 and path.name not in {"__init__.py", "__main__.py"}:
            yield path


def homonyms(trees: dict[Path, ast.Module]) -> list[str]:
    """Public classes of one name in several modules."""
    where = collections.defaultdict(set)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].add(str(path.relative_to(QAT)))
    return [f"{name} ({', '.join(sorted(w))})" for name, w in sorted(where.items()) if len(w) > 1]


def rooms(trees: dict[Path, ast.Module], topic: re.Pattern) -> list[str]:
    """Folders with a file on a topic; kernels have a room of their own, whatever they are for."""
    found = collections.Counter()
    for path, tree in trees.items():
        inside = path.relative_to(QAT)
        first = (ast.get_docstring(tree) or "").partition("\n")[0]
        if inside.parts[0] != "kernels" and (topic.search(str(inside)) or topic.search(first)):
            found[str(inside.parent)] += 1
    return [f"{folder} ({count})" for folder, count in sorted(found.items())]


def repeated(sources: dict[Path, str]) -> float:
    """Percent of lines that lie in a window of lines found elsewhere too.

    Lines are stripped; empty ones, comments, imports and lone brackets are left out first.
    """
    noise = re.compile(r"#|import |from |[\])},]*$")
    windows = collections.defaultdict(list)
    total = 0
    for path, text in sources.items():
        lines = [each for each in map(str.strip, text.splitlines()) if not noise.match(each)]
        for i in range(len(lines) - WINDOW + 1):
            windows[tuple(lines[i : i + WINDOW])].append((path, i))
        total += len(lines)
    twice = [places for places in windows.values() if len(places) > 1]
    covered = {(path, i + k) for places in twice for path, i in places for k in range(WINDOW)}
    return percent(len(covered), total)


def table_share(text: str) -> float:
    """Percent of a page's characters that stand in rows of tables."""
    rows = [line for line in text.splitlines() if line.lstrip().startswith("|")]
    return percent(sum(map(len, rows)), len(text))


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


def type_errors(settings: Path) -> int:
    """Errors of the checker in the rooms that are checked strictly."""
    packages = [word for room in TYPED_ROOMS for word in ("-p", f"qat.{room}")]
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), *packages]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode > 1:
        raise SystemExit(result.stdout + result.stderr)
    return len(re.findall(r": error: ", result.stdout))


def seconds(*command: str) -> float:
    """Wall-clock seconds of a command that must succeed."""
    began = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    app()
