"""The house rules that a machine can check."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "qat").rglob("*.py"))
FAULTS = sorted((ROOT / "tests" / "stress").glob("*.py"))
SCRIPTS = sorted((ROOT / "speedrun").rglob("*.py")) + [f for f in FAULTS if "test_" not in f.name]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SOURCES = PACKAGE + SCRIPTS
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
VERSIONED = re.compile(r"_(v[0-9]+|new|fixed|orig|backup)$|V[0-9]+$")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def definitions(path: Path) -> Iterator[Definition]:
    """Every function and class of a file, nested ones too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return (node for node in ast.walk(tree) if isinstance(node, Definition))


def public_definitions(path: Path) -> Iterator[Definition]:
    """Module-level functions and classes, and the methods of those classes, without underscore."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                members = (each for each in node.body if isinstance(each, Definition))
                yield from (each for each in members if not each.name.startswith("_"))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_public_definitions_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    missing = [node.name for node in public_definitions(path) if not ast.get_docstring(node)]
    if tree.body and not ast.get_docstring(tree):
        missing.insert(0, "the module")
    assert missing == []


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=name_of)
def test_code_is_ascii(path: Path) -> None:
    assert path.read_bytes().isascii()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_names_carry_no_versions(path: Path) -> None:
    names = [path.stem, *(node.name for node in definitions(path))]
    assert [name for name in names if VERSIONED.search(name)] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_state_is_loaded_strictly(path: Path) -> None:
    calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
    loads = [n for n in calls if getattr(n.func, "attr", "") == "load_state_dict"]
    lax = [
        n.lineno
        for n in loads
        for k in n.keywords
        if k.arg == "strict" and getattr(k.value, "value", None) is not True
    ]
    assert lax == []


@pytest.mark.parametrize("path", sorted((ROOT / "qat").rglob("__init__.py")), ids=name_of)
def test_package_files_are_empty_but_the_three_doors(path: Path) -> None:
    if path.parent.name not in {"qat", "cli", "losses"}:
        assert path.read_text(encoding="utf-8") == ""


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/**/*.ipynb")), ids=name_of)
def test_notebooks_hold_no_outputs_and_no_functions(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert not any(re.search(r"^\s*def ", "".join(cell["source"]), re.M) for cell in code)


def test_floors_import_downwards_only() -> None:
    linter = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert linter is not None, "install the [dev] extra"
    result = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def committed_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    files = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [file for file in files if file.is_file()]


def test_nothing_tells_to_install_somebody_elses_qat() -> None:
    texts = {".py", ".md", ".sh", ".toml", ".ipynb", ".txt", ""}
    files = (f for f in committed_files() if f.suffix in texts and "records" not in f.parts)
    of_others = re.compile(r"\bqat\\?\[[a-z]|\binstall\b[^\n`;]* ['\"]?qat['\"]?(==|$|[\s`])", re.M)
    found = {name_of(f): of_others.findall(f.read_text(encoding="utf-8")) for f in files}
    assert {name for name, lines in found.items() if lines} == set()


def test_extras_that_are_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.compile(r"""how_to_install\(['"]([\w-]+)|install .*-e '\.\[([\w,-]+)\]""")
    for file in committed_files():
        if file.suffix in {".py", ".md", ".ipynb", ".sh"}:
            for pair in named.findall(file.read_text(encoding="utf-8")):
                assert set("".join(pair).split(",")) <= set(project["optional-dependencies"]), file


def test_only_the_tiny_teacher_is_large() -> None:
    large = {name_of(f) for f in committed_files() if f.stat().st_size > 2**20}
    assert large <= {"checkpoints/tiny-qwen3/model.safetensors"}
    teacher = ROOT / "checkpoints" / "tiny-qwen3"
    assert sum(file.stat().st_size for file in teacher.iterdir()) <= 16e6
