"""The built wheel: every file that the package reads is in it; .ci/wheel runs its commands."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("qat", "checkpoints/tiny-qwen3"):  # a copy: nothing stays in the clone
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    build = "from setuptools import build_meta; build_meta.build_wheel('out')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    files = [path for path in (ROOT / "qat").rglob("*") if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    teacher = (ROOT / "checkpoints" / "tiny-qwen3").iterdir()
    expected |= {f"qat/data/tiny-qwen3/{path.name}" for path in teacher}
    assert {Path(name).suffix for name in expected} >= {".html", ".toml", ".gz", ".LICENSE", ".py"}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.startswith("qat/")} == expected
    licenses = {name.split("/licenses/")[1] for name in names if "/licenses/" in name}
    assert licenses == {"LICENSE", "qat/data/stdlib.LICENSE"}
