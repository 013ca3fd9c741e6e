"""`qat bench kernels`: runs every kernel through its gates and writes a row of results for each."""

import json
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from qat.backend.base import Backend
from qat.backend.device import select
from qat.errors import BenchError, ConfigError
from qat.extensions.bench.measure import Clock, Roofline, Row, kernel_dtype, measure_roofline, times
from qat.extensions.bench.results import Results, environment
from qat.extensions.lab.config import KernelsConfig
from qat.extensions.lab.kernels.cases import cases_named, token_cases, work_of
from qat.extensions.lab.kernels.counters import counters, program
from qat.extensions.lab.kernels.gates import (
    KernelCase,
    Seeds,
    Speed,
    compiles,
    is_correct,
    is_fast,
    is_lean,
    measure,
    numbers,
)
from qat.extensions.lab.kernels.token_tiles import TunedToken, token_of, tune_token
from qat.extensions.lab.kernels.tune import Tuned, tune, write_entries, write_table
from qat.files import write_atomically
from qat.kernels import tuned
from qat.kernels.dispatch import HAS_TRITON

logger = logging.getLogger(__name__)

TABLE_FACTS = ("device", "commit", "torch", "triton")
"""Facts about the environment that a table of tuned configurations records."""


@dataclass(frozen=True)
class KernelsReport:
    """The results of the gates, for printing."""

    path: Path
    rows: list[Row]  # one row per kernel
    rates: Roofline
    note: str  # a note about what could not be measured on this device; empty on a GPU
    tuned: list[Tuned]  # empty without `tune`
    token: TunedToken | None = None  # None if no linear of a token was tuned

    def figures(self) -> list[Row]:
        """Return the figures that this run provides, each with its goal."""
        share = self.least and self.least["roofline_frac"]
        found = (
            ("kernel_roofline_min", share, "of the roofline", ">= 0.8"),
            ("autotune_worst_ratio", self.worst_ratio, "x the default", ">= 1.0"),
            ("autotune_token_ratio", self.token and self.token.ratio, "x the default", ">= 1.0"),
        )
        return [
            {"figure": name, "value": round(value, 3), "unit": unit, "goal": goal}
            for name, value, unit, goal in found
            if value is not None
        ]

    @property
    def worst_ratio(self) -> float | None:
        """The least speed of a tuned kernel relative to its default; None without tuning."""
        return min((each.ratio for each in self.tuned), default=None)

    @property
    def least(self) -> Row | None:
        """The row of the kernel furthest from the roofline, among those that count."""
        counted = [row for row in self.rows if row["counts"] and "roofline_frac" in row]
        return min(counted, key=lambda row: row["roofline_frac"]) if counted else None

    def check(self) -> None:
        """Raise BenchError if a kernel failed.

        Raises:
            BenchError: naming the first one that failed.
        """
        failed = [row for row in self.rows if row["status"] == "FAILED"]
        if failed:
            first = failed[0]
            raise BenchError(
                f"{len(failed)} kernels failed, expected none; the first, {first['case']!r}, did "
                f"not pass the gate {first['gate']!r}: {first['difference']}; mend it and run "
                f"'qat bench kernels --only' with its name, --seed {first['seed']}"
            )


def record_figures(path: Path, found: list[Row], environment: dict[str, object]) -> None:
    """Append figures to `path`, one per line, with command, commit and device."""
    common = {name: environment[name] for name in ("command", "commit", "device")}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for figure in found:
            file.write(json.dumps({**figure, **common, "runs": 1, "spread": None}) + "\n")


def judge(
    case: KernelCase, config: KernelsConfig, seeds: Seeds, clock: Clock, *, rates: Roofline
) -> tuple[Row, Speed | None]:
    """Return the row of one kernel; a failed gate skips the remaining ones."""
    backend = clock.backend
    runs_kernels = backend.records or interprets()
    size = case.size(work_of(str(config.shape)))
    row: Row = {
        "kind": "kernel",
        "case": case.name,
        "shape": config.shape,
        "size": dict(size),
        "dtype": kernel_dtype(backend),
        "seed": seeds.first,
        "counts": case.counts,
    }
    for gate in (compiles, is_correct) if runs_kernels else ():
        refusal = gate(case, seeds)
        if refusal:
            return {**row, "status": "FAILED", **asdict(refusal)}, None
    backend.free_memory()
    speed = measure(case, size, seeds, clock)
    row |= numbers(speed, rates)
    refusal = is_lean(speed) or is_fast(speed)
    if refusal:
        return {**row, "status": "FAILED", **asdict(refusal)}, speed
    return {**row, "status": "OK" if runs_kernels else "REFERENCE"}, speed


def interprets() -> bool:
    """Return whether Triton interprets its kernels, which needs no GPU."""
    if not HAS_TRITON:
        return False
    from triton import knobs

    return knobs.runtime.interpret


def note_on(backend: Backend, config: KernelsConfig, rows: Sequence[Row] = ()) -> str:
    """Return what could not be measured here, "" if all was."""
    how = "were interpreted" if interprets() else "did not run"
    alone = f"no GPU: kernels {how}, and the times are their references' alone"
    absent = "ncu is not installed: there are no counters, fractions are of the roofline"
    is_absent = config.ncu and program() is None
    refused = [f"ncu: {row['ncu_error']}" for row in rows if "ncu_error" in row][:1]
    return "; ".join([alone] * (not backend.records) + [absent] * is_absent + refused)


def run_kernels(
    config: KernelsConfig, out: Path | None, cases: list[KernelCase] | None = None
) -> KernelsReport:
    """Run `cases`, by default those that `config` names, through their gates.

    Raises:
        ConfigError: there is no such kernel, shape or device, or tuning without a GPU.
    """
    cases = selected(config) if cases is None else cases
    backend = select(config.device)
    shape = config.shape or ("qwen3-0.6b" if backend.records else "tiny")
    config = config.model_copy(update={"shape": shape})
    work_of(shape)  # a mistake in it is told before the directory is made
    if config.tune and not backend.records:
        raise ConfigError(
            f"tune={config.tune} on {backend.name()}, expected a GPU: interpreted kernels have no "
            "speed; leave --tune out"
        )
    seed = secrets.randbits(31) if config.seed is None else config.seed
    rows: list[Row] = []
    found: list[Tuned] = []
    with Results(out, environment(backend, config)) as results:
        rates = measure_roofline(backend, kernel_dtype(backend))
        seeds = Seeds(backend.device, seed, is_interpreted=not backend.records)
        clock = Clock(backend, config.repeats, config.limit_s)
        for case in cases:
            tuned.forget_used()
            row, speed = judge(case, config, seeds, clock, rates=rates)
            row |= counters(case.name, config, speed)
            row["configurations"] = tuned.used()
            results.add(**row)
            if speed:  # the samples of the reference, as a case of its own
                same = {name: row[name] for name in ("shape", "size", "dtype", "seed")}
                of_reference = {**same, **times(speed.reference_s)}
                results.add(kind="reference", case=f"{case.name}, reference", **of_reference)
            logger.info("%s: %s", case.name, row["status"])
            rows.append(row)
        if config.tune:
            passed = [c for c, row in zip(cases, rows, strict=True) if row["status"] == "OK"]
            for each in tune_alone(passed, config, seeds, clock):
                results.add(**each.row())  # at once: a later kernel or the token may fail
                found.append(each)
        token = tune_within_token(found, config, clock)
        if token is not None:
            results.add(**token.row())
        results.finish(
            copy_gb_per_s=rates.copy_bytes / 1e9, matmul_tflops=rates.matmul_flops / 1e12
        )
    note = note_on(backend, config, rows)
    report = KernelsReport(results.path, rows, rates, note, found, token)
    if config.figures is not None:
        record_figures(config.figures, report.figures(), results.environment)
    if found:
        write_found(report, tuned.table_path(backend.name()), results.environment)
    return report


def selected(config: KernelsConfig) -> list[KernelCase]:
    """Return the cases that are named; only the linears of a token if those alone are tuned.

    Raises:
        ConfigError: a token is to be tuned, and none of its linears is named.
    """
    cases = cases_named(config.only)
    if config.tune != "token":
        return cases
    of_token = [case.name for case in token_cases()]
    cases = [case for case in cases if case.name in of_token]
    if not cases:
        raise ConfigError(
            f"tune=token, but only={config.only} selects no linear of a token, expected one of "
            f"{'; '.join(of_token)}; leave --only out"
        )
    return cases


def tune_alone(
    cases: list[KernelCase], config: KernelsConfig, seeds: Seeds, clock: Clock
) -> Iterator[Tuned]:
    """Tune each kernel by itself."""
    work = work_of(str(config.shape))
    for case in cases:
        if case.space is not None:
            clock.backend.free_memory()
            size = case.size(work)
            yield tune(case, size, seeds=seeds, clock=clock, keep=config.keep)


def tune_within_token(found: list[Tuned], config: KernelsConfig, clock: Clock) -> TunedToken | None:
    """Choose among the tiles of a token's linears in `found`; None if there are none."""
    of_token = {case.name for case in token_cases()}
    linears = [each for each in found if each.case in of_token]
    if not linears:
        return None
    clock.backend.free_memory()
    shape = str(config.shape)
    token = token_of(shape, config.device)
    if token is None:
        logger.info("%s: no kernels for its token; its linears were tuned alone", shape)
        return None
    return tune_token(shape, token, linears, clock)


def write_found(report: KernelsReport, table: Path, environment: dict[str, object]) -> None:
    """Write what tuning found into a device's table, and that table into the results."""
    facts = {name: environment[name] for name in TABLE_FACTS}
    write_table(table, report.tuned, facts)
    if report.token is not None:
        write_entries(table, report.token.entries(), facts)
    write_atomically(report.path / table.name, table.read_text(encoding="utf-8"))
