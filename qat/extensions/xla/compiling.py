"""Progress messages about graphs that are being compiled."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between polls of the compiler."""
FIRST_S, EVERY_S = 10.0, 30.0
"""Seconds after which one graph's compilation is logged, and between further lines."""


class Graphs(NamedTuple):
    """Counts of graphs that this process has started and finished compiling."""

    begun: int
    done: int

    @property
    def is_under_way(self) -> bool:
        """True while a graph is being compiled."""
        return self.begun > self.done


class CompileLog:
    """Logs from its own thread which graph is being compiled and for how long.

    Args:
        graphs: returns the compiler's counts; called by the thread.
        clock: monotonic seconds.
    """

    def __init__(
        self, graphs: Callable[[], Graphs], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._graphs = graphs
        self._clock = clock
        self._what = self._name = "a graph"
        self._begun = 0
        self._since: float | None = None
        self._next_s = FIRST_S

    @contextmanager
    def about(self, what: str) -> Iterator[None]:
        """Attribute graphs that are compiled inside the block to `what`."""
        before, self._what = self._what, what
        try:
            yield
        finally:
            self._what = before

    @contextmanager
    def running(self) -> Iterator[None]:
        """Poll and log inside the block."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(POLL_S):
                self.poll()

        thread = threading.Thread(target=watch, name="qat-compiling", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def poll(self) -> None:
        """Poll the compiler once."""
        graphs, now = self._graphs(), self._clock()
        if self._since is not None and (not graphs.is_under_way or graphs.begun != self._begun):
            if now - self._since >= FIRST_S:
                logger.info("compiled %s in %.0f s", self._name, now - self._since)
            self._since = None
        if not graphs.is_under_way:
            return
        if self._since is None:
            self._since, self._begun, self._next_s = now, graphs.begun, FIRST_S
            self._name = self._what  # the block of `about` may end before the graph does
        if now - self._since >= self._next_s:
            seconds = now - self._since
            logger.info("compiling %s: %.0f s so far (graph %d)", self._name, seconds, graphs.begun)
            self._next_s = seconds + EVERY_S
