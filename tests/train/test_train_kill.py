"""Runs killed with SIGKILL at random steps, each a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_killed_runs_end_byte_equal() -> None:
    command = [sys.executable, "speedrun/measure_train_resume.py", "--kills", "2", "--seed", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "2 of 2 kills ended byte-equal" in result.stdout
