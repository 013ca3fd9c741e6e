"""Operations of devices that record operators and compile a graph for each new shape (XLA).

Other devices execute operators one by one; for them these methods do nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qat.errors import ConfigError

FIRST_STEPS, MOST_IN_A_ROW = 2, 4
"""Steps that are expected to compile (the first finds no moments, the second does), and the most
consecutive steps that may.
"""


class Counts(NamedTuple):
    """Counters of graphs compiled and executed by this process so far."""

    compiles: int = 0
    """Number of graphs compiled."""
    compile_s: float = 0.0
    """Seconds spent on compiling them."""
    executions: int = 0
    """Number of graphs executed."""
    kept_graphs: int = 0
    """Number of graphs that an earlier process had compiled and kept."""
    host_fallbacks: dict[str, int] = {}
    """Number of times that the host computed an operator that the device lacks, by name."""

    def facts(self) -> dict[str, object]:
        """Return the counters under their names in records."""
        return {
            "xla_compiles": self.compiles,
            "xla_compile_s": self.compile_s,
            "xla_executions": self.executions,
            "xla_kept_graphs": self.kept_graphs,
            "host_fallbacks": self.host_fallbacks,
        }


class Tracing:
    """Steps as graphs: what is compiled, with which shapes, and over how many devices.

    The defaults hold for devices that execute operators one by one.
    """

    def counts(self) -> Counts:
        """Return what was compiled and executed; zeros where nothing is compiled."""
        return Counts()

    def compiling(self, what: str) -> AbstractContextManager[None]:
        """Return a block in which `what` may be compiled; progress messages name it."""
        return nullcontext()

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Move a model that was loaded on the host to the device, keeping tied weights."""

    def check_optimizer(self, name: str, latent_dtype: str) -> None:
        """Check that this device supports the optimizer and the dtype of latent weights.

        Raises:
            ConfigError: it does not.
        """

    def checkpoint_fn(self) -> Callable | None:
        """Return a function for gradient checkpointing; None where PyTorch's own works."""
        return None

    def filled_length(self, length: int) -> int:
        """Return the length to pad a row to: `length`, or the next of a few fixed lengths."""
        return length

    def sizes_tried(self) -> tuple[int, ...]:
        """Return the ascending batch sizes that a search tries; empty where any size is cheap."""
        return ()

    def divisions(self) -> int:
        """Return the number of devices over which `divided` spreads rows."""
        return 1

    def divided(self, tensor: Tensor) -> Tensor:
        """Divide the rows of a tensor, one per sequence, over the devices of this process.

        Call it on tensors that come from the host; tensors computed from them are divided alike.
        """
        return tensor

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Divide the rows of tensors over the process's devices, if it has several; waits for them.

        Tensors computed from them, and values written into them, are divided alike.
        """


class CompileWatch:
    """Raises an error when too many consecutive steps each compile a new graph."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
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
        before = self._tracing.counts()
        yield
        now = self._tracing.counts()
        new = now.compiles - before.compiles
        self.compile_s += now.compile_s - before.compile_s
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
        """Return the time spent on compiling steps and the counters, if anything was compiled."""
        counts = self._tracing.counts()
        return {} if counts == Counts() else {"step_compile_s": self.compile_s, **counts.facts()}

    def _complaint(self, shape: tuple[int, ...]) -> str:
        names = ", ".join(self._tracing.counts().host_fallbacks)
        ran = f", with {names} on the host" if names else ""
        return (
            f"each of the last {self._in_a_row} steps compiled a graph of its own (the last over "
            f"{' x '.join(map(str, shape))} tokens{ran}), expected one graph for all; give all "
            "steps one batch size and length, and let no shape or operator of a loss depend on "
            "values (torch.where in the place of a boolean mask)"
        )
