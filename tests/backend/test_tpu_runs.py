"""Whole runs with `--device tpu`, on a device of that name whose operators the CPU computes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils import backend_registration

STAND_IN = Path(__file__).parents[1] / "tpu_stand_in.py"
HAS_PARTS = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PARTS, reason="this torch lets nobody make a device in Python")
def test_runs_there_are_the_cpus(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, STAND_IN, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert "--device tpu is experimental" in told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    ours, theirs = found["tpu"], found["cpu"]
    assert ours["ids"] == theirs["ids"]
    assert np.allclose(ours["logprobs"], theirs["logprobs"], rtol=0, atol=1e-5)
    assert ours["run"] == ours["whole"], "a run that went on is another one"
    # bfloat16 rounds by 4e-3, and of 12,288 codes two more may flip
    for name, rel, most in (("whole", 1e-5, 0), ("lower", 5e-3, 2e-4)):
        for line, expected in zip(ours[name], theirs[name], strict=True):
            numbers = {key: value for key, value in expected.items() if isinstance(value, float)}
            assert {key: line[key] for key in numbers} == pytest.approx(numbers, rel=rel, abs=most)
    # in bfloat16, as `auto` is there
    assert ours["verdict"]["kl_tail_nats"] == pytest.approx(
        theirs["verdict"]["kl_tail_nats"], rel=1e-3
    )
