"""What saving costs a run: steps with a checkpoint written behind them against steps without.

Stretches of steps take turns, with and without a save at their beginning; both end when the device
is done. A stretch with a save lasts until its files are there, one without is short. What a save
adds to the steps of its stretch, and what writing lasts beyond the cadence, is the cost. It is
divided by the time of as many steps as lie between two saves. The first save, which allocates its
memory on the host and copies what does not learn, is told apart and not counted.

python speedrun/measure_save_overhead.py --figures FILE.jsonl
python speedrun/measure_save_overhead.py --case latent --scratch /dev/shm --figures FILE.jsonl
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal, NamedTuple

from cyclopts import App
from figures import record
from speed_case import EXACT, FROZEN, LATENT, settled

from qat.bench.run import Setting, prepare
from qat.bench.student import Ours, standing_still
from qat.logs import configure
from qat.ranks import ALONE
from qat.train.config import TrainConfig
from qat.train.judge import CodeWatch
from qat.train.run import RunDirectory
from qat.train.saver import Saver

app = App(help=__doc__)
CADENCE = TrainConfig.model_fields["save_every"].default
WARM_UP, SHORTEST = 5, 20
"""Steps before anything is timed, and in a stretch without a save."""
MARGIN = 1.25
"""Of the steps of a stretch with a save over those that the first save's writing lasted."""
CASES = {"frozen": FROZEN | EXACT, "latent": LATENT | EXACT}


class Stretch(NamedTuple):
    """Some steps, timed."""

    seconds: float
    parts: dict[str, float]
    """Of a save, in seconds: `call`, as long as the loop was in it; `drain`, the device's work at
    that moment; `there`, from its beginning to the end of writing; and the saver's own parts."""


class Cost(NamedTuple):
    """One case, measured."""

    percent: float
    """Of the time of the steps between two saves, the median of the saves."""
    spread: float
    step_s: float
    steps: int
    """In a stretch with a save."""
    parts: dict[str, float]
    """The median of each."""
    first_s: float
    gib: float
    """Of one checkpoint."""

    def __str__(self) -> str:
        """Two lines: the cost, and what it is made of."""
        parts = "  ".join(f"{name} {1e3 * took:,.0f}" for name, took in self.parts.items())
        return (
            f"{self.percent:.3f} % (spread {self.spread:.3f}, stretches of {self.steps} steps) at "
            f"a save every {CADENCE} steps of {self.step_s * 1e3:.1f} ms; {self.gib:.2f} GiB; the "
            f"first save {self.first_s:.2f} s\n  ms: {parts}"
        )


@app.default
def measure(
    *,
    figures: Path | None = None,
    scratch: Path | None = None,
    shape: str = "qwen3-0.6b",
    device: str = "auto",
    batch_size: int = 512,
    seq_len: int = 64,
    pairs: int = 2,
    case: Literal["both", "frozen", "latent"] = "both",
) -> None:
    """Measure a case or both; of both, the figure is the worse one.

    Parameters
    ----------
    scratch
        Where checkpoints are written; by default the system's place for temporary files.
    pairs
        Of stretches, in each case.
    case
        What learns: frozen codes keep theirs, latent weights move.
    """
    configure()
    costs = {}
    for name in CASES if case == "both" else (case,):
        config = settled(device=device, batch_size=batch_size, seq_len=seq_len, **CASES[name])
        setting, student = prepare(config, shape)
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            stretches = _Stretches(setting, Ours(student, config), Path(place))
            costs[name] = cost = stretches.cost(pairs)
        print(f"{name}: {cost}", flush=True)
        _record(figures, f"save_overhead_{name}_percent", cost, pairs)
        del stretches, student
        setting.backend.free_memory()
    if case == "both":
        worst = max(costs.values(), key=lambda cost: cost.percent)
        _record(figures, "save_overhead_percent", worst, pairs)


def _record(figures: Path | None, name: str, cost: Cost, runs: int) -> None:
    if figures is not None:
        value, spread = round(cost.percent, 3), round(cost.spread, 3)
        record(figures, name, value, "%", "<= 1", runs=runs, spread=spread)


class _Stretches:
    """A student under training, and a saver beside it."""

    def __init__(self, setting: Setting, ours: Ours, place: Path) -> None:
        self._backend, self._place = setting.backend, place
        self._batches = setting.batches(setting.config.batch_size)
        self._subject = ours.subject()
        codes = CodeWatch(ours.student.model)
        codes.flipped_frac()  # as after the first evaluation: a checkpoint holds the codes
        config = standing_still(setting.config)
        self._run = RunDirectory(place)
        self._saver = Saver(
            self._run,
            ours.student,
            None,
            ours.optimizer,
            beside=[codes],
            config=config,
            ranks=ALONE,
        )
        self._step = 0

    def cost(self, pairs: int) -> Cost:
        """Warm up, save once, then let stretches take turns, every second pair backwards."""
        self._stretch(WARM_UP)
        step_s = self._stretch(WARM_UP).seconds / WARM_UP
        with self._saver:
            first = self._stretch(0, is_saving=True)
            lasting = int(MARGIN * first.parts["there"] / step_s)
            steps = min(max(SHORTEST, lasting), CADENCE)
            plain, saving = [], []
            for number in range(pairs):
                for is_saving in (False, True)[:: -1 if number % 2 else 1]:
                    if is_saving:
                        saving.append(self._stretch(steps, is_saving=True))
                    else:
                        plain.append(self._stretch(SHORTEST))
        step_s = statistics.median(stretch.seconds for stretch in plain) / SHORTEST
        between_s = step_s * CADENCE
        added = [
            stretch.seconds - steps * step_s + max(0.0, stretch.parts["there"] - between_s)
            for stretch in saving
        ]
        percent = [100 * seconds / between_s for seconds in added]
        latest = self._run.pointed("latest")
        self._subject.close()
        return Cost(
            statistics.median(percent),
            statistics.stdev(percent) if pairs > 1 else 0.0,
            step_s,
            steps,
            {name: statistics.median(s.parts[name] for s in saving) for name in saving[0].parts},
            sum(first.parts[name] for name in ("call", "drain")),
            sum(path.stat().st_size for path in latest.rglob("*") if path.is_file()) / 2**30,
        )

    def _stretch(self, steps: int, *, is_saving: bool = False) -> Stretch:
        """So many steps, with a save before them or without."""
        parts = {}
        self._backend.synchronize()
        now, began = time.time(), time.perf_counter()
        if is_saving:
            self._saver.save(self._step, 1.0, is_best=False)
            parts["call"] = time.perf_counter() - began
            self._backend.synchronize()  # as the loop does after every pause
            parts["drain"] = time.perf_counter() - began - parts["call"]
        for _ in range(steps):
            self._subject(self._batches, 0)
        self._step += max(steps, 1)
        self._backend.synchronize()
        seconds = time.perf_counter() - began
        if is_saving:
            self._saver.finish()
            parts["there"] = (self._place / "latest").stat().st_mtime - now
        return Stretch(seconds, parts | self._saver.seconds if is_saving else {})


if __name__ == "__main__":
    app()
