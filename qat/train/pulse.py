"""The pulse of a run: what each rank tells of its steps, and who watches that they go on."""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import psutil
from torch import Tensor

from qat.backend.device import Backend
from qat.backend.nvml import UNKNOWN
from qat.logs import JsonLines, events_file, heartbeat_file
from qat.ranks import Ranks
from qat.train.config import TrainConfig
from qat.train.watchdog import Clocks, Drop, Pace, Watchdog

logger = logging.getLogger(__name__)

RECENT = 512
"""Most steps over which a quantile is taken."""
T = TypeVar("T")


class Pulse:
    """The heartbeat and the events of one rank; its watchdog lives inside the block.

    Steps are timed outside evaluation and saving. A file that cannot be written is warned of once
    and stops nothing.

    Args:
        path: the run's directory.
        flops_share: what one position a second is of the device's peak; None if nobody knows.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        backend: Backend,
        ranks: Ranks,
        *,
        config: TrainConfig,
        flops_share: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat = _Patient(path / heartbeat_file(ranks.rank))
        self._events = _Patient(path / events_file(ranks.rank))
        self._flops_share = flops_share
        self._backend = backend
        self._ranks = ranks
        self._clock = clock
        self._began = clock()
        self._process = psutil.Process()
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._steps_s: deque[float] = deque(maxlen=RECENT)
        self._drop = Drop()
        self._pace = Pace(since=self._began)
        compared = range(ranks.size) if ranks.is_first and ranks.size > 1 else ()
        self._watchdog = Watchdog(
            self._pace,
            event=self.event,
            sample=backend.health,
            stacks=path / f"stacks-rank{ranks.rank}.txt",
            stall_s=config.stall_s,
            clock=clock,
            clocks=Clocks(),
            heartbeats=[path / heartbeat_file(rank) for rank in compared],
        )
        self._restart()

    def __enter__(self) -> Self:
        self._pace.since = self._clock()
        self._watchdog.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watchdog.__exit__(kind, error, traceback)
        self._heartbeat.close()
        self._events.close()

    def timed(self, stream: Iterator[T]) -> Iterator[T]:
        """The items of `stream`; how long each is waited for is noted."""
        while True:
            before = time.monotonic()
            try:
                item = next(stream)
            except StopIteration:
                return
            self._waits.append(time.monotonic() - before)
            self._waited_s += self._waits[-1]
            yield item

    def stepped(self, step: int, positions: int, last: Tensor | None = None) -> None:
        """Optimizer step number `step` was given to the device: `positions` tokens on all ranks.

        `last` is something that it computes last.
        """
        self._steps += 1
        self._positions += positions
        self._ends.append(self._backend.mark(last))
        pace = self._pace
        pace.since, pace.step, pace.taken = self._clock(), step, pace.taken + 1

    def beat(
        self, step: int, *, loss_nats: float, grad_norm: float, facts: dict[str, object]
    ) -> float:
        """One heartbeat line for the stretch so far, with `facts`; returns tokens per second."""
        self._backend.synchronize()
        seconds = self._clock() - self._since
        tokens_per_s, size = self._positions / seconds, self._ranks.size
        exchange_s = self._ranks.exchange_s()
        share = self._flops_share
        self._heartbeat.write(
            time=_now(),
            elapsed_s=self._clock() - self._began,
            pid=os.getpid(),
            rank=self._ranks.rank,
            step=step,
            loss_nats=loss_nats,
            grad_norm=grad_norm,
            tokens_per_s=tokens_per_s,
            rank_tokens_per_s=tokens_per_s / size,
            mfu_frac=None if share is None else tokens_per_s / size * share,
            step_s=seconds / self._steps,
            data_wait_s=self._waited_s / self._steps,
            exchange_s=None if exchange_s is None else exchange_s / self._steps,
            **self._quantiles(),
            **self._memory(),
            **{**UNKNOWN, **self._watchdog.health},
            **facts,
        )
        self._tell_drop(tokens_per_s, seconds)
        self._restart()
        return tokens_per_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens in the block is no training: the next stretch begins behind it."""
        self._pace.since, self._pace.is_paused = self._clock(), True
        try:
            yield
        finally:
            self._restart()
            self._pace.since, self._pace.is_paused = self._clock(), False

    def event(self, kind: str, **facts: object) -> None:
        """One line of what befell this rank: time, step, `kind`, and `facts`. For any thread."""
        self._events.write(
            time=_now(),
            elapsed_s=self._clock() - self._began,
            rank=self._ranks.rank,
            **{"step": self._pace.step, "kind": kind, **facts},
        )

    def _restart(self) -> None:
        """Begin a new stretch of steps."""
        self._backend.synchronize()
        self._ranks.exchange_s()  # of the pause
        self._since = self._clock()
        self._steps = self._positions = 0
        self._waited_s = 0.0
        self._ends = deque([self._backend.mark()], maxlen=RECENT + 1)

    def _quantiles(self) -> dict[str, float | None]:
        """Of the latest `RECENT` steps: the time from one's end to the next, and waits for data.

        Ends are the device's, so a host that runs ahead of it does not hide what a step takes.
        """
        between = self._backend.seconds_between
        self._steps_s.extend(between(*ends) for ends in pairwise(self._ends))
        return {**_p50_p95("step_s", self._steps_s), **_p50_p95("data_wait_s", self._waits)}

    def _tell_drop(self, tokens_per_s: float, seconds: float) -> None:
        share = self._drop.look(tokens_per_s, seconds)
        if share is not None and self._ranks.is_first:  # the speed is that of all
            self.event("throughput_drop", tokens_per_s=tokens_per_s, share=share)
            logger.warning(
                "%.0f tokens/s, %.0f %% of what was usual; see data_wait_s, gpu_temp_c and "
                "exchange_s in the heartbeat",
                tokens_per_s,
                100 * share,
            )

    def _memory(self) -> dict[str, float | None]:
        held, reserved = self._backend.held_memory_gib(), self._backend.reserved_memory_gib()
        return {
            "peak_gib": self._backend.peak_memory_gib(),
            "mem_alloc_mib": _mib(held),
            "mem_alloc_gib": held,
            "mem_reserved_mib": _mib(reserved),
            "host_rss_mib": self._process.memory_info().rss / 2**20,
        }


class _Patient:
    """A file of JSON lines that may fail: once it is said, and the next line is tried anew.

    It is made with its first line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: JsonLines | None = None
        self._lock = threading.Lock()
        self._has_failed = False

    def write(self, **values: object) -> None:
        """Append one object, if that is possible; numbers that are not finite become text."""
        with self._lock:
            try:
                if self._lines is None:
                    self._lines = JsonLines(self._path)
                self._lines.write(**{name: _plain(value) for name, value in values.items()})
            except OSError as error:
                if not self._has_failed:
                    logger.warning(
                        "%s cannot be written (%s); the run goes on", self._path, error.strerror
                    )
                self._has_failed = True

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        with self._lock:
            if self._lines is not None:
                self._lines.close()
                self._lines = None


def _p50_p95(name: str, seconds: Collection[float]) -> dict[str, float | None]:
    """Two quantiles, such as `step_s_p50` and `step_s_p95`; None of nothing."""
    found = np.quantile(list(seconds), (0.5, 0.95)).tolist() if seconds else (None, None)
    return {f"{name}_p50": found[0], f"{name}_p95": found[1]}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _mib(gib: float | None) -> float | None:
    return None if gib is None else gib * 1024


def _now() -> str:
    """The wall clock's time in UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
