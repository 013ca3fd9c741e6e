"""`qat bench kernels`: every kernel through its gates, and a row of results for each."""

import json
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qat.backend.base import Backend
from qat.backend.device import select
from qat.bench.config import KernelsConfig, shape_called
from qat.bench.kernels.cases import layer_cases, linear_cases, word_cases
from qat.bench.kernels.gates import (
    KernelCase,
    Refusal,
    Seeds,
    Speed,
    compiles,
    is_correct,
    is_fast,
    measure,
    numbers,
)
from qat.bench.kernels.tune import Tuned, tune, write_table
from qat.bench.measure import Clock, Roofline, Row, measure_roofline, times
from qat.bench.results import Results, environment
from qat.errors import BenchError, ConfigError
from qat.files import write_atomically
from qat.kernels import tuned
from qat.kernels.dispatch import HAS_TRITON

# Every case of the kernel bench, by name, and the sizes of the work that is timed.

TRAINING = {"sequences": 512, "length": 64, "kept": 64, "logit_rows": 8192, "context": 2048}
TRIAL = {"sequences": 2, "length": 8, "kept": 8, "logit_rows": 16, "context": 32}
"""Of the smallest shape, for a look at whether everything runs."""


def work_of(shape: str) -> dict[str, Any]:
    """A published shape's dimensions, and those of a batch, the cache's pass and a context.

    Raises:
        ConfigError: no shape has that name.
    """
    return {**shape_called(shape), **(TRIAL if shape == "tiny" else TRAINING)}


def all_cases() -> dict[str, KernelCase]:
    """In the order in which they are run."""
    every = (*layer_cases(), *linear_cases(), *word_cases())
    return {case.name: case for case in every}


def cases_named(only: str) -> list[KernelCase]:
    """Cases whose names hold one of the parts of `only`, joined by commas; all for none.

    Raises:
        ConfigError: a part is in no name.
    """
    every, parts = all_cases(), [part.strip() for part in only.split(",")]
    for part in parts:
        if not any(part in name for name in every):
            raise ConfigError(
                f"only={part!r} is in no kernel's name; choose parts of {'; '.join(every)}"
            )
    return [case for name, case in every.items() if any(part in name for part in parts)]


# Figures of a run as records keep them: one JSON object a line, with what measures it again.


class Figure(NamedTuple):
    """A number that a goal is set for."""

    figure: str
    value: float
    unit: str
    goal: str


def record_figures(path: Path, found: list[Figure], environment: dict[str, object]) -> None:
    """Append figures to `path`, made if missing, with command, commit and device."""
    common = {name: environment[name] for name in ("command", "commit", "device")}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for figure in found:
            line = {**figure._asdict(), **common, "runs": 1, "spread": None}
            file.write(json.dumps(line) + "\n")


logger = logging.getLogger(__name__)

TABLE_FACTS = ("device", "commit", "torch", "triton")
"""Of the environment, what a table of tuned configurations names."""


@dataclass(frozen=True)
class KernelsReport:
    """What the gates found, for whoever shows it."""

    path: Path
    rows: list[Row]
    """One a kernel."""
    rates: Roofline
    note: str
    """What could not be asked of this device."""
    tuned: list[Tuned]
    """Empty without `tune`."""

    def figures(self) -> list[Figure]:
        """The figures that this run can give."""
        found = []
        if self.least is not None:
            share = round(self.least["roofline_frac"], 3)
            found.append(Figure("kernel_roofline_min", share, "of the roofline", ">= 0.8"))
        if self.worst_ratio is not None:
            ratio = round(self.worst_ratio, 3)
            found.append(Figure("autotune_worst_ratio", ratio, "x the default", ">= 1.0"))
        return found

    @property
    def worst_ratio(self) -> float | None:
        """The least of the tuned kernels' speeds over their defaults'."""
        return min((each.ratio for each in self.tuned), default=None)

    @property
    def least(self) -> Row | None:
        """The kernel furthest from the roofline, of those that count."""
        counted = [row for row in self.rows if row["counts"] and "roofline_frac" in row]
        return min(counted, key=lambda row: row["roofline_frac"]) if counted else None

    def check(self) -> None:
        """Make sure that every kernel passed.

        Raises:
            BenchError: one did not.
        """
        failed = [row for row in self.rows if row["status"] == "FAILED"]
        if failed:
            first = failed[0]
            raise BenchError(
                f"{len(failed)} kernels failed, expected none; the first, {first['case']!r}, did "
                f"not pass the gate {first['gate']!r}: {first['difference']}; mend it and run "
                f"'qat bench kernels --only' with its name, --seed {first['seed']}"
            )


@dataclass(frozen=True)
class Gates:
    """What all kernels are measured with."""

    config: KernelsConfig
    seeds: Seeds
    clock: Clock
    rates: Roofline

    @property
    def runs_kernels(self) -> bool:
        """Whether kernels are compiled or interpreted here at all."""
        return self.clock.backend.records() or interprets()

    def judge(self, case: KernelCase) -> tuple[Row, Speed | None]:
        """The row of one kernel; behind the gate that it fails none is run."""
        size = case.size(work_of(self.config.shape))
        row: Row = {
            "kind": "kernel",
            "case": case.name,
            "shape": self.config.shape,
            "size": dict(size),
            "dtype": self.config.dtype_on(self.clock.backend),
            "seed": self.seeds.first,
            "counts": case.counts,
        }
        if self.runs_kernels:
            for gate in (compiles, is_correct):
                refusal = gate(case, self.seeds)
                if refusal:
                    return {**row, **refused(refusal)}, None
        self.clock.backend.free_memory()
        speed = measure(case, size, self.seeds, self.clock)
        refusal = is_fast(speed)
        status = "OK" if self.runs_kernels else "REFERENCE"
        verdict = refused(refusal) if refusal else {"status": status}
        return {**row, **numbers(speed, self.rates), **verdict}, speed

    def tuned(self, cases: list[KernelCase]) -> Iterator[Tuned]:
        """The best configurations of all that can be tuned."""
        for case in cases:
            if case.space is None:
                continue
            self.clock.backend.free_memory()
            size, keep = case.size(work_of(self.config.shape)), self.config.keep
            yield tune(case, size, seeds=self.seeds, clock=self.clock, keep=keep)


def refused(refusal: Refusal) -> Row:
    """A failed gate as a row holds it."""
    return {"status": "FAILED", "gate": refusal.gate, "difference": refusal.difference}


def interprets() -> bool:
    """Whether Triton was told to interpret its kernels, which needs no GPU."""
    if not HAS_TRITON:
        return False
    from triton import knobs

    return knobs.runtime.interpret


def run_kernels(
    config: KernelsConfig, out: Path | None, cases: list[KernelCase] | None = None
) -> KernelsReport:
    """Put `cases`, by default those that `config` names, through their gates.

    Raises:
        ConfigError: no such kernel, shape or device, or tuning without a GPU.
    """
    cases = cases_named(config.only) if cases is None else cases
    work_of(config.shape)
    backend = select(config.device)
    if config.tune and not backend.records():
        raise ConfigError(
            f"tune=True on {backend.name()}, expected a GPU: interpreted kernels have no speed; "
            "leave --tune out"
        )
    seed = secrets.randbits(31) if config.seed is None else config.seed
    with Results(out, environment(backend, config)) as results:
        rates = measure_roofline(backend, config.dtype_on(backend))
        seeds = Seeds(backend.device, seed, is_interpreted=not backend.records())
        gates = Gates(config, seeds, Clock(backend, config.repeats, config.limit_s), rates)
        rows = [*judged(gates, cases, results)]
        passed = [c for c, row in zip(cases, rows, strict=True) if row["status"] == "OK"]
        found = [*gates.tuned(passed)] if config.tune else []
        for each in found:
            results.add(**each.row())
        copy_gb_per_s, matmul_tflops = rates.copy_bytes / 1e9, rates.matmul_flops / 1e12
        results.finish(copy_gb_per_s=copy_gb_per_s, matmul_tflops=matmul_tflops)
    report = KernelsReport(results.path, rows, rates, note_on(backend), found)
    if config.figures is not None:
        record_figures(config.figures, report.figures(), results.environment)
    if found:
        facts = {name: results.environment[name] for name in TABLE_FACTS}
        path = tuned.table_path(backend.name())
        write_table(path, found, facts)
        write_atomically(results.path / path.name, path.read_text(encoding="utf-8"))
    return report


def judged(gates: Gates, cases: list[KernelCase], results: Results) -> Iterator[Row]:
    """A row for each case, written as it is found, the reference's own behind it."""
    for case in cases:
        tuned.forget_used()
        row, speed = gates.judge(case)
        row["configurations"] = tuned.used()
        results.add(**row)
        if speed:
            results.add(**reference_row(row, speed))
        logger.info("%s: %s", case.name, row["status"])
        yield row


def reference_row(row: Row, speed: Speed) -> Row:
    """The reference's own samples, as a case of its own."""
    same = {name: row[name] for name in ("shape", "size", "dtype", "seed")}
    name = f"{row['case']}, reference"
    return {"kind": "reference", "case": name, **same, **times(speed.reference_s)}


def note_on(backend: Backend) -> str:
    """What this device leaves out."""
    if backend.records():
        return ""
    if interprets():
        return "no GPU: kernels were interpreted, and the times are their references' alone"
    return "no GPU: kernels did not run, and the times are their references' alone"
