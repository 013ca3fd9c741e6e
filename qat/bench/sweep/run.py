"""`qat bench sweep`: groups of settings in turns, and a table that says what they differ by."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from qat.bench.results import ROWS, WHOLE
from qat.bench.stats import MIN_SAMPLES
from qat.bench.sweep.drive import claimed, run_all
from qat.bench.sweep.plan import Run, SweepConfig, SweepRecipe, make_groups, make_runs, read_recipe
from qat.bench.sweep.table import Line, Row, chart, markdown, spreads, summarise
from qat.bench.sweep.telemetry import machine_warnings, read_samples
from qat.bench.sweep.telemetry import summarise as summarise_telemetry
from qat.errors import ConfigError, TrainingError
from qat.files import write_atomically

HOME = Path("runs/sweep")
MANIFEST, PAGE, PICTURE = "manifest.json", "sweep.md", "sweep.svg"
WAITING, DONE = "waiting", "done"


@dataclass(frozen=True)
class SweepReport:
    """What a sweep found so far."""

    path: Path
    recipe: SweepRecipe
    baseline: str
    runs: list[Run]
    rows: list[Row]
    failures: list[Row]
    lines: list[Line]

    @property
    def waiting(self) -> int:
        """Runs that have neither finished nor failed."""
        return len(self.runs) - len(self.rows) - len(self.failures)

    @property
    def fastest(self) -> Line | None:
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
) -> tuple[SweepRecipe, list[Run]]:
    """The recipe, and its runs in order.

    Raises:
        ConfigError: a mistake in the recipe.
    """
    found = read_recipe(recipe, tiny=config.tiny)
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


def write_results(recipe: SweepRecipe, runs: Sequence[Run]) -> SweepReport:
    """Write manifest, rows, table and picture, each whole, from what the runs have left."""
    out = runs[0].out
    rows = [_row(run) for run in runs if run.row.exists()]
    failures = [_failure(run) for run in runs if _status(run) not in (DONE, WAITING)]
    groups = list(dict.fromkeys(run.group for run in runs))
    baseline = recipe.baseline or groups[0]
    lines = summarise(groups, rows, [each["group"] for each in failures], baseline)
    report = SweepReport(out, recipe, baseline, list(runs), rows, failures, lines)
    write_atomically(out / MANIFEST, manifest(recipe, runs))
    write_atomically(out / ROWS, "".join(json.dumps(row) + "\n" for row in rows))
    write_atomically(out / PAGE, page(report))
    whole = {
        "recipe": recipe.model_dump(mode="json"),
        "baseline": baseline,
        "lines": [asdict(line) for line in lines],
        "failures": failures,
        "rows": rows,
    }
    write_atomically(out / WHOLE, json.dumps(whole, indent=1) + "\n")
    picture = chart(lines, rate_unit(recipe))
    if picture is not None:
        write_atomically(out / PICTURE, picture.decode())
    return report


def manifest(recipe: SweepRecipe, runs: Sequence[Run]) -> str:
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


def _status(run: Run) -> str:
    if run.row.exists():
        return DONE
    if run.failure.exists():
        return json.loads(run.failure.read_text(encoding="utf-8"))["status"]
    return WAITING


def _row(run: Run) -> Row:
    row = json.loads(run.row.read_text(encoding="utf-8"))
    telemetry = summarise_telemetry(read_samples(run.telemetry))
    return {**row, "telemetry": telemetry, "machine_warnings": machine_warnings(telemetry)}


def _failure(run: Run) -> Row:
    found = json.loads(run.failure.read_text(encoding="utf-8"))
    return {"group": run.group, "repeat": run.repeat, **found}
