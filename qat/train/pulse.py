"""The pulse of a run: steps and tokens against the clock, outside evaluation and saving."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from qat.backend import Backend
from qat.logs import HEARTBEAT, JsonLines
from qat.ranks import Ranks
from qat.train.config import TrainConfig

T = TypeVar("T")


class Pulse:
    """What one rank's heartbeat file says of its steps.

    `flops_share` is what one position a second is of the device's peak; None where nobody knows.
    """

    def __init__(
        self,
        path: Path,
        backend: Backend,
        ranks: Ranks,
        *,
        config: TrainConfig,
        flops_share: float | None,
    ) -> None:
        self._heartbeat = JsonLines(path / HEARTBEAT)
        self._flops_share = flops_share
        self._backend = backend
        self._began = time.perf_counter()
        self._restart()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._heartbeat.close()

    def timed(self, stream: Iterator[T]) -> Iterator[T]:
        """The items of `stream`."""
        yield from stream

    def stepped(self, step: int, positions: int) -> None:
        """Optimizer step number `step` was given to the device: `positions` tokens."""
        self._steps += 1
        self._positions += positions

    def beat(
        self, step: int, *, loss_nats: float, grad_norm: float, facts: dict[str, object]
    ) -> float:
        """One heartbeat line for the stretch so far, with `facts`; returns tokens per second."""
        self._backend.synchronize()
        seconds = time.perf_counter() - self._since
        tokens_per_s = self._positions / seconds
        self._heartbeat.write(
            step=step,
            tokens_per_s=tokens_per_s,
            mfu_frac=None if self._flops_share is None else tokens_per_s * self._flops_share,
            step_s=seconds / self._steps,
            peak_gib=self._backend.peak_memory_gib(),
            elapsed_s=time.perf_counter() - self._began,
            **facts,
        )
        self._restart()
        return tokens_per_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens in the block is no training: the next stretch begins behind it."""
        try:
            yield
        finally:
            self._restart()

    def event(self, kind: str, **facts: object) -> None:
        """Something happened that somebody may look for later."""

    def _restart(self) -> None:
        self._backend.synchronize()
        self._since = time.perf_counter()
        self._steps = self._positions = 0
