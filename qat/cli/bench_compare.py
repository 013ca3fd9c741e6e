"""`qat bench sweep`, `compare` and `record`: what settings differ by, and results that stay."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from qat.bench.config import SweepConfig
from qat.cli.parser import print_result
from qat.cli.tables import numbers_table, wide_console

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from qat.bench.stats import Interval
    from qat.extensions.lab.compare import Comparison, Pair


# `qat bench sweep`: what settings differ by, beyond what the machine does.

SWEEP_WIDTH = 240


def sweep(
    recipe: Path,
    /,
    *,
    config: Annotated[SweepConfig, Parameter(name="*")] = SweepConfig(),  # noqa: B008 - frozen
    out: Path | None = None,
) -> dict[str, object]:
    """Run the groups of RECIPE in turns, each repeat a process of its own, and compare them.

    The same command again goes on where it stopped.

    Args:
        recipe: TOML file, such as speedrun/recipes/sweep_runbook.toml.
        config: settings.
        out: directory for rows, logs and results; by default runs/sweep/NAME of the recipe.
    """
    from qat.bench.sweep.plan import read_sweep

    read_sweep(recipe, tiny=config.tiny)
    from qat.bench.sweep.run import RATES, cells, plan_sweep, run_sweep

    console = wide_console(SWEEP_WIDTH)
    if config.dry_run:
        _, runs = plan_sweep(config, recipe, out)
        for run in runs:
            console.print(f"{run.repeat}  {run.group}", markup=False, highlight=False)
        return dict(out=runs[0].out, runs=len(runs))
    report = run_sweep(config, recipe, out)
    title = f"Rate: {RATES[report.recipe.verb]}; against {report.baseline!r}"
    console.print(numbers_table(*cells(report.lines), title))
    for line in report.lines:
        for word in line.warnings:
            console.print(f"{line.group}: {word}", markup=False, highlight=False)
    report.check()
    fastest = report.fastest
    found = dict(out=report.path, runs=len(report.runs), done=len(report.rows))
    return found if fastest is None else {**found, "fastest": fastest.group, "rate": fastest.rate}


UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "ns"))
WIDTH = 150


def compare(
    before: Path,
    after: Path,
    /,
    *,
    threshold: Annotated[float, Parameter(validator=Number(gte=0))] = 0.03,
) -> None:
    """Compare AFTER with BEFORE case by case; exit 0 same or faster, 1 slower, 2 not comparable.

    A case is slower if its median is by more than the threshold and the 95 % intervals of both
    medians share nothing.

    Args:
        before: results.jsonl, a directory of results, or a record.
        after: the same of what is judged.
        threshold: share of the first median that a difference must exceed.
    """
    from qat.extensions.lab.compare import compare_files

    found = compare_files(before, after, threshold)
    console = wide_console(WIDTH)
    console.print(comparison_table(found))
    for line in remarks(found):
        console.print(line, markup=False, highlight=False)
    print_result(summary(found))
    raise SystemExit(found.exit_code)


def comparison_table(found: "Comparison") -> "Table":
    """A row a case: both medians with their intervals, what lies between them, the verdict."""
    from rich.table import Table

    table = Table("Case", title="Medians with 95 % intervals; above 1 is slower")
    for heading in ("Before", "After", "Ratio", "Effect", "p", "CV before", "CV after"):
        table.add_column(heading, justify="right")
    table.add_column("Verdict")
    for pair in found.pairs:
        table.add_row(pair.name, *_cells(pair))
    return table


def remarks(found: "Comparison") -> list[str]:
    """Return lines about noise and hosts, without which the table cannot be judged."""
    cases, runs = found.between_cases, found.between_runs
    noise = "not known: no case has two runs" if runs is None else f"{runs:.1%}"
    lines = [
        f"variation between cases {cases:.1%}; between runs of one case {noise} "
        f"({found.hosts} host{'s' if found.hosts > 1 else ''})"
    ]
    if found.is_single_run:
        lines.append(
            "fewer than 3 runs a side: an interval holds for those runs, not for the next; measure "
            "in turns, or repeat the command"
        )
    for name, (before, after) in found.settings.items():
        lines.append(f"differs in {name}: {before} and {after}")
    lines += [f"only before: {name}" for name in found.gone]
    return lines + [f"only after: {name}" for name in found.new]


def summary(found: "Comparison") -> dict[str, object]:
    """The last line: verdicts and ratios by case."""
    return {
        "verdict": ("same", "regression", "not comparable")[found.exit_code],
        "cases": {pair.name: pair.verdict for pair in found.pairs},
        "ratios": {
            pair.name: round(pair.difference.ratio, 4) for pair in found.pairs if pair.difference
        },
        "between_cases": found.between_cases,
        "between_runs": found.between_runs,
    }


def _cells(pair: "Pair") -> list[str]:
    if pair.difference is None:
        return ["-"] * 7 + [f"not comparable ({pair.reason})"]
    found, show = pair.difference, _shown_like(pair.difference.before.median)
    return [
        show(found.before),
        show(found.after),
        f"{found.ratio:.3f}",
        f"{found.effect:+.2f}",
        f"{found.p:.2g}",
        f"{pair.before.within_runs:.1%}",
        f"{pair.after.within_runs:.1%}",
        found.verdict,
    ]


def _shown_like(seconds: float) -> "Callable[[Interval], str]":
    """Writes intervals in the unit that gives `seconds` a number of at least 1."""
    scale, unit = next((scale, unit) for scale, unit in UNITS if seconds >= scale)
    scale = scale or 1e-9

    def show(interval: "Interval") -> str:
        low, high = interval.low / scale, interval.high / scale
        return f"{interval.median / scale:.4g} [{low:.4g}, {high:.4g}] {unit}"

    return show


# `qat bench record`: keeps a result where records are kept.

RECORDS = Path("speedrun/records")


def record(
    slug: str,
    /,
    *,
    from_: Annotated[Path, Parameter(name="--from")],
    records: Path = RECORDS,
    date: str = "",
) -> dict[str, object]:
    """Freeze a result into RECORDS/DATE_SLUG: recipe, raw samples, environment, figures, page.

    Args:
        slug: two or three lower-case words, joined by hyphens.
        from_: directory of results; every case needs three samples or runs at least.
        records: where records are kept.
        date: day of the measurement as YYYY-MM-DD; today by default.
    """
    from qat.extensions.lab.compare import write_record

    return {"record": write_record(slug, from_, records, date or None)}
