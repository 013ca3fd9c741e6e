"""Does `qat bench compare` see a planted slowdown, and only that?

The kernel forms a weight of several equal pieces. A slowed one forms one or three pieces more: a
real share of more work, 5 % on a GPU and 15 % on a CPU, and nothing else is different. Twenty times
the plain and the slowed kernel take turns and are compared; twenty times the plain one takes turns
with its like, where any other verdict than `same` is a false alarm. The same files, each against
the one measured next, tell what comparing without turns would say: in single runs, and in threes.
On a CPU seconds are the processor's, on a GPU those of its own clock.

python speedrun/measure_compare.py --figures FILE.jsonl
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import torch
from cyclopts import App
from figures import record

from qat.backend.base import Backend
from qat.backend.device import select
from qat.bench.compare import (
    REGRESSION,
    Comparison,
    MeasuredCase,
    compare_cases,
    compare_files,
    read_cases,
)
from qat.bench.config import MeasureConfig
from qat.bench.results import ROWS, Results, environment
from qat.bench.stats import MIN_SAMPLES
from qat.kernels.lut_weight import form
from qat.quant.weight import PackedIndices, Scales, packed_width

app = App(help=__doc__)
GROUP_SIZE, BITS, PIECES = 32, 2, 20


@dataclass(frozen=True)
class Scale:
    """How large a piece of the kernel's work is on a device, and how many are planted."""

    O: int
    I: int
    extra: int
    """Pieces beside the `PIECES` of the plain kernel."""
    sample_s: float
    """What one sample takes at least."""


ON_CPU, ON_GPU = Scale(64, 512, 3, 0.001), Scale(8192, 4096, 1, 0.002)

Kernel = Callable[[], object]
Clock = Callable[[Kernel, int], float]
"""Seconds a call of so many calls."""


@app.default
def measure(
    *,
    figures: Path | None = None,
    device: str = "auto",
    comparisons: int = 20,
    samples: int = 200,
    threshold: float = 0.03,
) -> None:
    """Count what is flagged among slowed and among equal kernels."""
    backend = select(device)
    is_gpu = backend.device.type == "cuda"
    scale, clock = (ON_GPU, gpu_clock(backend)) if is_gpu else (ON_CPU, cpu_clock)
    torch.set_num_threads(1)
    plain, same, slowed = (kernel(scale, backend, extra) for extra in (0, 0, scale.extra))
    calls = calls_in_a_sample(plain, clock, scale.sample_s)
    with tempfile.TemporaryDirectory() as place:
        common = environment(backend, MeasureConfig(device=device, dtype="fp32"))
        trial = Trial(Path(place), common, clock, calls, samples, threshold)
        found = [trial.compared(f"slowed-{i}", plain, slowed) for i in range(comparisons)]
        equal = [trial.compared(f"equal-{i}", plain, same) for i in range(comparisons)]
        apart = {runs: trial.apart(comparisons, runs) for runs in (1, MIN_SAMPLES)}
    flagged = sum(each.exit_code == REGRESSION for each in found)
    alarms = different(equal)
    for name, those in {"slowed": found, "equal": equal}.items():
        ratios = [each.pairs[0].difference.ratio for each in those]
        middle = statistics.median(ratios)
        print(f"{name}: ratio {middle:.4f}, from {min(ratios):.4f} to {max(ratios):.4f}")
    for runs, those in apart.items():
        print(f"not in turns, {runs} a side: {different(those)} of {len(those)} equal ones flagged")
    print(f"planted {scale.extra / PIECES:.0%}: {flagged} of {comparisons} flagged, {alarms} false")
    if figures:
        unit = f"of {comparisons} comparisons"
        record(figures, "planted_slowdown_flagged", flagged, unit, f">= {comparisons}")
        record(figures, "false_alarms", alarms, unit, "<= 0")
        unit = f"of {len(apart[1])} comparisons"
        record(figures, "false_alarms_not_in_turns", different(apart[1]), unit, "stated")
    raise SystemExit(flagged < comparisons or alarms > 0)


@dataclass(frozen=True)
class Trial:
    """Two kernels in turns, written as two results, and compared as a user would."""

    place: Path
    common: dict[str, object]
    clock: Clock
    calls: int
    samples: int
    threshold: float

    def compared(self, name: str, first: Kernel, second: Kernel) -> Comparison:
        """Both kernels, in turns."""
        kernels, found = (first, second), ([], [])
        for turn in range(self.samples):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                found[which].append(self.clock(kernels[which], self.calls))
        files = [self.written(f"{name}-{side}", found[side]) for side in (0, 1)]
        return compare_files(*files, threshold=self.threshold)

    def apart(self, comparisons: int, runs: int) -> list[Comparison]:
        """So many runs of one kernel against as many measured after them, over and over."""
        cases = [read_cases(self.place / f"equal-{i}-0") for i in range(comparisons)]
        sides = [
            {"form": MeasuredCase("form", tuple(chain.from_iterable(c["form"].rows for c in some)))}
            for some in (cases[i : i + runs] for i in range(0, comparisons - runs + 1, runs))
        ]
        return [compare_cases(a, b, self.threshold) for a, b in pairwise(sides)]

    def written(self, name: str, seconds: list[float]) -> Path:
        """The file of one side's row."""
        with Results(self.place / name, self.common) as results:
            results.add(kind="kernel", case="form", dtype="fp32", unit="s", samples=seconds)
        return results.path / ROWS


def different(found: list[Comparison]) -> int:
    """How many say anything else than `same`."""
    return sum(each.pairs[0].verdict != "same" for each in found)


def kernel(scale: Scale, backend: Backend, extra: int) -> Kernel:
    """Forming a weight of random codes, piece by piece, of so many more pieces."""
    octets = torch.randint(256, (scale.O, packed_width(scale.I, BITS)), dtype=torch.uint8)
    source = PackedIndices(octets.to(backend.device), BITS, scale.I)
    codebook = torch.tensor([-1.0, -0.3, 0.3, 1.0], device=backend.device)
    groups = torch.rand(scale.O, scale.I // GROUP_SIZE, device=backend.device)
    scales = Scales(scales=groups + 0.5)
    out = torch.empty(scale.O, scale.I, device=backend.device)

    def run() -> None:
        for _ in range(PIECES + extra):
            form(source, codebook, scales, torch.float32, out=out)

    return run


def calls_in_a_sample(work: Kernel, clock: Clock, seconds: float) -> int:
    """So many that they take about `seconds`; the first calls, which warm up, apart."""
    clock(work, 3)
    return max(1, round(seconds / clock(work, 3)))


def cpu_clock(work: Kernel, calls: int) -> float:
    """Of the processor: other programs' turns on it do not count."""
    began = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - began) / calls


def gpu_clock(backend: Backend) -> Clock:
    """Of the device, from the end of what ran before."""

    def clock(work: Kernel, calls: int) -> float:
        began = backend.mark()
        for _ in range(calls):
            work()
        ended = backend.mark()
        backend.synchronize()
        return backend.seconds_between(began, ended) / calls

    return clock


if __name__ == "__main__":
    app()
