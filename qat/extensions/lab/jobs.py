"""Runs the jobs of a comparison, each as a process that leaves a row or an error message.

`qat bench sweep` and `qat bench quality` use this. They define what a job does and what its row
holds; here are start, device assignment, end, failure and resumption, which are the same for both.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from qat import logs
from qat.config import Settings
from qat.errors import ConfigError, QatError
from qat.files import locked, write_atomically
from qat.process import is_out_of_memory

POLL_S = 0.02
PATIENCE_S = 5.0
"""Seconds to wait for the leftover jobs of a killed comparison to release the directory."""
ERROR = re.compile(r"(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception): \S.*)")
"""The error line of a traceback, before the hints that CUDA appends. The launcher's own errors,
which have no message on that line, do not match."""
GRACE_S = 2.0  # seconds between SIGTERM, on which a process may write its stack, and SIGKILL


class JobFiles:
    """Paths of a job's files; a subclass has a directory of results `out` and a `label`."""

    module: ClassVar[str]  # the module that runs the job: it calls `run_as_process`

    @property
    def ranks(self) -> int:
        """Processes that run the job together, started by torchrun if there are several."""
        return 1

    @property
    def row(self) -> Path:
        """The result of a finished job, written atomically; a job that has one is not rerun."""
        return self.out / "rows" / f"{self.label}.json"

    @property
    def job(self) -> Path:
        """The settings that the job's process reads."""
        return self.out / "jobs" / f"{self.label}.json"

    @property
    def log(self) -> Path:
        """The output of the job's process."""
        return self.out / "logs" / f"{self.label}.log"

    @property
    def directory(self) -> Path:
        """The directory of the job's own files, such as training runs and heartbeats of ranks."""
        return self.out / "runs" / self.label

    def finish(self, found: object) -> None:
        """Write the row, or rows, of the job."""
        self.row.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.row, json.dumps(found, indent=1, default=str) + "\n")


def name_in_path(name: str) -> str:
    """Return the name in lower case with a hyphen for every character but letters and digits."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())


@dataclass(frozen=True)
class Ended:
    """A job whose process has ended."""

    job: Any
    status: int
    is_late: bool  # True if the process was ended by the timeout

    @property
    def error_message(self) -> str:
        """The reason of a failure: a user error, the last error of a traceback, or the last line.

        Later lines do not matter: launchers report the end of their ranks, CUDA ways to debug.
        """
        log = self.job.log
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = text.strip().splitlines()
        messages = [line for line in lines if line.startswith("qat: ")]
        messages = messages or [found[1] for line in lines if (found := ERROR.match(line))] or lines
        return messages[-1].removeprefix("qat: ") if messages else f"exit status {self.status}"


def run_processes(
    jobs: Sequence[Any],
    after_each: Callable[[Ended], bool],
    *,
    progress: tuple[str, str],
    parallel: int = 1,
    placed: Callable[[Any, list[Any]], Any] = lambda job, _busy: job,
    watched: Callable[[Any, int], AbstractContextManager] = lambda _job, _pid: nullcontext(),
    timeout_s: float = float("inf"),
    keep_open: tuple[int, ...] = (),
) -> None:
    """Run each job as `python -m MODULE JOB.json`; the jobs end with this process.

    Args:
        jobs: settings that are `JobFiles`, in starting order.
        after_each: called when a job has ended; false starts no more jobs and ends the running
            ones.
        progress: label and unit of the progress line.
        parallel: number of jobs that run in parallel.
        placed: returns a job as it starts, such as with a device, given the running jobs.
        watched: a context that is entered while a job with the given process ID runs.
        timeout_s: time limit of a job, after which all its processes are ended.
        keep_open: file descriptors that the jobs inherit.
    """
    waiting, running = [*jobs], []
    with logs.progress(progress[0], len(jobs), progress[1]) as ticker:
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    job = placed(waiting.pop(0), [each.job for each in running])
                    running.append(_Running(job, keep_open, watched))
                for each in [each for each in running if each.is_over(timeout_s)]:
                    running.remove(each)
                    goes_on = after_each(each.end())
                    ticker.advance()
                    if not goes_on:
                        return
                time.sleep(POLL_S)
        finally:
            for each in running:
                each.end()


class _Running:
    """A job's process, which leads its own process group and is watched until it ends."""

    def __init__(self, job: Any, keep_open: tuple[int, ...], watched: Callable) -> None:  # noqa: ANN401
        self.job = job
        for path in (job.job, job.log):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.job, job.model_dump_json(indent=1) + "\n")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        launcher = [*launcher, str(job.ranks)] if job.ranks > 1 else []
        with job.log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, *launcher, "-m", job.module, str(job.job)],
                stdin=subprocess.PIPE,  # its end of file ends the job: see `run_as_process`
                stdout=file,
                stderr=file,
                start_new_session=True,
                pass_fds=keep_open,
            )
        self._began, self._is_late = time.monotonic(), False
        self._watch = watched(job, self._process.pid)
        self._watch.__enter__()

    def is_over(self, timeout_s: float) -> bool:
        if self._process.poll() is not None:
            return True
        self._is_late = time.monotonic() - self._began > timeout_s
        return self._is_late

    def end(self) -> Ended:
        """End the process and its group: first SIGTERM, then SIGKILL."""
        try:
            self._watch.__exit__(None, None, None)
        finally:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            self._signal(signal.SIGKILL)
            self._process.communicate()
        return Ended(self.job, self._process.returncode, self._is_late)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, number)


def run_as_process(kind: type[Settings], do: Callable[[Any], object]) -> None:
    """Run the job whose file is named on the command line; a user error is one line.

    When standard input ends, this process and its group are killed: no job outlives its parent.
    """

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock would be held at interpreter exit
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    logs.configure()
    job = kind.parse(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[1])
    try:
        do(job)
    except QatError as error:
        sys.exit(f"qat: {error}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.print_exc()
        sys.exit(
            "qat: memory ran out; run fewer jobs side by side (--workers of qat bench quality, for "
            "each GPU), or set a smaller batch_size"
        )


@contextmanager
def claimed(out: Path) -> Iterator[int]:
    """Lock a directory of results against other sweeps, and yield the descriptor of the lock.

    Jobs inherit it: what a killed sweep left running holds the lock until it ends.

    Raises:
        ConfigError: another process holds the lock.
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
