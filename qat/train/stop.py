"""Who asks a run to stop: SIGTERM, Ctrl-C, or a file called HALT in its directory."""

import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

HALT = "HALT"
"""The file that anybody may make; its run removes it as it obeys."""
LOOK_S = 1.0
"""Seconds between looks at that file."""
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, HALT: 3}


class Stops:
    """Notes wishes to stop while its block runs; the loop asks for them between steps.

    The first signal is noted. After it both signals have their old handlers back: a second one ends
    the process at once.
    """

    def __init__(self, halt: Path) -> None:
        self._halt = halt
        self._wish: str | None = None
        self._looked_s = -LOOK_S
        self._handlers: dict[int, object] = {}

    def wanted(self) -> str | None:
        """`SIGTERM`, `SIGINT` or `HALT`, once somebody asked; else None."""
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
        self._halt.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._wish = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())
