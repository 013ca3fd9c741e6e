"""Heartbeats and events of a run's ranks, and a watchdog for stalls and slow ranks.

`Pulse` writes heartbeats and events. Its `Watchdog` polls from a thread of its own: it writes
events, warns once of each, and dumps stacks; it never changes the run.
"""

import faulthandler
import logging
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import numpy as np
import psutil
from torch import Tensor

from qat.backend.base import Backend
from qat.backend.nvidia import UNKNOWN
from qat.logs import JsonLines, Tail, events_file, heartbeat_file
from qat.ranks import Ranks

logger = logging.getLogger(__name__)
T = TypeVar("T")
Clock = Callable[[], float]
"""A function that returns seconds."""

RECENT = 512
"""Most steps over which quantiles are computed."""
LOOK_S, SAMPLE_S = 1.0, 10.0
"""Seconds between checks of steps, and of the device and other ranks (which take ms)."""
FIRST_STEP, PAUSE = 3, 10
"""Factors on the stall limit for the first step, which compiles, and for an evaluation."""
SLOW_FRAC, DROP_FRAC = 1.2, 0.7
"""A rank is slow above the first factor of the others' median; a run has slowed down below the
second factor of its own."""
HISTORY, LEAST_HISTORY = 20, 8
"""Number of stretches whose median is the usual speed, and the fewest that define one."""
IN_A_ROW, LEAST_DROP_S = 3, 30.0
"""Consecutive low stretches (or heartbeats of a slow rank) and seconds before an event."""


@dataclass
class Pace:
    """Progress of a rank's loop: written by the loop, read by the watchdog."""

    since: float
    """Monotonic time when the last step ended, or a pause began or ended."""
    step: int = 0
    """The last finished step."""
    taken: int = 0
    """Steps taken by this process."""
    is_paused: bool = False
    """True while something other than steps runs, such as an evaluation."""


class Stall:
    """Detects when the loop stalls, and reports each stall once."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._told: float | None = None

    def look(self, pace: Pace, now: float) -> float | None:
        """Return the seconds without a finished step as they first exceed the limit, else None."""
        times = PAUSE if pace.is_paused else 1 if pace.taken else FIRST_STEP
        still_s = now - pace.since
        if still_s <= self._limit_s * times or self._told == pace.since:
            return None
        self._told = pace.since
        return still_s


class Drop:
    """Detects that a run has become slower than usual; reports each drop once."""

    def __init__(self) -> None:
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._low: list[float] = []
        self._is_told = False

    def look(self, tokens_per_s: float, seconds: float) -> float | None:
        """Return the share of the usual speed if this stretch completes a drop, else None."""
        usual = statistics.median(self._history) if len(self._history) >= LEAST_HISTORY else 0.0
        is_low = tokens_per_s < DROP_FRAC * usual
        self._low = [*self._low, seconds] if is_low else []
        if self._is_told or not is_low:  # a reported drop that stays becomes the usual speed
            self._history.append(tokens_per_s)
            self._is_told = is_low
            return None
        self._is_told = len(self._low) >= IN_A_ROW and sum(self._low) >= LEAST_DROP_S
        return tokens_per_s / usual if self._is_told else None


class Slow(NamedTuple):
    """A rank that the others wait for."""

    slow_rank: int
    times_median: float
    """Its own time per step over the median of the others'."""
    cause: str
    """`data` if it waits for batches, else `device`."""


class SlowRanks:
    """Detects ranks that the others wait for, from the heartbeats of all ranks.

    All ranks finish a step together, so a rank's own time is its time outside communication, in
    which fast ranks wait for slow ones.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._beats: dict[int, dict[int, dict]] = {}
        self._in_a_row = dict.fromkeys(range(size), 0)

    def look(self, beats: list[dict]) -> list[Slow]:
        """Add new heartbeats of any ranks; return the ranks that have become slow."""
        for beat in beats:
            self._beats.setdefault(beat["step"], {})[beat["rank"]] = beat
        whole = sorted(step for step, found in self._beats.items() if len(found) == self._size)
        told = []
        for step in whole:
            slow = {each.slow_rank: each for each in slow_ranks(self._beats[step])}
            for rank in self._beats[step]:
                self._in_a_row[rank] = self._in_a_row[rank] + 1 if rank in slow else 0
            told += [each for rank, each in slow.items() if self._in_a_row[rank] == IN_A_ROW]
        last = whole[-1] if whole else 0
        rest = sorted(step for step in self._beats if step > last)[-HISTORY:]
        self._beats = {step: self._beats[step] for step in rest}
        return told


def slow_ranks(by_rank: dict[int, dict]) -> list[Slow]:
    """Return the ranks whose own step time exceeds `SLOW_FRAC` of the others' median."""
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


class Watchdog:
    """A thread that checks progress and ranks; `look` is one round of checks.

    Args:
        pace: the loop's progress.
        event: called with a kind and facts of each problem.
        sample: slow query of the device's health; the latest result is `health`.
        stacks: file for the stacks of all threads at a stall.
        stall_s: seconds without a finished step that count as a stall; 3 times that for the first.
        clock: the clock of `pace`.
        heartbeats: heartbeat files of all ranks, on the rank that compares them; empty elsewhere.
    """

    def __init__(
        self,
        pace: Pace,
        *,
        event: Callable[..., None],
        sample: Callable[[], dict[str, float | None]],
        stacks: Path,
        stall_s: float,
        clock: Clock,
        heartbeats: Sequence[Path] = (),
    ) -> None:
        self.health: dict[str, float | None] = {}
        self._pace = pace
        self._event = event
        self._sample = sample
        self._stacks = stacks
        self._clock = clock
        self._stall = Stall(stall_s)
        self._tails = [Tail(path) for path in heartbeats]
        self._slow = SlowRanks(len(heartbeats))
        self._end = threading.Event()
        self._sampled_s = -SAMPLE_S
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        for tail in self._tails:
            tail.read()  # skip lines of an earlier process
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(SAMPLE_S)

    def _run(self) -> None:
        while not self._end.is_set():
            self.look()
            self._end.wait(LOOK_S)

    def look(self) -> None:
        """Check steps, and at longer intervals the device and other ranks."""
        if (still_s := self._stall.look(self._pace, self._clock())) is not None:
            self._tell_stall(still_s)
        now = time.monotonic()
        if now - self._sampled_s >= SAMPLE_S:
            self._sampled_s = now
            self.health = self._sample()
            self.compare()

    def compare(self) -> None:
        """Read new heartbeats of all ranks, and report slow ranks."""
        try:
            beats = [beat for tail in self._tails for beat in tail.read()]
        except (OSError, ValueError) as error:
            logger.warning("the ranks' heartbeats are compared no more: %s", error)
            self._tails = []
            return
        for slow in self._slow.look(beats):
            self._event("slow_rank", **slow._asdict())
            logger.warning("rank %d takes %.2f times as long a step as the others (%s)", *slow)

    def _tell_stall(self, still_s: float) -> None:
        step = self._pace.step
        self._event("stall", still_s=still_s, stacks=self._stacks.name)
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


class Pulse:
    """The heartbeat and the events of one rank; its watchdog runs inside the block.

    Steps are timed without evaluations and saving. A file that cannot be written causes one warning
    and does not stop the run.

    Args:
        path: the run's directory.
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
        flops_share: float | None,
        clock: Clock = time.monotonic,
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
        self._rolled_out_s: float | None = None
        """Seconds of rollouts in this stretch; None in a run without rollouts so far."""
        self._pace = Pace(since=self._began)
        compared = range(ranks.size) if ranks.is_first and ranks.size > 1 else ()
        self._watchdog = Watchdog(
            self._pace,
            event=self.event,
            sample=backend.health,
            stacks=path / f"stacks-rank{ranks.rank}.txt",
            stall_s=stall_s,
            clock=clock,
            heartbeats=[path / heartbeat_file(rank) for rank in compared],
        )
        self._restart()

    def __enter__(self) -> Self:
        self._pace.since = self._clock()
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
        pace = self._pace
        pace.since, pace.step, pace.taken = self._clock(), step, pace.taken + 1

    def beat(
        self, step: int, *, loss_nats: float, grad_norm: float, facts: dict[str, object]
    ) -> float:
        """Write a heartbeat for the stretch so far, with `facts`; return tokens per second."""
        self._backend.synchronize()
        seconds = self._clock() - self._since
        tokens_per_s, size = self._positions / seconds, self._ranks.size
        exchange_s = self._ranks.exchange_s()
        mfu_of = self._flops_share
        # The latest `RECENT` steps, each from the previous step's end to its own. Ends are measured
        # on the device, so that a host that runs ahead does not hide a step's duration.
        between = self._backend.seconds_between
        self._steps_s.extend(between(*ends) for ends in pairwise(self._ends))
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
            **{**UNKNOWN, **self._watchdog.health},
            **facts,
        )
        share = self._drop.look(tokens_per_s, seconds)
        if share is not None and self._ranks.is_first:  # the speed is that of all ranks
            self.event("throughput_drop", tokens_per_s=tokens_per_s, share=share)
            logger.warning(
                "%.0f tokens/s, %.0f %% of what was usual; see data_wait_s, gpu_temp_c and "
                "exchange_s in the heartbeat",
                tokens_per_s,
                100 * share,
            )
        self._restart()
        return tokens_per_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block from the steps' time; the next stretch starts after it."""
        self._pace.since, self._pace.is_paused = self._clock(), True
        try:
            yield
        finally:
            self._restart()
            self._pace.since, self._pace.is_paused = self._clock(), False

    def event(self, kind: str, **facts: object) -> None:
        """Write one event of this rank: time, step, `kind`, `facts`; callable from any thread."""
        self._events.write(
            time=_now(),
            elapsed_s=self._clock() - self._began,
            rank=self._ranks.rank,
            **{"step": self._pace.step, "kind": kind, **facts},
        )

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
        held, reserved = used.held_gib, used.reserved_gib
        return {
            "peak_gib": used.peak_gib,
            "mem_alloc_mib": None if held is None else held * 1024,
            "mem_alloc_gib": held,
            "mem_reserved_mib": None if reserved is None else reserved * 1024,
            "host_rss_mib": self._process.memory_info().rss / 2**20,
        }


class _Patient:
    """A JSON lines file that tolerates errors: it warns once, and retries with the next line.

    The file is created with its first line.
    """

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
