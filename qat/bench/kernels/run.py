"""`qat bench kernels`: every kernel through its gates, and a row of results for each."""

import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

from qat.backend import Backend, select
from qat.bench.config import KernelsConfig
from qat.bench.kernels.case import Case
from qat.bench.kernels.cases import cases_named, work_of
from qat.bench.kernels.gates import Refusal, Seeds, compiles, is_correct
from qat.bench.kernels.speed import Clock, Row, Speed, is_fast, measure, numbers, times
from qat.bench.results import Results, environment
from qat.bench.roofline import Roofline, measure_roofline
from qat.errors import BenchError
from qat.kernels.dispatch import HAS_TRITON

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelsReport:
    """What the gates found, for whoever shows it."""

    path: Path
    rows: list[Row]
    """One a kernel."""
    rates: Roofline
    note: str
    """What could not be asked of this device."""

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

    def judge(self, case: Case) -> tuple[Row, Speed | None]:
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
    config: KernelsConfig, out: Path | None, cases: list[Case] | None = None
) -> KernelsReport:
    """Put `cases`, by default those that `config` names, through their gates.

    Raises:
        ConfigError: no such kernel, shape or device.
    """
    cases = cases_named(config.only) if cases is None else cases
    work_of(config.shape)
    backend = select(config.device)
    seed = secrets.randbits(31) if config.seed is None else config.seed
    with Results(out, environment(backend, config)) as results:
        rates = measure_roofline(backend, config.dtype_on(backend))
        is_interpreted = not backend.records()
        seeds = Seeds(backend.device, seed, is_interpreted=is_interpreted)
        clock = Clock(backend, config.repeats, config.limit_s)
        gates, rows = Gates(config, seeds, clock, rates), []
        for case in cases:
            row, speed = gates.judge(case)
            rows.append(row)
            results.add(**row)
            if speed and speed.kernel_s:
                results.add(**reference_row(row, speed))
            logger.info("%s: %s", case.name, row["status"])
        results.finish(
            copy_gb_per_s=rates.copy_bytes / 1e9, matmul_tflops=rates.matmul_flops / 1e12
        )
    return KernelsReport(results.path, rows, rates, note_on(backend))


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
