"""A run of many steps of a tiny student, a day by the clock it is given: does anything grow?

python tests/stress/measure_long_run.py --steps 100000 --figures FILE.jsonl

The loop, its checkpoints, evaluations, heartbeat and watchdog are those of every run; each step
takes as much simulated time as makes all of them `--hours`. Memory and open files are counted every
so many steps. The slope of memory is Theil-Sen's over the least of each tenth of the steps, the
first fifth left out (`qat.bench.stats`). What the C library has handed out and what Python has are
counted beside what is resident: a leak is in one of them, an allocator's holes are in neither.
"""

import argparse
import csv
import ctypes
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from fault_records import record
from kill_case import build, make_student

from qat.bench.stats import FIRST_LOOK, memory_trend
from qat.logs import read_json_lines
from qat.train import loop
from qat.train.config import TrainConfig
from qat.train.pulse import Pulse
from qat.train.start import train_student

HANDLES = "/proc/self/fd"
OPENED_LATE = 1
"""Files that a first event may open at any time: that of events."""
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
LOG_EVERY = 50
LOOKS = 1000
"""How often memory is looked at."""


class Look(NamedTuple):
    """What a process held after a step."""

    rss_mib: float
    handles: float
    heap_mib: float = 0.0
    """What the C library's allocator has handed out."""
    blocks: float = 0.0
    """Pieces of memory that Python has handed out."""


class HeapInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks "
        "keepcost".split()
    ]


MALLINFO = ctypes.CDLL(None).mallinfo2
MALLINFO.restype = HeapInfo


class Looks:
    """What was seen at each look, in memory that is all there from the beginning."""

    def __init__(self, most: int) -> None:
        self._rows = np.ones((most, len(Look._fields)))
        self._count = 0

    def append(self, seen: Look) -> None:
        """Keep one look."""
        self._rows[self._count] = seen
        self._count += 1

    def all(self) -> list[Look]:
        """Every look so far."""
        return [Look(*row) for row in self._rows[: self._count].tolist()]


class Clock:
    """Seconds that go on by themselves, and by `step_s` whenever a step is counted."""

    def __init__(self, step_s: float) -> None:
        self.steps = 0
        self._step_s = step_s

    def __call__(self) -> float:
        """The time, monotonic."""
        return time.monotonic() + self.steps * self._step_s


class Watched(Pulse):
    """A pulse that looks at its process every so many steps."""

    def __init__(
        self, *arguments: object, looks: Looks, fast: Clock, every: int, **named: object
    ) -> None:
        self._looks, self._fast, self._every = looks, fast, every
        super().__init__(*arguments, clock=fast, **named)

    def stepped(self, step: int, *told: object) -> None:
        """Let the clock know, and look."""
        self._fast.steps += 1
        super().stepped(step, *told)
        if step % self._every == 0:
            self._looks.append(look())


def main() -> None:
    """Train, judge what was seen, and record it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--looks", type=Path, help="where to write every look, as a table")
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    every = max(1, arguments.steps // LOOKS)
    seen = Looks(arguments.steps // every)
    fast = Clock(arguments.hours * 3600 / arguments.steps)
    loop.Pulse = partial(Watched, looks=seen, fast=fast, every=every)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        build(place / "cache")
        make_student(place / "student", width=16, layers=1)
        began = time.monotonic()
        train_student(settings(place, arguments.steps), str(place / "student"), place / "run",
                      resume=False)  # fmt: skip
        seconds = time.monotonic() - began
        problems = unreadable(place / "run", arguments.steps)
    print(f"{arguments.steps} steps in {seconds:.0f} s")
    looks = seen.all()
    if arguments.looks:
        with arguments.looks.open("w", newline="") as file:
            csv.writer(file).writerows([Look._fields, *looks])
    slope, half_width = judged(looks, arguments.hours, problems)
    print(*problems or ["nothing grew, every file is whole"], sep="\n")
    if arguments.figures:
        record(arguments.figures, "long_run_steps", arguments.steps, "steps", ">= 100000")
        goal = "0 within noise, 99 % interval in spread"
        record(arguments.figures, "memory_slope_mib_per_hour", slope, "MiB/h", goal,
               runs=len(looks), spread=half_width)  # fmt: skip
    raise SystemExit(bool(problems))


def settings(place: Path, steps: int) -> TrainConfig:
    """Those of `recipes/train_50k.toml`, as far as a tiny student has them."""
    return TrainConfig(
        cache_dir=place / "cache",
        mlp_only=True,
        max_steps=steps,
        batch_size=1,
        schedule="wsd",
        warmup_steps=max(1, steps // 100),
        eval_every=max(1, steps // 50),
        eval_sequences=4,
        save_every=max(1, steps // 200),
        keep=3,
        milestone_every=max(1, steps // 5),
        log_every=LOG_EVERY,
        device="cpu",
    )


def look() -> Look:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    # a cache's files stay open from the first time that they are read: more of them is no leak
    handles = sum(not opened(number).endswith(".safetensors") for number in os.listdir(HANDLES))
    return Look(pages * PAGE_MIB, handles, heap_mib(), sys.getallocatedblocks())


def opened(number: str) -> str:
    """What a handle of this process leads to; nothing where it was closed meanwhile."""
    try:
        return os.readlink(f"{HANDLES}/{number}")
    except FileNotFoundError:
        return ""


def heap_mib() -> float:
    """What the C library's allocator has handed out, large pieces included."""
    found = MALLINFO()
    return (found.uordblks + found.hblkhd) / 2**20


def judged(looks: Sequence[Look], hours: float, problems: list[str]) -> tuple[float, float]:
    """The slope of memory in MiB an hour, and half of its 99 % interval; names what grew.

    Raises:
        ValueError: there are too few looks for a slope.
    """
    trend = memory_trend([each.rss_mib for each in looks])
    if trend is None:
        raise ValueError(f"{len(looks)} looks, expected {FIRST_LOOK} at least; take more steps")
    an_hour = len(looks) / hours
    slope, low, high = (each * an_hour for each in (trend.slope_mib, trend.low_mib, trend.high_mib))
    print(f"memory: {slope:+.4f} MiB an hour, 99 % between {low:+.4f} and {high:+.4f};"
          f" {looks[0].rss_mib:.1f} MiB first, {looks[-1].rss_mib:.1f} MiB last;"
          f" the later half's slope is {trend.steadiness:.2f} of the earlier one's")  # fmt: skip
    for name, unit in (("heap_mib", "MiB"), ("blocks", "blocks")):
        part = memory_trend([float(getattr(each, name)) for each in looks])
        rates = (each * an_hour for each in (part.slope_mib, part.low_mib, part.high_mib))
        print("{}: {:+.4f} {} an hour, 99 % between {:+.4f} and {:+.4f}".format(
              name, next(rates), unit, *rates))  # fmt: skip
    if low > 0 and trend.drift_mib > 1.0:
        problems.append(f"memory grew by {trend.drift_mib:.1f} MiB")
    handles = [each.handles for each in looks[len(looks) // 2 :]]
    tenth = max(1, len(handles) // 10)
    # the least: a save behind the step has files open for a moment, a leak for good
    first, last = min(handles[:tenth]), min(handles[-tenth:])
    print(f"open files: at least {first:.0f} when half was done, {last:.0f} at the end")
    if last > first + OPENED_LATE:
        problems.append(f"open files grew from {first:.0f} to {last:.0f}")
    return slope, (high - low) / 2


def unreadable(run: Path, steps: int) -> list[str]:
    """What is wrong with the files of a finished run."""
    problems = []
    lines = Counter(line["kind"] for line in read_json_lines(run / "metrics.jsonl"))
    beats = len(read_json_lines(run / "heartbeat-rank0.jsonl"))
    expected = -(-steps // LOG_EVERY)
    evaluations = 1 + -(-steps // max(1, steps // 50))
    with (run / "training.csv").open(newline="") as file:
        trained = len([*csv.DictReader(file, strict=True)])
    with (run / "val.csv").open(newline="") as file:
        validated = len([*csv.DictReader(file, strict=True)])
    counts = {
        "metrics.jsonl, train": (lines["train"], expected),
        "metrics.jsonl, eval": (lines["eval"], evaluations),
        "heartbeat": (beats, expected),
        "training.csv": (trained, expected),
        "val.csv": (validated, evaluations),
        "metrics.json": (json.loads((run / "metrics.json").read_text())["steps"], steps),
    }
    for name, (found, wanted) in counts.items():
        print(f"{name}: {found}")
        if found != wanted:
            problems.append(f"{name}: {found} instead of {wanted}")
    events = run / "events.jsonl"
    kinds = Counter(line["kind"] for line in read_json_lines(events)) if events.exists() else {}
    print(f"events: {dict(kinds)}")
    return problems


if __name__ == "__main__":
    main()
