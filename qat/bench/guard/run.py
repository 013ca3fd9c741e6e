"""`qat bench guard`: has a part of the CPU's work become slower than it was, whatever the machine?

Each part and its frozen twin take turns in one process; the ratio of two neighbours' times cancels
what the machine does to both. Seconds are those of the processor, which other programs' turns on it
do not lengthen. The median of these ratios is held against a committed one.
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from qat.bench.guard.parts import Part, Work, all_parts
from qat.bench.stats import Interval, median_interval, variation
from qat.files import write_atomically

RATIOS = Path(__file__).with_name("ratios.json")
THRESHOLD = 0.15
ROUNDS, SAMPLE_S = 31, 0.006
"""Turns of each part, and how long one takes at least."""

Verdict = Literal["same", "slower", "faster", "new"]


@dataclass(frozen=True)
class Guarded:
    """One part: its time over its twin's, now and as committed."""

    name: str
    ours_s: float
    twin_s: float
    ratio: Interval
    variation: float
    committed: Interval | None
    """None for a part that has none yet."""

    @property
    def change(self) -> float | None:
        """The ratio now over the committed one; above 1 is slower."""
        return self.ratio.median / self.committed.median if self.committed else None

    @property
    def verdict(self) -> Verdict:
        """Beyond the threshold, and the intervals share nothing."""
        if self.committed is None:
            return "new"
        if not self.ratio.is_apart_from(self.committed):
            return "same"
        if self.change > 1 + THRESHOLD:
            return "slower"
        return "faster" if 1 / self.change > 1 + THRESHOLD else "same"


def run_guard(*, rounds: int = ROUNDS, path: Path = RATIOS) -> list[Guarded]:
    """Measure every part on one thread and hold it against the ratios in `path`."""
    committed = read_ratios(path)
    with one_thread():
        return [guarded(part, rounds, committed.get(part.name)) for part in all_parts()]


def guarded(part: Part, rounds: int, committed: Interval | None) -> Guarded:
    """Measure one part."""
    ours, twin = take_turns(part.ours, part.twin, rounds)
    ratios = [a / b for a, b in zip(ours, twin, strict=True)]
    return Guarded(
        part.name,
        statistics.median(ours),
        statistics.median(twin),
        median_interval(ratios),
        variation(ratios),
        committed,
    )


def take_turns(first: Work, second: Work, rounds: int) -> tuple[list[float], list[float]]:
    """Processor seconds a call of each in turns; every second round goes backwards."""
    works = (first, second)
    calls = [_calls_in(work, SAMPLE_S) for work in works]
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            found[which].append(_seconds(works[which], calls[which]))
    return found


def read_ratios(path: Path = RATIOS) -> dict[str, Interval]:
    """The committed ratio of each part; none without the file."""
    if not path.exists():
        return {}
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
    return {name: Interval(**values) for name, values in parts.items()}


def write_ratios(found: Sequence[Guarded], measured_on: str, path: Path = RATIOS) -> None:
    """Let what was just measured be what later runs are held against."""
    parts = {each.name: {k: round(v, 4) for k, v in vars(each.ratio).items()} for each in found}
    text = json.dumps({"measured_on": measured_on, "parts": parts}, indent=1)
    write_atomically(path, text + "\n")


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: more of them share the machine with whatever else runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _calls_in(work: Work, seconds: float) -> int:
    """How many calls take about so long, at least one; the first, which warms up, apart."""
    work()
    return max(1, round(seconds / _seconds(work, 1)))


def _seconds(work: Work, calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - began) / calls
