"""A check for devices that compile each new shape."""

from collections.abc import Iterator
from contextlib import contextmanager

from qat.backend.base import Backend
from qat.errors import ConfigError

FIRST_STEPS, MOST_IN_A_ROW = 2, 4
"""Steps that are expected to compile (the first finds no moments, the second does), and the most
consecutive steps that may.
"""


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
