"""How many trials `--find-max-batch` takes, confirmations included, at every limit of a range.

The device is simulated: each limit of the range, steps that together hold as much as one or more,
and memory that a line through small trials predicts well, badly, or that nobody counts.

python speedrun/measure_find_max.py --figures F
python speedrun/measure_find_max.py real runs/bench/TIME --figures F
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import log2
from pathlib import Path

import figures as records
import torch
from cyclopts import App

from qat.backend.base import Backend
from qat.bench import find_max
from qat.bench.find_max import Trials, find_max_batch
from qat.bench.measure import Timing
from qat.bench.results import WHOLE

app = App(help=__doc__)
FIXED_GIB, SEQ_LEN = 2.0, 1024
PEAKS: dict[str, Callable[[int], float | None]] = {
    "line": lambda size: FIXED_GIB + size / 8,
    "ever steeper": lambda size: FIXED_GIB + size / 8 + (size / 64) ** 2,
    "ever flatter": lambda size: FIXED_GIB + size**0.75 / 8,
    "not counted": lambda _: None,
}
"""What a step of so many sequences holds, in GiB."""
SURVIVING = (1.0, 0.99, 0.9, 0.5, 0.1)
"""Of the largest batch that takes a few steps, the share that takes all of them."""


@dataclass(frozen=True)
class Card(Backend):
    """A device that frees what it holds at once."""

    def free_memory(self) -> None:
        """See `Backend`."""


CARD = Card(torch.device("cpu"))


def searched(limit: int, peak: str, surviving: float) -> tuple[int, int, int]:
    """The largest batch found, the trials that it took, and how many of these confirmed."""
    last = max(1, int(limit * surviving))

    def steps(size: int) -> Timing:
        if size > limit:
            raise torch.OutOfMemoryError("full")
        seconds = 1e-3 + size * 1e-5
        held = PEAKS[peak](size)
        return Timing(0.0, (seconds,), held, held, 0.0, size, size, {})

    trials = Trials(steps, CARD)
    memory_gib = PEAKS[peak](limit)
    found = find_max_batch(
        trials, lambda size: size / (1 + size) if size <= last else None, memory_gib, SEQ_LEN
    )
    return found.largest, len(found.trials) + len(found.confirmed), len(found.confirmed)


@app.default
def measure(*, figures: Path, largest: int = 4096) -> None:
    """Append `find_max_batch_trials` to FIGURES: the most trials at any limit up to LARGEST.

    Raises:
        SystemExit: a batch found is not the largest.
    """
    logging.getLogger(find_max.__name__).setLevel(logging.ERROR)
    worst: dict[tuple[str, float], tuple[int, int]] = {}
    for peak, surviving in product(PEAKS, SURVIVING):
        for limit in range(1, largest + 1):
            found, trials, confirming = searched(limit, peak, surviving)
            last = max(1, int(limit * surviving))
            if not last - limit / find_max.CHOICES <= found <= last:
                raise SystemExit(f"limit {limit}, {peak}: found {found}, expected {last}")
            worst[peak, surviving] = max(worst.get((peak, surviving), (0, 0)), (trials, confirming))
    for (peak, surviving), (trials, confirming) in worst.items():
        print(f"{peak}, {surviving:g} survives: at most {trials} trials, {confirming} confirming")
    most = max(trials for trials, _ in worst.values())
    goal = f"<= {2 * log2(largest) + 6:.4g}"
    records.record(
        figures, "find_max_batch_trials", most, "trials", goal, runs=largest * len(worst)
    )
    print(f"find_max_batch_trials: {most} (goal {goal})")


@app.command
def real(run: Path, *, figures: Path) -> None:
    """Append `find_max_batch_trials_real` to FIGURES: the trials of RUN, a `--find-max-batch`."""
    search = json.loads((run / WHOLE).read_text(encoding="utf-8"))["search"]
    taken = len(search["trials"]) + len(search["confirmed"])
    largest = max(trial["batch_size"] for trial in search["trials"])
    goal = f"<= {2 * log2(largest) + 6:.4g}"
    records.record(figures, "find_max_batch_trials_real", taken, "trials", goal)
    print(f"find_max_batch_trials_real: {taken} (goal {goal}), sizes tried up to {largest}")


if __name__ == "__main__":
    app()
