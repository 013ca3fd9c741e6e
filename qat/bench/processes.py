"""Processes that measure: tied to whoever started them, each with a log of what it said."""

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

GRACE_S = 2.0
"""Between asking a process to end, which lets it write its stack, and ending it."""


def start_tied(
    command: Sequence[str], log: Path, *, leads_group: bool = False, keep_open: tuple[int, ...] = ()
) -> subprocess.Popen:
    """Start a process whose words are appended to `log`; its standard input ends when we do.

    The process watches for that with `end_with_input`. `leads_group` puts it and its children into
    a group of their own; `keep_open` are file descriptors that it inherits.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            start_new_session=leads_group,
            pass_fds=keep_open,
        )


def end_with_input(*, with_group: bool = False) -> None:
    """From now on, end this process (and its group) at once when its standard input ends."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock would be held when the interpreter ends
            pass
        if with_group:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_group(process: subprocess.Popen) -> None:
    """End a process that leads a group, and all of the group: asked first, then killed."""
    _signal(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    _signal(process.pid, signal.SIGKILL)
    process.communicate()


def last_words(log: Path, status: int) -> str:
    """The last line that a process said, or how it ended if it said nothing."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("qat: ") if lines else f"exit status {status}"


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:  # all of them have ended
        pass
