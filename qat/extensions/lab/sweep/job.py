"""One run of a sweep in its own process, which ends when its standard input closes.

`python -m qat.extensions.lab.sweep.job JOB.json` writes a complete row, or none and the error to
its log. On SIGTERM it writes the stacks of its threads first.
"""

import faulthandler
import logging
import signal
import subprocess
import sys
import time

from qat.errors import TrainingError
from qat.extensions.lab.jobs import run_as_process
from qat.extensions.lab.sweep.plan import SweepRun, fill_command
from qat.extensions.lab.sweep.telemetry import rank_facts

logger = logging.getLogger(__name__)


def run_job(run: SweepRun) -> None:
    """Do the run's work and write its row."""
    logger.info("%s, repeat %d", run.group, run.repeat)
    began = time.perf_counter()
    if run.verb == "command":
        found = run_command(run)
    else:  # a command starts at once: it does not need torch
        from qat.extensions.lab.sweep.work import time_bench, time_training

        found = time_bench(run) if run.verb == "bench" else time_training(run)
    if found is None:  # only rank 0 reports
        return
    run.finish(
        {
            "kind": "sweep",
            "case": run.group,
            "sweep": run.sweep,
            "verb": run.verb,
            "student": run.student,
            "group": run.group,
            "repeat": run.repeat,
            "settings": run.settings,
            "key": run.key,
            **found,
            "wall_s": time.perf_counter() - began,
        }
    )


def run_command(run: SweepRun) -> dict[str, object]:
    """Run any program, such as torchrun, in the run's own directory, and time it.

    `{python}` is this interpreter and `{out}` the run's directory. `heartbeat-rankN.jsonl` files
    that its ranks write there are reported per rank. Its output goes to the run's log.

    Raises:
        TrainingError: the program is missing, or its exit status is not 0.
    """
    places = {"python": sys.executable, "out": str(run.directory)}
    command = fill_command(run.command, {**places, **run.settings})
    run.directory.mkdir(parents=True, exist_ok=True)
    for old in run.directory.glob("heartbeat-rank*.jsonl"):
        old.unlink()  # left by an interrupted attempt
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


if __name__ == "__main__":
    faulthandler.register(signal.SIGTERM, chain=True)
    run_as_process(SweepRun, run_job)
