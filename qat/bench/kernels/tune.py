"""Tunes a kernel: every configuration once, the best few again beside the default, then a verdict.

A configuration is adopted only if it gives the default's results and, in turns with the default,
was not slower: the 95 % interval of the median of its ratios must lie at or above 1.
"""

import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import tomli_w
import torch

from qat.bench.kernels.gates import (
    FAULTS,
    MESSAGE,
    Inputs,
    KernelCase,
    Outputs,
    Seeds,
    Size,
    Space,
    copied,
    recorded,
    spread_inputs,
    worst_of,
)
from qat.bench.measure import Clock, Row
from qat.bench.stats import Interval, median_interval
from qat.files import write_atomically
from qat.kernels import tuned

# Compiles kernels several at a time, before any of them runs.

WORKERS = 12


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, a launch of a Triton kernel compiles it and nothing more; all are ready at the end.

    One that does not compile says so when it is launched for real.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compiled(
        self: JITFunction,
        *args: object,
        grid: object,
        warmup: bool,
        **options: object,
    ) -> object:
        return launch(self, *args, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(WORKERS) as workers, AsyncCompileMode(workers, ignore_errors=True):
        JITFunction.run = compiled
        try:
            yield
        finally:
            JITFunction.run = launch


FIRST_ROUNDS = 5
T = TypeVar("T")
FACTS = "measured"
"""The part of a table that is no kernel's."""


@dataclass(frozen=True)
class Timed:
    """A configuration and what a call took, in turns with the default."""

    configuration: tuple
    seconds: tuple[float, ...]
    ratio: Interval
    """The default's time over its own."""


@dataclass(frozen=True)
class Tuned:
    """What tuning one kernel at one size found."""

    case: str
    space: Space
    calls: int
    num_bytes: int
    """Of one call."""
    best: tuple[Timed, ...]
    """The few that were measured again, fastest first, the default among them."""
    refused: dict[tuple, str]
    """Those that did not compile or gave other results."""

    @property
    def adopted(self) -> Timed | None:
        """The fastest, if it is not the default and was not slower than that."""
        first = self.best[0]
        is_better = first.configuration != self.space.default and first.ratio.low >= 1.0
        return first if is_better else None

    @property
    def ratio(self) -> float:
        """The default's time over that of what runs from now on; 1 where the default stays."""
        return 1.0 if self.adopted is None else self.adopted.ratio.median

    def row(self) -> Row:
        """The fields of a row of results."""
        runs = self.adopted or next(t for t in self.best if t.configuration == self.space.default)
        return {
            "kind": "tuned",
            "case": f"{self.case}, tuned",
            "kernel": self.space.kernel,
            "key": tuned.named(self.space.key),
            "calls": self.calls,
            "unit": "s",
            "samples": list(runs.seconds),
            "requested": self.space.default._asdict(),
            "effective": runs.configuration._asdict(),
            "over_default": self.ratio,
            "best": [shown(each) for each in self.best],
            "refused": [[*c, why] for c, why in self.refused.items()],
        }


def tune(case: KernelCase, size: Size, *, seeds: Seeds, clock: Clock, keep: int) -> Tuned:
    """Find the best configuration of a case's kernel at one size."""
    with torch.no_grad():
        inputs = spread_inputs(case, size, seeds, is_spread=clock.backend.records())
        trial = Tuning(case, size, case.space(size), inputs, clock)
        runs, refused = trial.runs()
        first = replace(clock, repeats=min(FIRST_ROUNDS, clock.repeats)).turns([*runs.values()])
        medians = dict(zip(runs, map(statistics.median, first), strict=True))
        default = trial.space.default
        near = sorted((c for c in runs if c != default), key=medians.__getitem__)
        few = [default]
        for configuration in near:
            if len(few) > keep:
                break
            wrong = trial.differs(configuration)
            if wrong:
                refused[configuration] = wrong
            else:
                few.append(configuration)
        again = clock.turns([runs[configuration] for configuration in few])
        moved = case.num_bytes(inputs[0], trial.once(default), size)
    timed = [
        Timed(configuration, tuple(s / len(inputs) for s in seconds), ratio_of(again[0], seconds))
        for configuration, seconds in zip(few, again, strict=True)
    ]
    timed.sort(key=lambda each: statistics.median(each.seconds))
    return Tuned(case.name, trial.space, len(inputs), moved, tuple(timed), refused)


@dataclass(frozen=True)
class Tuning:
    """A case's kernel at one size, about to run with several configurations."""

    case: KernelCase
    size: Size
    space: Space
    inputs: list[Inputs]
    clock: Clock

    def runs(self) -> tuple[dict[tuple, Callable[[], object]], dict[tuple, str]]:
        """Calls on all inputs by configuration, the default first; and which do not compile."""
        runs: dict[tuple, Callable[[], object]] = {}
        refused: dict[tuple, str] = {}
        every = (self.space.default, *self.space.others)
        if self.clock.backend.records():
            with compiling_only():
                for configuration in every:
                    self.once(configuration)
        for configuration in every:
            try:
                runs[configuration] = self._run(configuration)
            except FAULTS as error:
                if configuration == self.space.default:
                    raise
                refused[configuration] = f"{type(error).__name__}: {error}"[:MESSAGE]
        return runs, refused

    def differs(self, configuration: tuple) -> str | None:
        """What is wrong with a configuration's results, compared with the default's."""
        found, wanted = self.once(configuration), self.once(self.space.default)
        # both may err by the case's slack, and a sum in another order by a little more
        lenient = replace(self.case, slack=2 * self.case.slack + 2e-6)
        return worst_of(lenient, found, wanted, self.case.compared(wanted))

    def once(self, configuration: tuple) -> Outputs:
        """The results of one call with a configuration."""
        return self._forced(
            configuration, lambda: self.case.kernel(copied(self.inputs[0]), self.size)
        )()

    def _run(self, configuration: tuple) -> Callable[[], object]:
        backend = self.clock.backend
        if backend.records():
            with tuned.forcing(self.space.kernel, self.space.key, configuration):
                return recorded(self.case, self.size, self.inputs, backend)
        run = self._forced(
            configuration, lambda: [self.case.kernel(each, self.size) for each in self.inputs]
        )
        run()
        return run

    def _forced(self, configuration: tuple, run: Callable[[], T]) -> Callable[[], T]:
        def again() -> T:
            with tuned.forcing(self.space.kernel, self.space.key, configuration):
                return run()

        return again


def ratio_of(default: list[float], other: list[float]) -> Interval:
    """Default over other, round by round, so that a drift of the device cancels."""
    return median_interval([a / b for a, b in zip(default, other, strict=True)])


def shown(timed: Timed) -> Row:
    """A timed configuration as a row holds it."""
    low, high = timed.ratio.low, timed.ratio.high
    return {
        **timed.configuration._asdict(),
        "median_s": statistics.median(timed.seconds),
        "over_default": timed.ratio.median,
        "low": low,
        "high": high,
    }


def write_table(path: Path, found: list[Tuned], facts: dict[str, object]) -> None:
    """Put what was adopted into a device's table; where the default won, an entry goes.

    Entries of other kernels and keys stay.
    """
    table = tuned.read_table(path)
    for each in found:
        entries = table.setdefault(each.space.kernel, {})
        entries.pop(tuned.named(each.space.key), None)
        if each.adopted is not None:
            entries[tuned.named(each.space.key)] = each.adopted.configuration._asdict()
    kept = {name: entries for name, entries in sorted(table.items()) if entries and name != FACTS}
    known = {name: value for name, value in facts.items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, tomli_w.dumps({FACTS: known, **kept}))
    tuned.forget_tables()
