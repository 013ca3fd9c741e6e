"""Work killed with SIGKILL at random instants, in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_killed_work_ends_byte_equal(tmp_path: Path) -> None:
    options = ["--kills", "10", "--seed", "1", "--scratch", str(tmp_path)]
    command = [sys.executable, "tests/stress/measure_kills.py", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "10 of 10 kills left no trace" in result.stdout
    for kind in ("training", "rollouts", "checkpoints", "cache", "hub"):
        assert f"{kind}: 2 of 2 kills" in result.stdout
    assert not list(tmp_path.iterdir())
