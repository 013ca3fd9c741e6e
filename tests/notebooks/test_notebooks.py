"""Notebooks are short lists of commands that exist, and every one of them runs."""

import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbformat import NotebookNode
from traitlets.config import Config
from warm_qat import WarmQat

from qat.cli import app

SPEEDRUN = Path(__file__).parents[2] / "speedrun"
sys.path.insert(0, str(SPEEDRUN))

from address_notebooks import addressed, repository  # noqa: E402
from run_notebooks import NOTEBOOKS, TINY, execute, tags  # noqa: E402

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]("
LINE = re.compile(
    r"!qat |!bash speedrun/setup\.sh|!python3? -m pip (--python \S+ )?install |%env \w+=|%cd |"
    r"path = %env PATH$|root = !for |assert root|!python3 -m venv |"
    r"!\(trap \"\" HUP; \"\$VLLM/vllm\" serve |!curl |!kill "
)

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
def test_it_holds_commands_only_and_no_outputs(path: Path) -> None:
    for cell in code(read(path)):
        assert cell.outputs == [] and cell.execution_count is None
        commands = [line for line in lines(cell) if line.startswith("!")]
        assert len(commands) <= 1, "a second command would hide that the first failed"
        for line in lines(cell):
            assert LINE.match(line), line
    (cell,) = (cell for cell in code(read(path)) if "parameters" in tags(cell))
    names = {re.match(r"%env (\w+)=", line)[1] for line in lines(cell)}
    assert names == TINY[path.stem].keys() | {"OUT"}
    used = set(re.findall(r"\$([A-Z_]+)", "".join(each.source for each in code(read(path)))))
    assert names <= used


@pytest.mark.parametrize("path", PATHS[:2], ids=lambda path: path.stem)
def test_its_addresses_are_the_projects(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == addressed(text, path.name, repository())
    notebook = nbformat.reads(
        addressed(text, path.name, "https://github.com/owner/name"), as_version=4
    )
    opens = f"https://colab.research.google.com/github/owner/name/blob/main/notebooks/{path.name})"
    assert f"{BADGE}{opens}" in notebook.cells[0].source
    assert "%env QAT_REPOSITORY=https://github.com/owner/name\n" in notebook.cells[2].source


def first_cell(address: str) -> str:
    path = PATHS[0]
    text = addressed(path.read_text(encoding="utf-8"), path.name, address)
    return nbformat.reads(text, as_version=4).cells[2].source


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory outside of any repository, and what cells change put back afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in ("PATH", "PWD"):
        monkeypatch.setenv(name, os.environ[name])
    monkeypatch.setenv("QAT_REPOSITORY", "")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


def notebook_shell() -> InteractiveShell:
    """A session of a notebook that has just begun."""
    InteractiveShell.clear_instance()
    # pytest may run by another environment than the one that is active, which IPython warns of
    settings = {"HistoryManager": {"enabled": False}, "InteractiveShell": {"warn_venv": False}}
    return InteractiveShell.instance(config=Config(settings))


def test_the_first_cell_reuses_the_clone_of_an_earlier_session(elsewhere: Path) -> None:
    origin = elsewhere / "origin"
    (origin / "speedrun").mkdir(parents=True)
    (origin / "speedrun" / "setup.sh").touch()
    for command in ("init -q", "add .", "-c user.name=a -c user.email=b commit -q -m first"):
        subprocess.run(["git", *command.split()], cwd=origin, check=True)
    for _ in range(2):  # the session is restarted where the first began
        os.chdir(elsewhere)
        shell = notebook_shell()
        for _ in range(2):
            assert shell.run_cell(first_cell(str(origin))).success
            assert Path.cwd() == elsewhere / "qat"
        assert os.environ["PATH"].startswith(f"{elsewhere}/qat/.venv/bin:")
        (elsewhere / "qat" / "mine.txt").touch()
    assert (elsewhere / "qat" / "mine.txt").exists()


def test_the_first_cell_without_an_address_takes_an_uploaded_zip_or_stops(elsewhere: Path) -> None:
    cell = first_cell("")
    assert cell.startswith("%env QAT_REPOSITORY=ADDRESS\n")
    ran = notebook_shell().run_cell(cell)
    assert isinstance(ran.error_in_exec, AssertionError)
    said = str(ran.error_in_exec)
    assert "ADDRESS" in said and said.endswith("none was made; mend QAT_REPOSITORY above")
    assert Path.cwd() == elsewhere and not (elsewhere / "qat").exists()
    for name, file in (("data", "rows.jsonl"), ("name-main", "name-main/speedrun/setup.sh")):
        with zipfile.ZipFile(elsewhere / f"{name}.zip", "w") as archive:
            archive.writestr(file, "")
    for _ in range(2):  # the session is restarted
        os.chdir(elsewhere)
        assert notebook_shell().run_cell(cell).success
        assert Path.cwd() == elsewhere / "qat" / "name-main"
    assert not (elsewhere / "qat" / "rows.jsonl").exists()
    Path("notebooks").mkdir()
    os.chdir("notebooks")  # opened where the zip was unpacked by hand
    assert notebook_shell().run_cell(cell).success and Path.cwd() == elsewhere / "qat" / "name-main"


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
    """Yield the directory that all notebooks write to, with a `qat` that starts at once."""
    directory = tmp_path_factory.mktemp("notebooks")
    with WarmQat(directory), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
        yield directory


@pytest.mark.slow
def test_every_notebook_runs(work: Path) -> None:
    assert [path.stem for path in PATHS] == sorted(TINY)
    for name in TINY:
        execute(name, work, PATH=f"{work}:{{path}}")
