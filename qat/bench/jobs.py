"""Runs the jobs of a comparison, each a process of its own that leaves a row or its last words.

`qat bench sweep` and `qat bench quality` run on this. What a job does and what its row holds is
theirs; how jobs start, wait for a device, end, fail and go on after a stop is the same for both.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from qat import logs
from qat.config import Settings
from qat.errors import ConfigError, QatError
from qat.files import locked, write_atomically

POLL_S = 0.02
PATIENCE_S = 5.0
"""How long to wait for the last job of a comparison that was killed to notice."""
ERROR = re.compile(r"(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception): \S.*)")
"""What a traceback ends with, before what CUDA adds to it; the launcher's own says nothing."""
GRACE_S = 2.0
"""Between asking a process to end, which lets it write its stack, and ending it."""


class JobFiles:
    """Where the files of a job lie, which has a directory of results `out` and a `label`."""

    module: ClassVar[str]
    """What runs the job: it calls `run_as_process`."""

    @property
    def ranks(self) -> int:
        """Processes that do the job together, started by torchrun if there are several."""
        return 1

    @property
    def row(self) -> Path:
        """What a finished job leaves, whole or not at all; a job with it never runs again."""
        return self.out / "rows" / f"{self.label}.json"

    @property
    def job(self) -> Path:
        """The settings that its process reads."""
        return self.out / "jobs" / f"{self.label}.json"

    @property
    def log(self) -> Path:
        """What its process said."""
        return self.out / "logs" / f"{self.label}.log"

    @property
    def directory(self) -> Path:
        """Directory of files that the job makes, such as training runs and heartbeats of ranks."""
        return self.out / "runs" / self.label

    def finish(self, found: object) -> None:
        """Leave the row, or rows, that the job found."""
        self.row.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.row, json.dumps(found, indent=1, default=str) + "\n")


def name_in_path(name: str) -> str:
    """The name in lower case with a hyphen for whatever is no letter or digit."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())


@dataclass(frozen=True)
class Ended:
    """A job whose process is gone."""

    job: Any
    status: int
    is_late: bool
    """Whether it was ended because it took too long."""

    @property
    def last_words(self) -> str:
        """Why it failed: a user's mistake, the last error of a traceback, or the last line.

        More follows these: a launcher tells of the end of its ranks, CUDA of ways to debug.
        """
        log = self.job.log
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = text.strip().splitlines()
        said = [line for line in lines if line.startswith("qat: ")]
        said = said or [found[1] for line in lines if (found := ERROR.match(line))] or lines
        return said[-1].removeprefix("qat: ") if said else f"exit status {self.status}"


def run_processes(
    jobs: Sequence[Any],
    after_each: Callable[[Ended], bool],
    *,
    told: tuple[str, str],
    side_by_side: int = 1,
    placed: Callable[[Any, list[Any]], Any] = lambda job, _busy: job,
    watched: Callable[[Any, int], AbstractContextManager] = lambda _job, _pid: nullcontext(),
    timeout_s: float = float("inf"),
    keep_open: tuple[int, ...] = (),
) -> None:
    """Run each job as `python -m ITS.MODULE JOB.json`; when this process ends, so do they.

    Args:
        jobs: settings with a `JobFiles`, in the order in which they start.
        after_each: called when one has ended; false starts no more of them.
        told: what the line of progress says, and what it counts.
        side_by_side: how many run at once.
        placed: a job as it starts, such as with a device, given the jobs that are running; None
            while it waits for one of them. What still waits when none runs is given up.
        watched: what goes on while a job with that process id runs.
        timeout_s: a job that takes longer is ended with all its processes.
        keep_open: file descriptors that the jobs inherit.
    """
    waiting, running = [*jobs], []
    with logs.progress(told[0], len(jobs), told[1]) as ticker:
        try:
            while True:
                for job in [*waiting]:
                    if len(running) == side_by_side:
                        break
                    here = placed(job, [each.job for each in running])
                    if here is not None:
                        waiting.remove(job)
                        running.append(_Running(here, keep_open, watched))
                if not running:
                    return
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


def least_busy(devices: Sequence[str], busy: Sequence[str]) -> str:
    """The first of the devices that occur in `busy` least often."""
    return min(devices, key=busy.count)


class _Running:
    """A job's process, which leads a group of its own and is watched until it ends."""

    def __init__(self, job: Any, keep_open: tuple[int, ...], watched: Callable) -> None:  # noqa: ANN401
        self.job = job
        for path in (job.job, job.log):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.job, job.model_dump_json(indent=1) + "\n")
        with job.log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, *_launcher(job.ranks), "-m", job.module, str(job.job)],
                stdin=subprocess.PIPE,  # the job ends when it does: see `run_as_process`
                stdout=file,
                stderr=file,
                start_new_session=True,
                pass_fds=keep_open,
            )
        self._began = time.monotonic()
        self._is_late = False
        self._watch = watched(job, self._process.pid)
        self._watch.__enter__()

    def is_over(self, timeout_s: float) -> bool:
        """Whether the process has ended, or has had its time."""
        if self._process.poll() is not None:
            return True
        self._is_late = time.monotonic() - self._began > timeout_s
        return self._is_late

    def end(self) -> Ended:
        """End the process, if it is still there, and all of its group: asked first, then killed."""
        try:
            self._watch.__exit__(None, None, None)
        finally:
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                pass
            self._signal(signal.SIGKILL)
            self._process.communicate()
        return Ended(self.job, self._process.returncode, self._is_late)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:  # all of them have ended
            pass


def _launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def run_as_process(kind: type[Settings], do: Callable[[Any], object]) -> None:
    """Do the job whose file is named on the command line; a user's mistake is one line.

    When standard input ends, this process and its group do at once: no job outlives its starter.
    """

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock would be held when the interpreter ends
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
        from qat.backend.device import select  # which brings torch: a plan is read without

        if not select("cpu").is_out_of_memory(error):
            raise
        traceback.print_exc()
        sys.exit(
            "qat: memory ran out; run fewer jobs side by side (--workers of qat bench quality, for "
            "each GPU), or set a smaller batch_size"
        )


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
