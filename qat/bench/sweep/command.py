"""A run of any program, torchrun among them: how long it took, and how long its ranks' steps."""

import subprocess
import sys
import time

from qat.bench.sweep.plan import Run, fill_command
from qat.bench.sweep.telemetry import rank_facts
from qat.errors import TrainingError


def run_command(run: Run) -> dict[str, object]:
    """Run the command in a directory of its own and time it; its words go to the run's log.

    `{python}` is this interpreter and `{out}` the run's directory. What its ranks write there as
    `heartbeat-rankN.jsonl` is told rank by rank.

    Raises:
        TrainingError: it is not there, or ends with another status than 0.
    """
    places = {"python": sys.executable, "out": str(run.directory)}
    command = fill_command(run.command, {**places, **run.settings})
    run.directory.mkdir(parents=True, exist_ok=True)
    for old in run.directory.glob("heartbeat-rank*.jsonl"):
        old.unlink()  # of an attempt that was stopped
    began = time.perf_counter()
    try:
        status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    except OSError as error:
        raise TrainingError(
            f"command {command[0]!r}: {error.strerror}, expected a program; mend the recipe"
        ) from None
    seconds = time.perf_counter() - began
    if status:
        raise TrainingError(
            f"command {command[0]!r} ended with status {status}, expected 0; see its words above"
        )
    return {
        "unit": "seconds a run",
        "samples": [seconds],
        "cost_s": seconds,
        **rank_facts(run.directory),
    }
