"""Who asks a run to stop: a signal (SIGTERM, Ctrl-C, a terminal that closes) or a file HALT."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

HALT = "HALT"
"""The file that anybody may make; its run removes it as it obeys."""
LOOK_S = 1.0
"""Seconds between looks at that file."""
EXIT_CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143, HALT: 3}


class Stops:
    """Notes wishes to stop while its block runs; the loop asks for them between steps.

    The first signal is noted. After it SIGINT and SIGTERM have their old handlers back: a second
    one ends the process at once. A terminal that closes says so several times, which is one wish;
    where SIGHUP is ignored, as below `nohup`, it stays so.
    """

    def __init__(self, halt: Path) -> None:
        self._halt = halt
        self._wish: str | None = None
        self._looked_s = -LOOK_S
        self._handlers: dict[int, Any] = {}

    def wanted(self) -> str | None:
        """`SIGTERM`, `SIGINT`, `SIGHUP` or `HALT`, once somebody asked; else None."""
        if self._wish is not None:
            return self._wish
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return None
        self._looked_s = now
        if self._halt.exists():
            self._wish = HALT
        return self._wish

    def obeyed(self) -> None:
        """The run has stopped: remove the file, so that it can go on."""
        try:
            self._halt.unlink(missing_ok=True)
        except OSError as error:  # a directory, or one of somebody else
            logger.warning(
                "%s cannot be removed (%s): remove it before you go on", self._halt, error.strerror
            )

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore(*self._handlers)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._wish = self._wish or signal.Signals(number).name
        if number == signal.SIGHUP:
            _let_go_of_terminal()
        self._restore(signal.SIGINT, signal.SIGTERM)

    def _restore(self, *numbers: int) -> None:
        for number in numbers:
            if number in self._handlers:
                signal.signal(number, self._handlers.pop(number))


def _let_go_of_terminal() -> None:
    """Send to nowhere what would go to a terminal that is gone: writing there fails."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
