"""The script about full disks runs, small, on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")
def test_full_disks_lose_nothing() -> None:
    command = [sys.executable, "tests/stress/measure_disk_full.py", "--every", "33"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "full disks, at" in result.stdout
