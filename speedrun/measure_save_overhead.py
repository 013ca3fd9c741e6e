"""What saving costs a run: steps with a checkpoint written behind them against steps without.

Stretches of steps take turns, with and without a save at their beginning; both end when the device
is done. What a save adds to its stretch, and what writing lasts beyond the cadence, is the cost. It
is divided by the time of as many steps as lie between two saves. The first save, which allocates
its memory on the host, is told apart and not counted.

python speedrun/measure_save_overhead.py --figures FILE.jsonl
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from cyclopts import App
from figures import record
from speed_case import EXACT, FROZEN, LATENT, settled

from qat.bench.run import Setting, prepare
from qat.bench.subject import Ours, standing_still
from qat.logs import configure
from qat.ranks import ALONE
from qat.train.codes import CodeWatch
from qat.train.config import TrainConfig
from qat.train.run import Run
from qat.train.saver import Saver

app = App(help=__doc__)
CADENCE = TrainConfig.model_fields["save_every"].default
WARM_UP, SHORTEST = 5, 20
"""Steps before anything is timed, and in the shortest stretch."""
CASES = {"frozen": FROZEN | EXACT, "latent": LATENT | EXACT}


class Cost(NamedTuple):
    """One case, measured."""

    percent: float
    """Of the time of the steps between two saves, the median of the pairs."""
    spread: float
    step_s: float
    steps: int
    """In a stretch."""
    host_s: float
    """How long the loop itself stands still for a save."""
    write_s: float
    """From the save until the pointers name it."""
    first_s: float
    gib: float
    """Of one checkpoint."""


class Stretch(NamedTuple):
    """Some steps, timed."""

    seconds: float
    host_s: float
    """Of them, how long the loop stood still for a save."""
    write_s: float
    """From the beginning of the save to its end, which may come later."""


@app.default
def measure(
    *,
    figures: Path | None = None,
    scratch: Path | None = None,
    shape: str = "qwen3-0.6b",
    device: str = "auto",
    batch_size: int = 512,
    seq_len: int = 64,
    pairs: int = 3,
) -> None:
    """Measure both cases; the figure is the worse one.

    Parameters
    ----------
    scratch
        Where checkpoints are written; by default the system's place for temporary files.
    pairs
        Of stretches, in each case.
    """
    configure()
    costs = {}
    for name, settings in CASES.items():
        config = settled(device=device, batch_size=batch_size, seq_len=seq_len, **settings)
        setting, student = prepare(config, shape)
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            stretches = _Stretches(setting, Ours(student, config), Path(place))
            costs[name] = cost = stretches.cost(pairs)
        print(
            f"{name}: {cost.percent:.3f} % (spread {cost.spread:.3f}, {pairs} pairs of "
            f"{cost.steps} steps) at a save every {CADENCE} "
            f"steps of {cost.step_s * 1e3:.1f} ms; the loop stands still for "
            f"{cost.host_s * 1e3:.0f} ms, {cost.gib:.2f} GiB are there {cost.write_s:.1f} s later; "
            f"the first save {cost.first_s:.2f} s",
            flush=True,
        )
        del stretches, student
        setting.backend.free_memory()
    worst = max(costs.values(), key=lambda cost: cost.percent)
    if figures is not None:
        record(
            figures,
            "save_overhead_percent",
            round(worst.percent, 3),
            "%",
            "<= 1",
            runs=pairs,
            spread=round(worst.spread, 3),
        )


class _Stretches:
    """A student under training, and a saver beside it."""

    def __init__(self, setting: Setting, ours: Ours, place: Path) -> None:
        self._backend, self._place = setting.backend, place
        self._batches = setting.batches(setting.config.batch_size)
        self._subject = ours.subject()
        codes = CodeWatch(ours.student.model)
        codes.flipped_frac()  # as after the first evaluation: a checkpoint holds the codes
        config = standing_still(setting.config)
        self._saver = Saver(
            Run(place), ours.student, None, ours.optimizer, codes=codes, config=config, ranks=ALONE
        )
        self._step = 0

    def cost(self, pairs: int) -> Cost:
        """Warm up, save once, then let stretches take turns, every second pair backwards."""
        self._stretch(WARM_UP, is_saving=False)
        step_s = self._stretch(WARM_UP, is_saving=False).seconds / WARM_UP
        with self._saver:
            first = self._stretch(0, is_saving=True)
            lasting = int(1.5 * first.write_s / step_s)  # writing must end within the stretch
            steps = min(max(SHORTEST, lasting), CADENCE)
            plain, saving = [], []
            for number in range(pairs):
                for is_saving in (False, True)[:: -1 if number % 2 else 1]:
                    stretch = self._stretch(steps, is_saving=is_saving)
                    (saving if is_saving else plain).append(stretch)
        step_s = statistics.median(stretch.seconds for stretch in plain) / steps
        between_s = step_s * CADENCE
        percent = [
            100 * (a.seconds - b.seconds + max(0.0, a.write_s - between_s)) / between_s
            for a, b in zip(saving, plain, strict=True)
        ]
        sizes = [path.stat().st_size for path in self._place.rglob("*") if path.is_file()]
        self._subject.close()
        return Cost(
            statistics.median(percent),
            statistics.stdev(percent) if pairs > 1 else 0.0,
            step_s,
            steps,
            statistics.median(stretch.host_s for stretch in saving),
            statistics.median(stretch.write_s for stretch in saving),
            first.host_s,
            sum(sizes) / 2**30,
        )

    def _stretch(self, steps: int, *, is_saving: bool) -> "Stretch":
        """So many steps, with a save before them or without."""
        host_s = write_s = 0.0
        self._backend.synchronize()
        now, began = time.time(), time.perf_counter()
        if is_saving:
            self._saver.save(self._step, 1.0, is_best=False)
            self._backend.synchronize()  # as the loop does after every pause
            host_s = time.perf_counter() - began
        for _ in range(steps):
            self._subject(self._batches, 0)
        self._step += max(steps, 1)
        self._backend.synchronize()
        seconds = time.perf_counter() - began
        if is_saving:
            self._saver.finish()
            write_s = (self._place / "latest").stat().st_mtime - now
        return Stretch(seconds, host_s, write_s)


if __name__ == "__main__":
    app()
