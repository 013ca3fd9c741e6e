"""A build killed with SIGKILL at random instants, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_killed_builds_end_byte_equal() -> None:
    command = [sys.executable, "speedrun/measure_cache_resume.py", "--kills", "4", "--seed", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "4 of 4 killed builds ended byte-equal" in result.stdout
