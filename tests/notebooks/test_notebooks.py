"""Notebooks are short lists of commands that exist, and every one of them runs."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from warm_qat import WarmQat

from qat.cli import app

SPEEDRUN = Path(__file__).parents[2] / "speedrun"
sys.path.insert(0, str(SPEEDRUN))

from run_notebooks import NEEDS, NOTEBOOKS, TINY, execute, tags  # noqa: E402

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github)"
)
LINE = re.compile(
    r"!qat |!bash speedrun/setup\.sh|!python -m pip install |%env \w+=|%cd |path = %env PATH$|"
    r"root = !git rev-parse "
)
FIRST = ["title", "code-text", "code", "machine-text", "machine"]

each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def lines(cell: NotebookNode) -> list[str]:
    return re.sub(r"\\\n\s*", "", cell.source).splitlines()


@each_notebook
def test_it_is_committed_without_outputs(path: Path) -> None:
    for cell in code(read(path)):
        assert cell.outputs == []
        assert cell.execution_count is None


@each_notebook
def test_it_holds_commands_only(path: Path) -> None:
    for cell in code(read(path)):
        commands = [line for line in lines(cell) if line.startswith("!")]
        assert len(commands) <= 1, "a second command would hide that the first failed"
        for line in lines(cell):
            assert LINE.match(line), line
        if "parameters" in tags(cell):
            assert all(line.startswith("%env ") for line in lines(cell))


@each_notebook
def test_it_begins_as_all_do(path: Path) -> None:
    notebook = read(path)
    assert [cell.id for cell in notebook.cells[:5]] == FIRST
    assert BADGE in notebook.cells[0].source
    first = read(PATHS[0])
    for ours, theirs in zip(notebook.cells[1:5], first.cells[1:5], strict=True):
        assert ours.source == theirs.source


@each_notebook
def test_its_tags_are_known(path: Path) -> None:
    notebook = read(path)
    assert set().union(*map(tags, notebook.cells)) <= NEEDS | {"parameters"}
    assert sum("parameters" in tags(cell) for cell in notebook.cells) == 1
    for cell in code(notebook):
        touches = "/content/drive" in cell.source or "setup.sh L64" in cell.source
        assert touches == ("needs-drive" in tags(cell))


@each_notebook
def test_tiny_values_are_of_its_parameters(path: Path) -> None:
    (cell,) = (cell for cell in code(read(path)) if "parameters" in tags(cell))
    names = {re.match(r"%env (\w+)=", line)[1] for line in lines(cell)}
    assert names == TINY[path.stem].keys() | {"OUT"}
    used = set(re.findall(r"\$([A-Z_]+)", "".join(each.source for each in code(read(path)))))
    assert names <= used


@each_notebook
def test_its_verbs_and_flags_exist(path: Path) -> None:
    cells = code(read(path))
    told = (re.match(r"%env (\w+)=(--.*)", line) for cell in cells for line in lines(cell))
    given = {f"${found[1]}": found[2] for found in told if found}  # parameters that are flags
    for cell in cells:
        for line in lines(cell):
            if line.startswith("!qat "):
                words = " ".join(given.get(word, word) for word in line.split())
                words = shlex.split(words)[1:]
                names, verb, _ = app.parse_commands(words)
                assert names, line
                known = {
                    name for each in verb[-1].assemble_argument_collection() for name in each.names
                }
                flags = {word for word in words if word.startswith("--")}
                assert flags <= known, f"{path.stem}: {flags - known}"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where all of them write, with a `qat` that starts at once."""
    directory = tmp_path_factory.mktemp("notebooks")
    with WarmQat(directory), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
        yield directory


@pytest.mark.slow
def test_every_notebook_runs(work: Path) -> None:
    assert [path.stem for path in PATHS] == sorted(TINY)
    for name in TINY:
        execute(name, work, PATH=f"{work}:{{path}}")
