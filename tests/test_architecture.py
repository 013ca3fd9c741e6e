"""House rules that ruff and import-linter do not check."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAX = re.compile(r"load_state_dict\((?:[^()]|\([^()]*\))*strict=(?!True)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_states_load_strictly() -> None:
    for path in (file for folder in ("qat", "speedrun") for file in (ROOT / folder).rglob("*.py")):
        assert LAX.findall(path.read_text(encoding="utf-8")) == [], path


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
