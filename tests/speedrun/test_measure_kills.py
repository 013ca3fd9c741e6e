"""Work killed with SIGKILL at random instants, in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_killed_work_ends_byte_equal() -> None:
    command = [sys.executable, "speedrun/measure_kills.py", "--kills", "12", "--seed", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "12 of 12 kills left no trace" in result.stdout
    for kind in ("training", "checkpoints", "cache", "hub"):
        assert f"{kind}: 3 of 3 kills" in result.stdout
