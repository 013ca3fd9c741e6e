"""gpu_check.sh with a stand-in for its environment's Python; the tests it names are real."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qat.backend import nvidia

ROOT = Path(__file__).resolve().parents[2]
SPEEDRUN = ROOT / "speedrun"
PYTHON = """#!/bin/bash
if [ "$1" = - ]; then exit "${NO_GPU:-0}"; fi
if [ "$1 $2" = "-m pytest" ]; then
    echo "$*" >>"$LOG"
    for each in ${FAILING:-}; do [[ "$*" != *"$each"* ]] || exit 5; done
    exit 0
fi
exec REAL -S "$@"
"""
"""It fails a check by the name of a test file, with pytest's status for no test at all."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "speedrun").mkdir()
    for name in ("gpu_check.sh", "setup_env.sh", "constraints.txt"):
        (tmp_path / "speedrun" / name).write_bytes((SPEEDRUN / name).read_bytes())
    (tmp_path / "pyproject.toml").touch()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.replace("REAL", sys.executable))
    python.chmod(0o755)
    installed = 'source speedrun/setup_env.sh; installation_hash dev >"$MARK-dev"'
    subprocess.run(["bash", "-c", installed], cwd=tmp_path, check=True)
    return tmp_path


def run(clone: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LOG": str(clone / "log"), **variables}
    command = ["bash", str(clone / "speedrun/gpu_check.sh"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def paths_run(clone: Path) -> list[str]:
    return re.findall(r"tests/gpu\S*", (clone / "log").read_text())


def test_every_check_runs_and_names_tests_that_exist(clone: Path) -> None:
    assert run(clone).returncode == 0
    paths = paths_run(clone)
    assert len(paths) == len(set(paths)) and len((clone / "log").read_text().splitlines()) == 4
    for path in paths:
        assert "pytest.mark.gpu" in (ROOT / path).read_text(encoding="utf-8")


def test_a_failed_check_fails_the_whole_after_the_others_ran(clone: Path) -> None:
    failed = run(clone, FAILING="test_nsa_gpu.py test_ranks_gpu.py")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == "qat: failed: causality and parity,two ranks"
    assert len((clone / "log").read_text().splitlines()) == 4


def test_full_runs_all_gpu_tests(clone: Path) -> None:
    assert run(clone, "--full").returncode == 0
    assert paths_run(clone) == ["tests/gpu"]


@pytest.mark.parametrize(("words", "variables"), [((), {"NO_GPU": "1"}), (("--fast",), {})])
def test_nothing_is_checked_without_a_gpu_or_with_an_unknown_word(
    clone: Path, words: tuple, variables: dict
) -> None:
    assert run(clone, *words, **variables).returncode == 1
    assert not (clone / "log").exists()


@pytest.mark.skipif(nvidia.present() is not None, reason="this machine has a GPU")
def test_nothing_is_installed_where_there_is_no_gpu(clone: Path) -> None:
    shutil.rmtree(clone / ".venv")
    refused = run(clone)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert "no GPU" in refused.stderr and not (clone / ".venv").exists()


def test_the_page_for_contributors_names_a_command_that_selects_tests() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ +(.*?) +# on a machine with a GPU", page, re.M)
    assert line == "bash speedrun/gpu_check.sh --full"
