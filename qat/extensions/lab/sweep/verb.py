"""The implementation of `qat bench sweep`, found through the hook `qat.sweeps`."""

from pathlib import Path

from qat.cli.tables import numbers_table, wide_console
from qat.extensions.bench.config import SweepConfig
from qat.extensions.lab.sweep.plan import read_sweep

WIDTH = 240
"""Columns of the table where output goes to a file."""


def sweep(config: SweepConfig, recipe: Path, out: Path | None) -> dict[str, object]:
    """Run the groups of a recipe, or list them for a dry run; print a table and return a summary.

    Raises:
        ConfigError: the recipe is not valid, or a run failed.
    """
    # a wrong recipe is refused before torch is imported
    read_sweep(recipe, tiny=config.tiny, changes=config.set)
    from qat.extensions.lab.sweep.run import RATES, cells, plan_sweep, run_sweep

    console = wide_console(WIDTH)
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
