"""Heartbeats and events of a run's ranks: speed, memory, waits, stalls and slow ranks.

`Pulse` writes them; a problem is one event and one warning, and never changes the run.
"""

import faulthandler
import logging
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import numpy as np
import psutil
from torch import Tensor

from qat.backend.base import Backend
from qat.backend.nvidia import UNKNOWN
from qat.kernels.dispatch import plain_on_gpu
from qat.logs import JsonLines, Tail, events_file, heartbeat_file
from qat.ranks import Ranks

logger = logging.getLogger(__name__)
T = TypeVar("T")
Clock = Callable[[], float]
"""A function that returns seconds."""

RECENT = 512
"""Most steps over which quantiles are computed."""
LOOK_S, SAMPLE_S = 1.0, 10.0
"""Seconds between checks of steps, and of the device and other ranks, which take milliseconds."""
FIRST_STEP, PAUSE = 3, 10
"""Factors on the stall limit for the first step, which compiles, and for an evaluation."""
SLOW_FRAC, DROP_FRAC = 1.2, 0.7
"""A rank is slow above the first factor of the others' median; a run has slowed down below the
second factor of its own."""
HISTORY, LEAST_HISTORY = 20, 8
"""Number of stretches whose median is the usual speed, and the fewest that define one."""
IN_A_ROW, LEAST_DROP_S = 3, 30.0
"""Consecutive low stretches (or heartbeats of a slow rank) and seconds before an event."""


class Watchdog:
    """A thread that calls `report` once for each stall, with the seconds since the last progress.

    Args:
        stall_s: seconds without a finished step that count as a stall.
        clock: monotonic seconds.
        report: called on the watchdog's thread.
    """

    def __init__(self, stall_s: float, clock: Clock, report: Callable[[float], None]) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._report = report
        self._since = clock()
        self._times = FIRST_STEP
        """Factor on `stall_s` until the next progress."""
        self._reported: float | None = None
        """The `_since` of the latest stall that was reported."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def progress(self, times: int) -> None:
        """Note progress; the next is expected within `times` the seconds of a stall."""
        self._since, self._times = self._clock(), times

    def look(self) -> None:
        """Check once."""
        since = self._since
        still_s = self._clock() - since
        if still_s > self._stall_s * self._times and self._reported != since:
            self._reported = since
            self._report(still_s)

    def __enter__(self) -> Self:
        self._since = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(SAMPLE_S)

    def _run(self) -> None:
        while not self._end.wait(LOOK_S):
            self.look()


class Drop:
    """Detects that a run has become slower than usual; reports each drop once."""

    def __init__(self) -> None:
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._low: list[float] = []
        self._is_reported = False

    def look(self, tokens_per_s: float, seconds: float) -> float | None:
        """Return the share of the usual speed if this stretch completes a drop, else None."""
        usual = statistics.median(self._history) if len(self._history) >= LEAST_HISTORY else 0.0
        is_low = tokens_per_s < DROP_FRAC * usual
        self._low = [*self._low, seconds] if is_low else []
        if self._is_reported or not is_low:  # a reported drop that stays becomes the usual speed
            self._history.append(tokens_per_s)
            self._is_reported = is_low
            return None
        self._is_reported = len(self._low) >= IN_A_ROW and sum(self._low) >= LEAST_DROP_S
        return tokens_per_s / usual if self._is_reported else None


class Slow(NamedTuple):
    """A rank that the others wait for."""

    slow_rank: int
    times_median: float
    """Its own time per step over the median of the others'."""
    cause: str
    """`data` if it waits for batches, else `device`."""


class SlowRanks:
    """Detects ranks that the others wait for, from the heartbeats of all ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._beats: dict[int, dict[int, dict]] = {}
        self._in_a_row = dict.fromkeys(range(size), 0)

    def look(self, beats: list[dict]) -> list[Slow]:
        """Add new heartbeats of any ranks; return the ranks that have become slow."""
        for beat in beats:
            self._beats.setdefault(beat["step"], {})[beat["rank"]] = beat
        whole = sorted(step for step, ranks in self._beats.items() if len(ranks) == self._size)
        found = []
        for step in whole:
            slow = {each.slow_rank: each for each in slow_ranks(self._beats[step])}
            for rank in self._beats[step]:
                self._in_a_row[rank] = self._in_a_row[rank] + 1 if rank in slow else 0
            found += [each for rank, each in slow.items() if self._in_a_row[rank] == IN_A_ROW]
        last = whole[-1] if whole else 0
        rest = sorted(step for step in self._beats if step > last)[-HISTORY:]
        self._beats = {step: self._beats[step] for step in rest}
        return found


def slow_ranks(by_rank: dict[int, dict]) -> list[Slow]:
    """Return the ranks whose own step time exceeds `SLOW_FRAC` of the others' median.

    All ranks finish a step together, so a rank's own time is its time outside communication, in
    which fast ranks wait for slow ones.
    """
    own = {rank: beat["step_s"] - (beat["exchange_s"] or 0.0) for rank, beat in by_rank.items()}
    waits = {rank: beat["data_wait_s"] for rank, beat in by_rank.items()}
    found = []
    for rank, seconds in own.items():
        usual, usual_wait = (
            statistics.median(value for other, value in values.items() if other != rank)
            for values in (own, waits)
        )
        if seconds > SLOW_FRAC * usual:
            is_data = waits[rank] - usual_wait > (seconds - usual) / 2
            found.append(Slow(rank, seconds / usual, "data" if is_data else "device"))
    return found


class Pulse:
    """The heartbeat and the events of one rank; its watchdog runs inside the block.

    Steps are timed without evaluations and saving. A file that cannot be written causes one warning
    and does not stop the run. The first rank compares the heartbeats of all.

    Args:
        path: the run's directory.
        stall_s: seconds without a finished step that count as a stall.
        beat_s: seconds after which `beat_if_due` writes a heartbeat; 0 for never.
        flops_share: share of the device's peak per position a second; None if unknown.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        backend: Backend,
        ranks: Ranks,
        *,
        stall_s: float,
        beat_s: float = 0.0,
        flops_share: float | None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._heartbeat = _OptionalLines(path / heartbeat_file(ranks.rank))
        self._events = _OptionalLines(path / events_file(ranks.rank))
        self._stacks = path / f"stacks-rank{ranks.rank}.txt"
        self._flops_share = flops_share
        self._beat_s = beat_s or math.inf
        self._backend = backend
        self._ranks = ranks
        self._clock = clock
        self._began = self._beaten = clock()
        self._process = psutil.Process()
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._steps_s: deque[float] = deque(maxlen=RECENT)
        self._drop = Drop()
        self._rolled_out_s: float | None = None
        """Seconds of rollouts in this stretch; None in a run without rollouts so far."""
        self._step = 0
        """The last finished step."""
        self._step_times = FIRST_STEP
        """Factor on the stall limit for the next step."""
        self._health: dict[str, float | None] = UNKNOWN
        self._sampled_s = -math.inf
        compared = range(ranks.size) if ranks.is_first and ranks.size > 1 else ()
        self._tails = [Tail(path / heartbeat_file(rank)) for rank in compared]
        self._slow = SlowRanks(len(self._tails))
        self._watchdog = Watchdog(stall_s, clock, self._report_stall)
        self._restart()

    def __enter__(self) -> Self:
        for tail in self._tails:
            tail.read()  # skip lines of an earlier process
        self._watchdog.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.__exit__()
        self._heartbeat.close()
        self._events.close()

    def timed(self, stream: Iterator[T]) -> Iterator[T]:
        """Yield the items of `stream` and measure the wait for each."""
        while True:
            before = time.monotonic()
            try:
                item = next(stream)
            except StopIteration:
                return
            self._waits.append(time.monotonic() - before)
            self._waited_s += self._waits[-1]
            yield item

    @contextmanager
    def rolling_out(self) -> Iterator[None]:
        """Measure a block that generates a rollout as part of the steps' time."""
        self._backend.synchronize()
        before = self._clock()
        try:
            yield
        finally:
            self._rolled_out_s = (self._rolled_out_s or 0.0) + self._clock() - before

    def stepped(self, step: int, positions: int, last: Tensor | None = None) -> None:
        """Count optimizer step `step`, just submitted, with `positions` tokens on all ranks.

        `last` is a tensor that the step computes last.
        """
        self._steps += 1
        self._positions += positions
        self._ends.append(self._backend.mark(last))
        self._step, self._step_times = step, 1
        self._watchdog.progress(1)

    def beat_if_due(self, step: int, facts: Callable[[], dict[str, object]]) -> None:
        """Write a heartbeat without a loss, which all ranks would have to sum, if it is due."""
        if self._clock() - self._beaten >= self._beat_s:
            self.beat(step, loss_nats=None, grad_norm=None, facts=facts())

    def beat(
        self,
        step: int,
        *,
        loss_nats: float | None,
        grad_norm: float | None,
        facts: dict[str, object],
    ) -> float:
        """Write a heartbeat for the stretch so far, with `facts`; return tokens per second."""
        self._backend.synchronize()
        self._beaten = self._clock()
        seconds = self._clock() - self._since
        tokens_per_s, size = self._positions / seconds, self._ranks.size
        exchange_s = self._ranks.exchange_s()
        mfu_of = self._flops_share
        # The latest `RECENT` steps, each from the previous step's end to its own. Ends are measured
        # on the device, so that a host that runs ahead does not hide a step's duration.
        between = self._backend.seconds_between
        self._steps_s.extend(between(*ends) for ends in pairwise(self._ends))
        is_due = time.monotonic() - self._sampled_s >= SAMPLE_S
        if is_due:
            self._sampled_s = time.monotonic()
            self._health = self._backend.health()
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
            mfu_frac=None if mfu_of is None else tokens_per_s / size * mfu_of,
            step_s=seconds / self._steps,
            data_wait_s=self._waited_s / self._steps,
            exchange_s=None if exchange_s is None else exchange_s / self._steps,
            **self._rollouts(seconds),
            **_p50_p95("step_s", self._steps_s),
            **_p50_p95("data_wait_s", self._waits),
            **self._memory(),
            **self._health,
            plain_kernels=plain_on_gpu(),
            **facts,
        )
        share = self._drop.look(tokens_per_s, seconds)
        if share is not None and self._ranks.is_first:  # the speed is that of all ranks
            self.event("throughput_drop", tokens_per_s=tokens_per_s, share=share)
            logger.warning(
                "%.0f tokens/s, %.0f %% of what was usual; see data_wait_s in the heartbeat, "
                "gpu_temp_c on a GPU, exchange_s on several",
                tokens_per_s,
                100 * share,
            )
        if is_due:
            self.compare_ranks()
        self._restart()
        return tokens_per_s

    def compare_ranks(self) -> None:
        """Read new heartbeats of all ranks, and report ranks that have become slow."""
        try:
            beats = [beat for tail in self._tails for beat in tail.read()]
        except (OSError, ValueError) as error:
            logger.warning("the ranks' heartbeats are compared no more: %s", error)
            self._tails = []
            return
        for slow in self._slow.look(beats):
            self.event("slow_rank", **slow._asdict())
            logger.warning("rank %d takes %.2f times as long a step as the others (%s)", *slow)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block from the steps' time; the next stretch starts after it."""
        self._watchdog.progress(PAUSE)
        try:
            yield
        finally:
            self._restart()
            self._watchdog.progress(self._step_times)

    def event(self, kind: str, **facts: object) -> None:
        """Write one event of this rank: time, step, `kind`, `facts`; callable from any thread."""
        self._events.write(
            time=_now(),
            elapsed_s=self._clock() - self._began,
            rank=self._ranks.rank,
            **{"step": self._step, "kind": kind, **facts},
        )

    def tell_waits(self, times: int, waited_s: float) -> None:
        """Log how often and how long batches of a growing cache were waited for, if any were."""
        if times:
            self.event("waited", times=times, waited_s=waited_s)
            said = "waited %d times for batches that the cache had not yet, %.1f s in all"
            logger.info(said, times, waited_s)

    def _report_stall(self, still_s: float) -> None:
        """Write an event, and the stacks of all threads; runs on the watchdog's thread."""
        step = self._step
        self.event("stall", still_s=still_s, stacks=self._stacks.name)
        logger.warning(
            "no step ended for %.0f s since step %d; see %s", still_s, step, self._stacks
        )
        try:
            with self._stacks.open("a", encoding="utf-8") as file:
                file.write(f"\n{still_s:.0f} s without a step since step {step}:\n")
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError as error:
            logger.warning("no stacks in %s: %s", self._stacks, error.strerror)

    def _restart(self) -> None:
        """Start a new stretch of steps."""
        self._backend.synchronize()
        self._ranks.exchange_s()  # discard the communication of the pause
        self._since = self._clock()
        self._steps = self._positions = 0
        self._waited_s = 0.0
        self._rolled_out_s = None if self._rolled_out_s is None else 0.0
        self._ends = deque([self._backend.mark()], maxlen=RECENT + 1)

    def _rollouts(self, seconds: float) -> dict[str, float]:
        """Return the seconds per step and the time share of rollouts; empty without rollouts."""
        if self._rolled_out_s is None:
            return {}
        return {
            "rollout_s": self._rolled_out_s / self._steps,
            "rollout_frac": self._rolled_out_s / seconds,
        }

    def _memory(self) -> dict[str, float | None]:
        used = self._backend.memory_use()
        held, reserved, rss = used.held_gib, used.reserved_gib, self._process.memory_info().rss
        return {
            "peak_gib": used.peak_gib,
            "mem_alloc_mib": None if held is None else held * 1024,
            "mem_alloc_gib": held,
            "mem_reserved_mib": None if reserved is None else reserved * 1024,
            "mem_reserved_gib": reserved,
            "alloc_retries": used.retries,
            "alloc_failures": used.failures,
            "host_rss_mib": rss / 2**20,
            "host_rss_gib": rss / 2**30,
        }


class _OptionalLines:
    """A JSON lines file, created with its first line; a failed write only warns, once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: JsonLines | None = None
        self._lock = threading.Lock()
        self._has_failed = False

    def write(self, **values: object) -> None:
        """Append one object if possible; numbers that are not finite are written as text."""
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
    """Return two quantiles, such as `step_s_p50` and `step_s_p95`; None for no values."""
    found = np.quantile(list(seconds), (0.5, 0.95)).tolist() if seconds else (None, None)
    return {f"{name}_p50": found[0], f"{name}_p95": found[1]}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    """Return the wall clock's time in UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
