"""Runs a sweep's processes one after the other; what one of them does costs only itself."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from qat.bench.processes import end_group, last_words, start_tied
from qat.bench.sweep.plan import Run
from qat.bench.sweep.telemetry import Watch, has_gpu_tool
from qat.errors import ConfigError
from qat.files import write_atomically
from qat.lock import locked
from qat.logs import progress

PATIENCE_S = 5.0
"""How long to wait for the last run of a sweep that was killed to notice."""

logger = logging.getLogger(__name__)


@contextmanager
def claimed(out: Path) -> Iterator[int]:
    """Hold a directory of results, so that no other sweep runs there; the lock's descriptor.

    Runs inherit it: what a killed sweep has left running holds the directory until it is gone.

    Raises:
        ConfigError: somebody else holds it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(locked(out / ".lock", out, wait_s=PATIENCE_S))
        except TimeoutError:
            raise ConfigError(
                f"out={out} is in use by another sweep, expected one at a time; wait for it, or "
                "choose another --out"
            ) from None
        yield lock


def run_all(
    runs: Sequence[Run],
    lock: int,
    after_each: Callable[[], object],
    *,
    timeout_s: float,
    stop_on_error: bool,
    sample_s: float,
) -> None:
    """Run those that have no row yet, each alone; `after_each` is called when one has ended.

    When this process ends, however it ends, so do they.
    """
    waiting = [run for run in runs if not run.row.exists()]
    with_gpu = bool(waiting) and has_gpu_tool()
    with progress("runs", len(waiting), "runs") as ticker:
        for run in waiting:
            process = _start(run, lock)
            try:
                with Watch(process.pid, run.telemetry, sample_s, with_gpu=with_gpu):
                    in_time = _wait(process, timeout_s)
            finally:
                end_group(process)
            has_failed = _end(run, process.returncode, None if in_time else timeout_s)
            after_each()
            ticker.advance()
            if has_failed and stop_on_error:
                return


def _start(run: Run, lock: int) -> subprocess.Popen:
    run.job.parent.mkdir(parents=True, exist_ok=True)
    run.failure.unlink(missing_ok=True)
    write_atomically(run.job, run.model_dump_json(indent=1) + "\n")
    command = [sys.executable, "-m", "qat.bench.sweep.job", str(run.job)]
    return start_tied(command, run.log, leads_group=True, keep_open=(lock,))


def _wait(process: subprocess.Popen, timeout_s: float) -> bool:
    """Whether the process ended in time."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(run: Run, status: int, timeout_s: float | None) -> bool:
    """Note the failure of a run that has left no row; whether it has."""
    if run.row.exists():
        logger.info("%s, repeat %d: done", run.group, run.repeat)
        return False
    kind = "failed" if timeout_s is None else "timeout"
    message = last_words(run.log, status)
    if timeout_s is not None:
        message = f"no end after {timeout_s:g} s; stacks are in {run.log}"
    logger.warning("%s, repeat %d failed: %s", run.group, run.repeat, message)
    run.failure.parent.mkdir(parents=True, exist_ok=True)
    found = {"status": kind, "exit": status, "message": message, "log": str(run.log)}
    write_atomically(run.failure, json.dumps(found) + "\n")
    return True
