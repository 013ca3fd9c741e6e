"""The largest batch of a training step, with gradient checkpointing, by memory limit.

Limits rise, so that what fitted a smaller one is not tried again. The batch found takes a warm-up
step and timed ones; the search looks below it if those do not fit.

python speedrun/measure_max_batch.py --out runs/max_batch
"""

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cyclopts import App
from speed_case import (
    CANDIDATES,
    FROZEN,
    SPEED_COLUMNS,
    Figure,
    Row,
    record,
    results_in,
    settled,
    show,
    timed_row,
    varied,
)

from qat.bench.find_max import Trials, find_max_batch, unless_out_of_memory
from qat.bench.measure import Timing
from qat.bench.results import Results
from qat.bench.run import Setting, prepare, try_steps
from qat.bench.student import Ours
from qat.logs import configure
from qat.models.language_model import LanguageModel

app = App(help=__doc__)
GOALS = {0.0: 24576, 16.0: 640, 24.0: 2560, 40.0: 2880, 80.0: 10080}
"""Sequences by limit; 0 is all that the device has, which is 139 GiB on an H200."""


@dataclass(frozen=True)
class Place:
    """What is searched: our step over one student."""

    setting: Setting
    student: LanguageModel
    ours: Ours


@app.default
def measure(
    *,
    out: Path,
    shape: str = "qwen3-0.6b",
    device: str = "auto",
    limits: str = "16,24,40,80,0",
    steps: int = 1,
    seq_len: int = 64,
) -> None:
    """Write rows, a table and figures to OUT.

    Parameters
    ----------
    limits
        GiB, joined by commas; 0 is no limit, and comes last.
    steps
        Timed steps at the batch found.
    """
    configure()
    checkpointed = FROZEN | CANDIDATES | {"gradient_checkpointing": True}
    config = settled(device=device, steps=steps, warmup=1, seq_len=seq_len, **checkpointed)
    wanted = sorted(map(float, limits.split(",")), key=lambda gib: gib or float("inf"))
    with results_in(out, config) as results:
        setting, student = prepare(config, shape)
        place = Place(setting, student, Ours(student, config))
        trials = Trials(partial(try_steps, setting, place.ours), setting.backend)
        rows = []
        for gib in wanted:
            trials.done = {size: trial for size, trial in trials.done.items() if trial.fits}
            rows.append(search(place, trials, gib, results))
            name = f"max_batch_{gib:g}gib" if gib else "max_batch_139gib"
            goal = f">= {GOALS[gib]}" if gib in GOALS else "none"
            record(out, Figure(name, "sequences", goal), [rows[-1]["batch_size"]])
        results.finish()
    limit, predicted = ("Limit", "limit_gib", "{:g} GiB"), ("Predicted", "predicted", "{}")
    show(rows, limit, predicted, columns=SPEED_COLUMNS)


@app.command
def settle(log: Path, *, figures: Path, commit: str, device: str) -> None:
    """Record what the last search in LOG had found when it was cut off: one step that fitted.

    Parameters
    ----------
    log
        What `measure` printed until something stopped it during the search without a limit.
    commit, device
        Of that run.
    """
    last = log.read_text(encoding="utf-8").split("\nmax_batch_")[-1]
    tried = re.findall(r"^batch (\d+): (fits|out of memory)", last, re.MULTILINE)
    fitted = max(int(size) for size, outcome in tried if outcome == "fits")
    above = min(int(size) for size, outcome in tried if outcome != "fits" and int(size) > fitted)
    line = {
        "figure": "max_batch_139gib",
        "value": fitted,
        "unit": "sequences",
        "goal": f">= {GOALS[0.0]}",
        "command": "python speedrun/measure_max_batch.py --out speedruns/max_139 --limits 0",
        "commit": commit,
        "device": device,
        "runs": 1,
        "spread": None,
        "note": f"cut off: one step of {fitted} fitted, of {above} did not; between them untried",
    }
    with figures.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def search(place: Place, trials: Trials, gib: float, results: Results) -> Row:
    """Search within one limit; a row for each trial, and the one returned for the batch found."""
    setting = place.setting
    known = set(trials.done)
    backend = setting.backend
    limit = backend.limit_memory(gib) if gib else setting.memory_limit(may_outgrow=True)
    with limit as most:
        most = most or backend.memory_gib()
        timings: dict[int, Timing | None] = {}

        def confirm(size: int) -> float | None:
            timings[size] = timing = unless_out_of_memory(partial(several, place, size), backend)
            return None if timing is None else timing.tokens_per_s

        found = find_max_batch(trials, confirm, most, setting.data.seq_len)
        for trial in found.trials:
            if trial.batch_size not in known:
                row = setting.row("trial", "ours", trial.batch_size)
                status = "OK" if trial.fits else "OOM"
                results.add(**row, limit_gib=most, peak_gib=trial.peak_gib, status=status)
        size, timing = found.largest, timings[found.largest]
    at = varied(setting, place.student, batch_size=size)
    row = timed_row(at, "ours", timing, kind="max", status="MAX", limit_gib=most)
    row |= {"predicted": found.predicted, "fastest": found.fastest}
    row["trials"] = len(set(trials.done) - known) + len(found.confirmed)
    results.add(**row)
    return row


def several(place: Place, size: int) -> Timing:
    """The steps of `qat bench`, with what is compiled already."""
    try:
        return place.setting.time(place.ours.subject(), size)
    finally:
        place.ours.optimizer.forget_gradients()


if __name__ == "__main__":
    app()
