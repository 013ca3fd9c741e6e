"""Progress messages and checks for devices that compile each new shape."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from qat.backend.base import Backend
from qat.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between polls of the compiler."""
FIRST_S, EVERY_S = 10.0, 30.0
"""Seconds after which one graph's compilation is logged, and between further lines."""
FIRST_STEPS, MOST_IN_A_ROW = 2, 4
"""Steps that are expected to compile (the first finds no moments, the second does), and the most
consecutive steps that may.
"""


class Graphs(NamedTuple):
    """Counts of graphs that this process has started and finished compiling."""

    begun: int
    done: int

    @property
    def is_under_way(self) -> bool:
        """True while a graph is being compiled."""
        return self.begun > self.done


class Teller:
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
    def telling(self) -> Iterator[None]:
        """Poll and log inside the block."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_S):
                self.look()

        thread = threading.Thread(target=watch, name="qat-compiling", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def look(self) -> None:
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


class Steadiness:
    """Raises an error when too many consecutive steps each compile a new graph."""

    def __init__(self, device: Backend) -> None:
        self._device = device
        self._in_a_row = 0
        self._steps = 0
        self.compiled = 0
        """Number of graphs compiled in steps."""
        self.anew = 0
        """Number of these compiled after the first `FIRST_STEPS` steps."""
        self.compile_s = 0.0
        """Seconds spent on compiling these graphs."""

    @contextmanager
    def step(self, shape: tuple[int, ...]) -> Iterator[None]:
        """Count what one step over sequences of this shape compiles.

        Raises:
            ConfigError: more than `MOST_IN_A_ROW` consecutive steps have compiled.
        """
        device = self._device
        before, before_s = device.compile_count(), device.compile_seconds()
        yield
        new = device.compile_count() - before
        self.compile_s += device.compile_seconds() - before_s
        self.compiled += new
        self._steps += 1
        self.anew += new * (self._steps > FIRST_STEPS)
        self._in_a_row = self._in_a_row + 1 if new else 0
        if self._in_a_row > MOST_IN_A_ROW:
            raise ConfigError(self._complaint(shape))

    def expect_none(self) -> None:
        """Count every graph compiled from now on as a recompilation."""
        self._steps, self._in_a_row, self.anew = FIRST_STEPS, 0, 0

    def facts(self) -> dict[str, object]:
        """Return the time spent on compiling steps and the device's counters, for records."""
        counts = self._device.counts()
        return {"step_compile_s": self.compile_s, **counts} if counts else {}

    def _complaint(self, shape: tuple[int, ...]) -> str:
        names = ", ".join(self._device.host_fallbacks())
        ran = f", with {names} on the host" if names else ""
        return (
            f"each of the last {self._in_a_row} steps compiled a graph of its own (the last over "
            f"{' x '.join(map(str, shape))} tokens{ran}), expected one graph for all; give all "
            "steps one batch size and length, and let no shape or operator of a loss depend on "
            "values (torch.where in the place of a boolean mask)"
        )
