"""The scripts about kills and full disks run, small, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def said(*words: str) -> str:
    """Run a script that must succeed, and return what it prints."""
    result = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_killed_work_ends_byte_equal(tmp_path: Path) -> None:
    options = ["--kills", "10", "--seed", "1", "--scratch", str(tmp_path)]
    printed = said("tests/stress/measure_kills.py", *options)
    assert "10 of 10 kills left no trace" in printed
    for kind in ("training", "rollouts", "checkpoints", "cache", "hub"):
        assert f"{kind}: 2 of 2 kills" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")
def test_full_disks_lose_nothing() -> None:
    assert "full disks, at" in said("tests/stress/measure_disk_full.py", "--every", "33")


def test_scripts_reach_figures_through_the_module_that_adds_its_folder() -> None:
    scripts = Path(__file__).parent.glob("[!t]*.py")
    found = {path.name for path in scripts if "from figures import" in path.read_text("utf-8")}
    assert found == {"kill_case.py"}
