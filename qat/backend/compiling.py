"""Devices whose work is compiled shape by shape: what to do while the program waits for that."""

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
"""Between looks at the compiler."""
FIRST_S, EVERY_S = 10.0, 30.0
"""Seconds of one graph after which it is told of, and between further lines."""
FIRST_STEPS, MOST_IN_A_ROW = 2, 4
"""Steps that are expected to compile, for one finds no moments and the next one does; those that
may do so one after the other."""


class Graphs(NamedTuple):
    """What a compiler has been asked for in this process so far."""

    begun: int
    done: int

    @property
    def is_under_way(self) -> bool:
        """Whether the program waits for a graph now."""
        return self.begun > self.done


class Teller:
    """Tells, from a thread of its own, which graph the program waits for and how long already.

    Args:
        graphs: what the compiler was asked for; called by the thread.
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
        """Graphs that are compiled inside the block are for `what`."""
        before, self._what = self._what, what
        try:
            yield
        finally:
            self._what = before

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell inside the block."""
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
        """Look once at the compiler."""
        graphs, now = self._graphs(), self._clock()
        if self._since is not None and (not graphs.is_under_way or graphs.begun != self._begun):
            if now - self._since >= FIRST_S:
                logger.info("compiled %s in %.0f s", self._name, now - self._since)
            self._since = None
        if not graphs.is_under_way:
            return
        if self._since is None:
            self._since, self._begun, self._next_s = now, graphs.begun, FIRST_S
            self._name = self._what  # whose block may have ended when it is done
        if now - self._since >= self._next_s:
            seconds = now - self._since
            logger.info("compiling %s: %.0f s so far (graph %d)", self._name, seconds, graphs.begun)
            self._next_s = seconds + EVERY_S


class Steadiness:
    """Refuses steps each of which compiles a graph of its own."""

    def __init__(self, device: Backend) -> None:
        self._device = device
        self._in_a_row = 0
        self._steps = 0
        self.compiled = 0
        """Graphs that were compiled in steps."""
        self.anew = 0
        """Of these, those after the first steps."""
        self.compile_s = 0.0
        """What the graphs took."""

    @contextmanager
    def step(self, shape: tuple[int, ...]) -> Iterator[None]:
        """A block of one step over sequences of that shape.

        Raises:
            ConfigError: this was one step too many that compiled.
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
        """From here on each graph is one made anew."""
        self._steps, self._in_a_row, self.anew = FIRST_STEPS, 0, 0

    def facts(self) -> dict[str, object]:
        """For records: what compiling the steps took, and the device's counts, if it has any."""
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
