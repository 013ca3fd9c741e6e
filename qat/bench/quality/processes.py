"""Runs jobs as processes, some side by side; one that fails leaves the others alone."""

import logging
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from qat.bench.processes import last_words, start_tied
from qat.bench.quality.plan import Job, Places
from qat.files import write_atomically
from qat.logs import progress

POLL_S = 0.1

logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    """A job that ended without rows."""

    name: str
    seed: int
    message: str
    """The last line that it said."""
    log: Path


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen


def run_jobs(
    jobs: Sequence[Job],
    devices: Sequence[str],
    places: Places,
    after_each: Callable[[list[Failure]], object],
) -> list[Failure]:
    """Run all jobs, as many side by side on each device as they say; the failures.

    When this process ends, however it ends, so do they. `after_each` is called with the failures
    so far whenever a job has ended.
    """
    waiting, running, failures = deque(jobs), [], []
    try:
        with progress("training recipes", len(jobs), "jobs") as ticker:
            while waiting or running:
                while waiting and len(running) < waiting[0].workers * len(devices):
                    device = least_busy(devices, [each.job.device for each in running])
                    job = waiting.popleft().model_copy(update={"device": device})
                    running.append(_Running(job, _start(job, places)))
                for each in [each for each in running if each.process.poll() is not None]:
                    running.remove(each)
                    failures += _end(each, places)
                    after_each(failures)
                    ticker.advance()
                time.sleep(POLL_S)
    finally:
        for each in running:
            each.process.kill()
            each.process.communicate()
    return failures


def least_busy(devices: Sequence[str], busy: Sequence[str]) -> str:
    """The first of the devices that occur in `busy` least often."""
    return min(devices, key=busy.count)


def _start(job: Job, places: Places) -> subprocess.Popen:
    path, log = places.job(job.label), places.log(job.label)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, job.model_dump_json(indent=1) + "\n")
    return start_tied([sys.executable, "-m", "qat.bench.quality.job", str(path)], log)


def _end(ended: _Running, places: Places) -> list[Failure]:
    """The failure of a job whose process has ended, if it is one."""
    job, process = ended
    process.communicate()
    if process.returncode == 0 and places.rows(job.label).exists():
        logger.info("%s, seed %d: done", job.name, job.seed)
        return []
    log = places.log(job.label)
    message = last_words(log, process.returncode)
    logger.warning("%s, seed %d failed: %s", job.name, job.seed, message)
    return [Failure(job.name, job.seed, message, log)]
