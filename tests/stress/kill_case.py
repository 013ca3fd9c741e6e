"""What the fault scripts share: the trainer's small place, children to kill, and figures."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import torch

# a script's own folder is on the path when it is started, and no other
TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS), str(TESTS.parent / "speedrun")]

from cache_case import build, texts  # noqa: E402
from figures import record  # noqa: E402
from train_case import config, make_place, with_teacher  # noqa: E402

from qat.train.saver import problem  # noqa: E402

__all__ = ["build", "config", "make_place", "record", "texts", "with_teacher"]
OF_TIME = ("run.json", "heartbeat-*", "events*", "metrics.json", "stacks-*", "attempt-*")
"""Files of a run that tell when and where it ran."""


def fork(act: Callable[[], object], log: Path) -> int:
    """The process id of a child that does `act` and is gone; what it says goes to `log`.

    No thread may run in this process: a child would find their locks held.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        torch.set_num_threads(1)  # makes its pool anew, before two threads race to do so
        act()
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def killed(
    act: Callable[[], object], log: Path, kill: Callable[[Callable[[], bool]], None] | None
) -> bool:
    """Run `act` in a child process, kill it when `kill` returns, and return whether it was killed.

    `kill` is given a function that says whether the child has ended by itself. None lets it end.

    Raises:
        RuntimeError: the child failed, or somebody else killed it (no memory is left, say).
    """
    child = fork(act, log)
    ended: list[int] = []

    def has_ended() -> bool:
        if not ended:
            found, status = os.waitpid(child, os.WNOHANG)
            ended.extend([status] if found else [])
        return bool(ended)

    if kill is not None:
        kill(has_ended)
        if not has_ended():
            os.kill(child, signal.SIGKILL)
    status = ended[0] if ended else os.waitpid(child, 0)[1]
    if kill and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"a child failed with {status}, see {log}:\n{log.read_text()}")
    return False


def after(seconds: float) -> Callable[[Callable[[], bool]], None]:
    """A `kill` so many seconds after the child began."""

    def wait(has_ended: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not has_ended():
            time.sleep(0.002)

    return wait


def contents(directory: Path, ignored: tuple[str, ...] = ()) -> dict[str, bytes]:
    """The bytes of each file below `directory`, by name, less what is or lies in `ignored`."""
    found = {}
    for path in sorted(directory.rglob("*")):
        parts = path.relative_to(directory).parts
        is_ignored = any(fnmatch(part, pattern) for part in parts for pattern in ignored)
        if path.is_file() and not is_ignored:
            found["/".join(parts)] = path.read_bytes()
    return found


def damage(run: Path) -> str | None:
    """Return what is wrong with a checkpoint that has its name, if anything."""
    for path in sorted(run.glob("checkpoints/step-*")):
        if (found := problem(path)) is not None:
            return f"{path.name}: {found}"
    return None
