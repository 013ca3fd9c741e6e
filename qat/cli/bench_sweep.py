"""`qat bench sweep`: what settings differ by, beyond what the machine does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qat.bench.sweep.plan import SweepConfig
from qat.cli.tables import wide_console

if TYPE_CHECKING:
    from rich.table import Table

    from qat.bench.sweep.run import SweepReport

WIDTH = 240


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
    from qat.bench.sweep.run import plan_sweep, run_sweep

    console = wide_console(WIDTH)
    if config.dry_run:
        _, runs = plan_sweep(config, recipe, out)
        for run in runs:
            console.print(f"{run.repeat}  {run.group}", markup=False, highlight=False)
        return dict(out=runs[0].out, runs=len(runs))
    report = run_sweep(config, recipe, out)
    console.print(_table(report))
    for line in report.lines:
        for word in line.warnings:
            console.print(f"{line.group}: {word}", markup=False, highlight=False)
    report.check()
    fastest = report.fastest
    found = dict(out=report.path, runs=len(report.runs), done=len(report.rows))
    return found if fastest is None else {**found, "fastest": fastest.group, "rate": fastest.rate}


def _table(report: "SweepReport") -> "Table":
    from rich.table import Table

    from qat.bench.sweep.run import cells, rate_unit

    headings, body = cells(report.lines)
    title = f"Rate: {rate_unit(report.recipe)}; against {report.baseline!r}"
    table = Table(headings[0], title=title)
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for row in body:
        table.add_row(*row)
    return table
