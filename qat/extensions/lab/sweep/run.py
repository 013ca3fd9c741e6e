"""`qat bench sweep`: runs groups of settings in turns and compares them in a table.

The unit of comparison is a repeat: its own process, represented by its median step. The variation
between repeats is noise of the machine, and is reported together with that between groups.
"""

import json
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from qat.backend.device import devices
from qat.backend.nvidia import gpu_samples
from qat.errors import ConfigError, TrainingError
from qat.extensions.bench.config import SweepConfig
from qat.extensions.bench.results import ROWS, TABLE, origin
from qat.extensions.bench.stats import Interval, median_interval, variation
from qat.extensions.lab.jobs import Ended, claimed, run_processes
from qat.extensions.lab.pages import markdown_table, write_comparison
from qat.extensions.lab.stats import MIN_SAMPLES, Difference, compare
from qat.extensions.lab.sweep import manifest
from qat.extensions.lab.sweep.plan import (
    SweepRecipe,
    SweepRun,
    make_groups,
    make_runs,
    read_sweep,
)
from qat.extensions.lab.sweep.telemetry import machine_warnings, read_samples, sampled_telemetry
from qat.extensions.lab.sweep.telemetry import summarise as summarise_telemetry
from qat.files import write_atomically
from qat.observe.charts import SERIES, Chart, fit_scale

HOME = Path("runs/sweep")
MANIFEST, PAGE, PICTURE = "manifest.json", "sweep.md", "sweep.svg"
NOISY = 0.12  # coefficient of variation of the steps in a run above which there is a warning
RATES = {
    "bench": "valid tokens a second",
    "train": "tokens a second",
    "command": "runs a second",
}
"""The unit of a rate, by verb."""

Row = dict[str, object]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepLine:
    """A group's line in the table."""

    group: str
    costs_s: tuple[float, ...]  # seconds per valid token of each repeat, or per run of a command
    failed: int
    cost: Interval | None  # the median over repeats; None if none finished
    between: float | None  # coefficient of variation between repeats; None for a single one
    within: float | None
    """Coefficient of variation of the steps in a run, median over runs; None if steps were not
    timed."""
    against: Difference | None
    """Difference from the baseline; None for the baseline, or if either has too few repeats."""
    step_s: float | None
    step_p90_s: float | None
    step_p99_s: float | None
    slowest_step: tuple[int, int, float] | None
    """Repeat, step and seconds of the slowest step; None if steps were not timed."""
    slowest_share: float | None
    """Fraction of a step that the slowest rank works; the rest is exchanges."""
    peak_gib: float | None  # peak memory of the rank that holds most, like the next field
    peak_reserved_gib: float | None
    slope_mib: float | None
    """Growth of memory per step, the largest of the repeats; None for too few steps."""
    warnings: tuple[str, ...]

    @property
    def is_ranked(self) -> bool:
        """True if it has enough repeats to be ranked."""
        return len(self.costs_s) >= MIN_SAMPLES

    @property
    def rate(self) -> float | None:
        """Valid tokens per second, or runs of a command per second."""
        return None if self.cost is None else 1 / self.cost.median


@dataclass(frozen=True)
class SweepReport:
    """The current results of a sweep."""

    path: Path
    recipe: SweepRecipe
    baseline: str
    runs: list[SweepRun]
    rows: list[Row]
    failures: list[Row]
    lines: list[SweepLine]

    @property
    def waiting(self) -> int:
        """Number of runs that have neither finished nor failed."""
        return len(self.runs) - len(self.rows) - len(self.failures)

    @property
    def fastest(self) -> SweepLine | None:
        """The first of the ranked groups; None if no group has enough repeats."""
        return next((line for line in self.lines if line.is_ranked), None)

    def check(self) -> None:
        """Raise TrainingError if a run failed.

        Raises:
            TrainingError: with the first failure.
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
    """Return the recipe and its runs in order.

    Raises:
        ConfigError: an error in the recipe.
    """
    found = read_sweep(recipe, tiny=config.tiny, changes=config.set)
    out = out or HOME / found.name
    return found, make_runs(found, make_groups(found), out, strict=config.strict)


def run_sweep(config: SweepConfig, recipe: Path, out: Path | None) -> SweepReport:
    """Run everything that has not finished in `out`; failed runs are part of the report.

    Raises:
        ConfigError: an error in the recipe, a program without --allow-command, or a directory of
            another sweep.
    """
    found, runs = plan_sweep(config, recipe, out)
    if found.verb == "command" and not config.allow_command:
        raise ConfigError(
            f"{recipe} runs the program {found.command[0]!r}, expected settings alone; read what "
            "it would do (--dry-run lists the runs), and if you trust it add --allow-command"
        )
    _check_devices(runs)
    place = runs[0].out
    with claimed(place) as lock:
        path, sessions = place / MANIFEST, []
        if path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            sessions = old.get("sessions", [])
            if old["name"] != found.name:
                raise ConfigError(
                    f"out={place} holds sweep {old['name']!r}, expected {found.name!r} or an empty "
                    "directory; choose another --out"
                )
        if not all(run.row.exists() for run in runs):
            sessions.append({**origin(), "recipe": str(recipe), "set": config.set})
        write = partial(write_results, found, runs, sessions)
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


def _check_devices(runs: Sequence[SweepRun]) -> None:
    for run in runs:
        found = devices(run.settings.get("device", "auto"))
        if len(found) < run.ranks and found[0].startswith("cuda"):
            raise ConfigError(
                f"group {run.group!r} has ranks={run.ranks}, but this machine has {len(found)} "
                "GPUs, expected one for each; lower ranks, or set device = 'cpu'"
            )


def run_all(
    runs: Sequence[SweepRun],
    lock: int,
    after_each: Callable[[], object],
    *,
    timeout_s: float,
    stop_on_error: bool,
    sample_s: float,
) -> None:
    """Run those without a row, one at a time; `after_each` is called after every run."""
    waiting = [run for run in runs if not run.row.exists()]
    if waiting and not gpu_samples():
        logger.warning("no NVIDIA driver answers: the GPU columns of telemetry stay empty")

    def begun(run: SweepRun, _busy: list[SweepRun]) -> SweepRun:
        run.failure.unlink(missing_ok=True)
        return run

    def ended(found: Ended) -> bool:
        has_failed = note_end(found, timeout_s)
        after_each()
        return not (has_failed and stop_on_error)

    run_processes(
        waiting,
        ended,
        progress=("runs", "runs"),
        placed=begun,
        watched=lambda run, pid: sampled_telemetry(pid, run.telemetry, sample_s),
        timeout_s=timeout_s,
        keep_open=(lock,),
    )


def note_end(ended: Ended, timeout_s: float) -> bool:
    """Record the failure of a run that left no row; return whether it failed."""
    run = ended.job
    if run.row.exists():
        logger.info("%s, repeat %d: done", run.group, run.repeat)
        return False
    message = ended.error_message
    if ended.is_late:
        message = f"no end after {timeout_s:g} s; stacks are in {run.log}"
    logger.warning("%s, repeat %d failed: %s", run.group, run.repeat, message)
    run.failure.parent.mkdir(parents=True, exist_ok=True)
    kind = "timeout" if ended.is_late else "failed"
    found = {"status": kind, "exit": ended.status, "message": message, "log": str(run.log)}
    write_atomically(run.failure, json.dumps(found) + "\n")
    return True


def write_results(
    recipe: SweepRecipe, runs: Sequence[SweepRun], sessions: Sequence[Row]
) -> SweepReport:
    """Write manifest, rows, table and picture, each atomically, from the files of the runs.

    Args:
        recipe: the recipe.
        runs: all of its runs.
        sessions: the origin of each command that ran some of them (`qat.extensions.bench.results`).
    """
    out, rows, failures, entries = runs[0].out, [], [], []
    for run in runs:
        status = "waiting"
        if run.row.exists():
            status, row = "done", json.loads(run.row.read_text(encoding="utf-8"))
            telemetry = summarise_telemetry(read_samples(run.telemetry))
            warnings = machine_warnings(telemetry)
            rows.append({**row, "telemetry": telemetry, "machine_warnings": warnings})
        elif run.failure.exists():
            found = json.loads(run.failure.read_text(encoding="utf-8"))
            status = found["status"]
            failures.append({"group": run.group, "repeat": run.repeat, **found})
        entries.append(manifest.entry(run, status))
    whole = {
        "format": manifest.FORMAT,
        "name": recipe.name,
        "devices": manifest.devices(rows),
        "sessions": sessions,
        "runs": entries,
    }
    write_atomically(out / MANIFEST, json.dumps(whole, indent=1) + "\n")
    groups = list(dict.fromkeys(run.group for run in runs))
    baseline = recipe.baseline or groups[0]
    lines = summarise(groups, rows, [each["group"] for each in failures], baseline)
    report = SweepReport(out, recipe, baseline, list(runs), rows, failures, lines)
    picture = chart(lines, RATES[recipe.verb])
    write_comparison(
        out,
        rows,
        page=(PAGE, page(report, whole)),
        whole={
            "sessions": sessions,
            "recipe": recipe.model_dump(mode="json"),
            "baseline": baseline,
            "lines": [asdict(line) for line in lines],
            "failures": failures,
        },
        pictures={} if picture is None else {PICTURE: picture},
    )
    return report


def summarise(
    groups: Sequence[str], rows: Sequence[Row], failed: Sequence[str], baseline: str
) -> list[SweepLine]:
    """Return a line per group: ranked ones first, fastest on top; then the others in order.

    Args:
        failed: the group of each run that failed.
    """
    by_group = {name: [row for row in rows if row["group"] == name] for name in groups}
    base = [row["cost_s"] for row in by_group[baseline]]
    lines = [
        _line(name, found, failed.count(name), None if name == baseline else base)
        for name, found in by_group.items()
    ]
    ranked = sorted((line for line in lines if line.is_ranked), key=lambda line: line.cost.median)
    return [*ranked, *(line for line in lines if not line.is_ranked)]


def spreads(lines: Sequence[SweepLine]) -> tuple[float | None, float | None]:
    """Return the spread of the machine and of the settings; None if there are too few runs.

    The first is the median variation between repeats of a group, the second the variation between
    the medians of ranked groups.
    """
    between = [line.between for line in lines if line.between is not None]
    medians = [line.cost.median for line in lines if line.is_ranked]
    machine = statistics.median(between) if between else None
    return machine, variation(medians) if len(medians) > 1 else None


def cells(lines: Sequence[SweepLine]) -> tuple[list[str], list[list[str]]]:
    """Return headings and the cells of each line."""
    headings = ["group", "rank", "repeats", "rate", "95 % low", "high", "between repeats"]
    headings += ["within a run", "x baseline", "effect", "p", "verdict"]
    headings += ["step s", "p90 s", "p99 s", "max s", "at", "slowest rank", "GiB", "reserved"]
    headings += ["MiB/step"]

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    body = []
    for place, line in enumerate(lines, 1):
        found, late = line.against, line.slowest_step
        cost = line.cost if len(line.costs_s) > 1 else None  # one run has no interval
        done, all_runs = len(line.costs_s), len(line.costs_s) + line.failed
        body.append(
            [
                line.group,
                str(place) if line.is_ranked else "-",
                str(done) if done == all_runs else f"{done} of {all_runs}",
                shown(line.rate, "{:,.4g}"),
                shown(cost and 1 / cost.high, "{:,.4g}"),
                shown(cost and 1 / cost.low, "{:,.4g}"),
                shown(line.between, "{:.1%}"),
                shown(line.within, "{:.1%}"),
                shown(found and 1 / found.ratio, "{:.3f}"),
                shown(found and -found.effect, "{:+.2f}"),
                shown(found and found.p, "{:.3f}"),
                found.verdict if found else "-",
                shown(line.step_s, "{:.4g}"),
                shown(line.step_p90_s, "{:.4g}"),
                shown(line.step_p99_s, "{:.4g}"),
                shown(late and late[2], "{:.4g}"),
                f"repeat {late[0]}, step {late[1]}" if late else "-",
                shown(line.slowest_share, "{:.1%}"),
                shown(line.peak_gib, "{:.2f}"),
                shown(line.peak_reserved_gib, "{:.2f}"),
                shown(line.slope_mib, "{:+.3f}"),
            ]
        )
    return headings, body


def page(report: SweepReport, about: Row) -> str:
    """Return the page: the table with all that is needed to read it alone.

    `about` is the content of the manifest.
    """
    recipe, lines = report.recipe, report.lines
    what = f"student {recipe.student}" if recipe.student else f"`{' '.join(recipe.command)}`"
    times = "1 run" if recipe.repeats == 1 else f"{recipe.repeats} repeats"
    words = [
        f"# {recipe.name}",
        f"`{recipe.verb}` of {what}; {times} of each group in turns, each a "
        f"process of its own. Rate: {RATES[recipe.verb]}, the median over repeats, and its 95 % "
        "bootstrap interval. Between repeats, within a run: coefficients of variation. x baseline, "
        "effect (Cliff's delta, + is faster), p (Mann-Whitney) and verdict: against "
        f"{report.baseline!r}; a verdict needs 3 % and intervals apart.",
        markdown_table(*cells(lines)).rstrip(),
    ]
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
    if routes := routes_taken(report.rows):
        words.append(f"Sparse attention ran as {', '.join(routes)}.")
    for name in ("commit", "device", "host", "torch", "triton"):
        values = sorted({str(row[name]) for row in report.rows if row.get(name) is not None})
        if len(values) > 1:
            words.append(f"Runs differ in {name}: {', '.join(values)}; do not compare them.")
    words += [f"Failed: {each['group']}: {each['message']}" for each in report.failures]
    if report.waiting:
        words.append(f"{report.waiting} runs have not run yet.")
    words += ["## Settings", *manifest.settings_table(report.runs)]
    words += ["## Origin", *manifest.session_lines(about["sessions"], report.rows)]
    words += ["## Files", manifest.files_table(about["runs"])]
    words.append(f"All rows: [{TABLE}]({TABLE}), [{ROWS}]({ROWS}); [{MANIFEST}]({MANIFEST}).")
    return "\n\n".join(words) + "\n"


def routes_taken(rows: Sequence[Row]) -> list[str]:
    """Return the implementation of sparse attention that each group ran, `gather (GROUP)`."""
    ran = ((row.get("effective", {}).get("route"), row["group"]) for row in rows)
    return sorted({f"{route} ({group})" for route, group in ran if route})


def chart(lines: Sequence[SweepLine], unit: str) -> bytes | None:
    """Draw each group's rate as SVG, the first on top: repeats as dots, the interval as a bar.

    None if no group finished a run.
    """
    drawn = [line for line in lines if line.costs_s]
    if not drawn:
        return None
    return Chart("sweep", "", "", partial(_paint, lines=drawn, unit=unit)).render("svg")


def _paint(axes: Axes, *, lines: Sequence[SweepLine], unit: str) -> None:
    for height, line in enumerate(reversed(lines)):
        color = SERIES[0] if line.is_ranked else SERIES[1]
        rates = [1 / cost for cost in line.costs_s]
        if line.is_ranked:
            axes.plot(
                [1 / line.cost.high, 1 / line.cost.low], [height] * 2, color=color, lw=5, alpha=0.3
            )
        axes.plot(rates, [height] * len(rates), "o", color=color, markersize=4)
    axes.set_yticks(range(len(lines)), [line.group for line in reversed(lines)], fontsize=7)
    fit_scale(axes.xaxis, [1 / cost for line in lines for cost in line.costs_s])
    axes.set_xlabel(unit)
    axes.margins(0.08)


def _line(group: str, rows: Sequence[Row], failed: int, base: Sequence[float] | None) -> SweepLine:
    costs = [row["cost_s"] for row in rows]
    enough = base is not None and min(len(base), len(costs)) >= MIN_SAMPLES
    within = [variation(row["samples"]) for row in rows if len(row["samples"]) > 1]
    late = [(row["repeat"], *row["slowest_steps"][0]) for row in rows if row.get("slowest_steps")]
    slopes = [row["memory_trend"]["slope_mib"] for row in rows if row.get("memory_trend")]

    def middle(name: str) -> float | None:
        known = [row[name] for row in rows if row.get(name) is not None]
        return statistics.median(known) if known else None

    return SweepLine(
        group=group,
        costs_s=tuple(costs),
        failed=failed,
        cost=median_interval(costs) if costs else None,
        between=variation(costs) if len(costs) > 1 else None,
        within=statistics.median(within) if within else None,
        against=compare(base, costs) if enough else None,
        step_s=middle("step_s"),
        step_p90_s=middle("step_p90_s"),
        step_p99_s=middle("step_p99_s"),
        slowest_step=max(late, key=lambda each: each[2], default=None),
        slowest_share=middle("slowest_share"),
        peak_gib=middle("peak_gib"),
        peak_reserved_gib=middle("peak_reserved_gib"),
        slope_mib=max(slopes, default=None),
        warnings=tuple(dict.fromkeys(word for row in rows for word in _warnings(row))),
    )


def _warnings(row: Row) -> list[str]:
    found = [*row.get("machine_warnings", ()), *row.get("fallbacks", ())]
    if len(row["samples"]) > 1 and variation(row["samples"]) > NOISY:
        found.append(f"steps of a run vary by more than {NOISY:.0%}")
    if row.get("is_leaking"):
        found.append(f"memory grows by {row['memory_trend']['slope_mib']:.3g} MiB a step")
    return found
