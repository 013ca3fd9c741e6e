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


def public_definitions(tree: ast.Module) -> Iterator[Definition]:
    """Module-level functions and classes, and the methods of those classes, without underscore."""
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                members = (each for each in node.body if isinstance(each, Definition))
                yield from (each for each in members if not each.name.startswith("_"))


def is_lax(node: ast.AST) -> bool:
    """Whether a call loads a state and lets keys be missing."""
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "load_state_dict"
        and any(
            k.arg == "strict" and getattr(k.value, "value", 0) is not True for k in node.keywords
        )
    )


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_sources_are_documented_plainly_named_and_load_strictly(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    missing = [node.name for node in public_definitions(tree) if not ast.get_docstring(node)]
    if tree.body and not ast.get_docstring(tree):
        missing.insert(0, "the module")
    assert missing == []
    nodes = list(ast.walk(tree))
    names = [path.stem, *(node.name for node in nodes if isinstance(node, Definition))]
    assert [name for name in names if VERSIONED.search(name)] == []
    assert [node.lineno for node in nodes if is_lax(node)] == []


def test_code_is_ascii() -> None:
    assert [name_of(path) for path in SOURCES + TESTS if not path.read_bytes().isascii()] == []


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
