"""The built wheel, installed where no clone is: every file that the package reads is in it."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]
SHORT_DEMO = """
from importlib import import_module
import_module("qat.cli.demo").SEQUENCES = 200
from qat.cli import main
main()
"""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with setuptools from a copy, so that nothing stays in the clone."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "qat", source / "qat", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('out')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (found,) = (source / "out").glob("*.whl")
    return found


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    files = [path for path in (ROOT / "qat").rglob("*") if path.is_file()]
    expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert {Path(name).suffix for name in expected} >= {".html", ".toml", ".gz", ".LICENSE", ".py"}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.startswith("qat/")} == expected
    licenses = {name.split("/licenses/")[1] for name in names if "/licenses/" in name}
    assert licenses == {"LICENSE", "qat/data/stdlib.LICENSE"}


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo_a_report_and_an_export(
    wheel: Path, tmp_path: Path
) -> None:
    teacher, place, work = tmp_path / "teacher", tmp_path / "site", tmp_path / "work"
    work.mkdir()
    tiny_model(initializer_range=0.3).save_pretrained(teacher)
    tiny_tokenizer().save_pretrained(teacher)
    install = [*PIP, "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", place, wheel], check=True)
    environment = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}

    def python(*words: object) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *map(str, words)],
            cwd=work, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    where = python("-c", "import qat; print(qat.__file__)").strip()
    assert Path(where).is_relative_to(place)
    demo = python("-c", SHORT_DEMO, "demo", "--steps", 2, "--teacher", teacher, "--out", "demo")
    assert Path(work, json.loads(demo.splitlines()[-1])["report"]).is_file()
    python("-m", "qat", "report", "demo/trained", "--out", "page.html")
    assert "data:image" in (work / "page.html").read_text(encoding="utf-8")
    python("-m", "qat", "export", "demo/trained", "--to", "packed", "--out", "packed")
    assert (work / "packed" / "model.safetensors").is_file()
