"""`qat bench sweep`: groups of settings in turns, and a table that says what they differ by."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from qat.bench.jobs import Ended, claimed, run_processes
from qat.bench.results import write_comparison
from qat.bench.stats import MIN_SAMPLES
from qat.bench.sweep.plan import (
    SweepConfig,
    SweepRecipe,
    SweepRun,
    make_groups,
    make_runs,
    read_sweep,
)
from qat.bench.sweep.table import Row, SweepLine, chart, markdown, spreads, summarise
from qat.bench.sweep.telemetry import Watch, has_gpu_tool, machine_warnings, read_samples
from qat.bench.sweep.telemetry import summarise as summarise_telemetry
from qat.errors import ConfigError, TrainingError
from qat.files import write_atomically
from qat.logs import progress

HOME = Path("runs/sweep")
MANIFEST, PAGE, PICTURE = "manifest.json", "sweep.md", "sweep.svg"
WAITING, DONE = "waiting", "done"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepReport:
    """What a sweep found so far."""

    path: Path
    recipe: SweepRecipe
    baseline: str
    runs: list[SweepRun]
    rows: list[Row]
    failures: list[Row]
    lines: list[SweepLine]

    @property
    def waiting(self) -> int:
        """Runs that have neither finished nor failed."""
        return len(self.runs) - len(self.rows) - len(self.failures)

    @property
    def fastest(self) -> SweepLine | None:
        """The first of the ranked groups; None where repeats are too few to rank any."""
        return next((line for line in self.lines if line.is_ranked), None)

    def check(self) -> None:
        """Make sure that every run finished.

        Raises:
            TrainingError: one did not.
        """
        if self.failures:
            first = self.failures[0]
            raise TrainingError(
                f"{len(self.failures)} of {len(self.runs)} runs failed, expected none; the first, "
                f"{first['group']!r}, said {first['message']!r}; see {first['log']}, mend it and "
                "run the same command again"
            )


def plan_sweep(
    config: SweepConfig, recipe: Path, out: Path | None
) -> tuple[SweepRecipe, list[SweepRun]]:
    """The recipe, and its runs in order.

    Raises:
        ConfigError: a mistake in the recipe.
    """
    found = read_sweep(recipe, tiny=config.tiny)
    out = out or HOME / found.name
    return found, make_runs(found, make_groups(found), out, strict=config.strict)


def run_sweep(config: SweepConfig, recipe: Path, out: Path | None) -> SweepReport:
    """Run all that has not finished in `out`; a run that fails is part of the report.

    Raises:
        ConfigError: a mistake in the recipe, a program that nobody allowed, or a directory of
            another sweep.
    """
    found, runs = plan_sweep(config, recipe, out)
    if found.verb == "command" and not config.allow_command:
        raise ConfigError(
            f"{recipe} runs the program {found.command[0]!r}, expected settings alone; read what "
            "it would do (--dry-run lists the runs), and if you trust it add --allow-command"
        )
    place = runs[0].out
    with claimed(place) as lock:
        _check_place(place, found)
        write = partial(write_results, found, runs)
        write()
        run_all(
            runs,
            lock,
            write,
            timeout_s=found.timeout_s,
            stop_on_error=found.stop_on_error,
            sample_s=config.sample_s,
        )
        return write()


def run_all(
    runs: Sequence[SweepRun],
    lock: int,
    after_each: Callable[[], object],
    *,
    timeout_s: float,
    stop_on_error: bool,
    sample_s: float,
) -> None:
    """Run those that have no row yet, each alone; `after_each` is called when one has ended."""
    waiting = [run for run in runs if not run.row.exists()]
    with_gpu = bool(waiting) and has_gpu_tool()

    def begun(run: SweepRun, _busy: list[SweepRun]) -> SweepRun:
        run.failure.unlink(missing_ok=True)
        return run

    def watched(run: SweepRun, pid: int) -> Watch:
        return Watch(pid, run.telemetry, sample_s, with_gpu=with_gpu)

    with progress("runs", len(waiting), "runs") as ticker:

        def ended(found: Ended) -> bool:
            has_failed = note_end(found, timeout_s)
            after_each()
            ticker.advance()
            return not (has_failed and stop_on_error)

        run_processes(
            waiting,
            "qat.bench.sweep.job",
            ended,
            placed=begun,
            watched=watched,
            timeout_s=timeout_s,
            keep_open=(lock,),
        )


def note_end(ended: Ended, timeout_s: float) -> bool:
    """Write the failure of a run that has left no row; whether it has failed."""
    run = ended.job
    if ended.has_row:
        logger.info("%s, repeat %d: done", run.group, run.repeat)
        return False
    message = ended.last_words
    if ended.is_late:
        message = f"no end after {timeout_s:g} s; stacks are in {run.log}"
    logger.warning("%s, repeat %d failed: %s", run.group, run.repeat, message)
    run.failure.parent.mkdir(parents=True, exist_ok=True)
    kind = "timeout" if ended.is_late else "failed"
    found = {"status": kind, "exit": ended.status, "message": message, "log": str(run.log)}
    write_atomically(run.failure, json.dumps(found) + "\n")
    return True


def write_results(recipe: SweepRecipe, runs: Sequence[SweepRun]) -> SweepReport:
    """Write manifest, rows, table and picture, each whole, from what the runs have left."""
    out = runs[0].out
    rows = [_row(run) for run in runs if run.row.exists()]
    failures = [_failure(run) for run in runs if _status(run) not in (DONE, WAITING)]
    groups = list(dict.fromkeys(run.group for run in runs))
    baseline = recipe.baseline or groups[0]
    lines = summarise(groups, rows, [each["group"] for each in failures], baseline)
    report = SweepReport(out, recipe, baseline, list(runs), rows, failures, lines)
    write_atomically(out / MANIFEST, manifest(recipe, runs))
    picture = chart(lines, rate_unit(recipe))
    write_comparison(
        out,
        rows,
        page=(PAGE, page(report)),
        whole={
            "recipe": recipe.model_dump(mode="json"),
            "baseline": baseline,
            "lines": [asdict(line) for line in lines],
            "failures": failures,
        },
        pictures={} if picture is None else {PICTURE: picture},
    )
    return report


def manifest(recipe: SweepRecipe, runs: Sequence[SweepRun]) -> str:
    """What the sweep consists of and what of it is done: the same however often it was stopped."""
    entries = [
        {"label": run.label, "group": run.group, "repeat": run.repeat, "status": _status(run)}
        for run in runs
    ]
    return json.dumps({"format": 1, "name": recipe.name, "runs": entries}, indent=1) + "\n"


def page(report: SweepReport) -> str:
    """The table with what it takes to read it alone."""
    recipe, lines = report.recipe, report.lines
    words = [f"# {recipe.name}", _intro(report), markdown(lines).rstrip()]
    unranked = [line.group for line in lines if not line.is_ranked]
    if unranked:
        words.append(
            f"Not ranked, for fewer than {MIN_SAMPLES} finished repeats: {', '.join(unranked)}."
        )
    machine, settings = spreads(lines)
    if machine is not None and settings is not None:
        larger = "of the settings" if settings > machine else "of the machine"
        words.append(
            f"Spread of the machine (between repeats of a group, median): {machine:.1%}; of the "
            f"settings (between medians of ranked groups): {settings:.1%}. That {larger} "
            "is larger."
        )
    words += [f"{line.group}: {word}." for line in lines for word in line.warnings]
    words += [f"{word}." for word in place_warnings(report.rows)]
    words += [f"Failed: {each['group']}: {each['message']}" for each in report.failures]
    if report.waiting:
        words.append(f"{report.waiting} runs have not run yet.")
    return "\n\n".join(words) + "\n"


def place_warnings(rows: Sequence[Row]) -> list[str]:
    """What runs of one sweep should have in common and do not, in words."""
    found = []
    for name in ("commit", "device", "host", "torch", "triton"):
        values = {str(row[name]) for row in rows if row.get(name) is not None}
        if len(values) > 1:
            found.append(f"Runs differ in {name}: {', '.join(sorted(values))}; do not compare them")
    return found


def rate_unit(recipe: SweepRecipe) -> str:
    """What a rate counts."""
    return {
        "bench": "valid tokens a second",
        "train": "tokens a second",
        "command": "runs a second",
    }[recipe.verb]


def _intro(report: SweepReport) -> str:
    recipe = report.recipe
    what = f"student {recipe.student}" if recipe.student else f"`{' '.join(recipe.command)}`"
    return (
        f"`{recipe.verb}` of {what}; {recipe.repeats} repeats of each group in turns, each a "
        f"process of its own. Rate: {rate_unit(recipe)}, the median over repeats, and its 95 % "
        "bootstrap interval. Between repeats, within a run: coefficients of variation. x baseline, "
        "effect (Cliff's delta, + is faster), p (Mann-Whitney) and verdict: against "
        f"{report.baseline!r}; a verdict needs 3 % and intervals apart."
    )


def _check_place(out: Path, recipe: SweepRecipe) -> None:
    file = out / MANIFEST
    name = json.loads(file.read_text(encoding="utf-8"))["name"] if file.exists() else recipe.name
    if name != recipe.name:
        raise ConfigError(
            f"out={out} holds sweep {name!r}, expected {recipe.name!r} or an empty directory; "
            "choose another --out"
        )


def _status(run: SweepRun) -> str:
    if run.row.exists():
        return DONE
    if run.failure.exists():
        return json.loads(run.failure.read_text(encoding="utf-8"))["status"]
    return WAITING


def _row(run: SweepRun) -> Row:
    row = json.loads(run.row.read_text(encoding="utf-8"))
    telemetry = summarise_telemetry(read_samples(run.telemetry))
    return {**row, "telemetry": telemetry, "machine_warnings": machine_warnings(telemetry)}


def _failure(run: SweepRun) -> Row:
    found = json.loads(run.failure.read_text(encoding="utf-8"))
    return {"group": run.group, "repeat": run.repeat, **found}
