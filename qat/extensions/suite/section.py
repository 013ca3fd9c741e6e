"""The section of a report about a suite: the hook `qat.sections`."""

from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from qat.extensions.suite.results import CAPTION, COLUMNS, Results, read_results
from qat.observe.charts import COLORS, LIGHT, Chart
from qat.observe.page import Section

BAR = 0.36
"""Height of a bar; those of a task's two models fill most of a row."""


def section(file: Path) -> Section:
    """Return the section about the file `suite.json` of a suite.

    Raises:
        CheckpointError: the file is damaged.
    """
    results = read_results(file)
    caption = "Right answers in %; the lines are one standard error to each side."
    chart = Chart("suite", "What is still right", caption, partial(_paint, results))
    title = f"Tasks: {Path(results.student).name}"
    if results.teacher is not None:
        title += f" beside {Path(results.teacher).name}"
    return Section(title, COLUMNS, results.rows(), CAPTION, [chart])


def _paint(results: Results, axes: Axes) -> None:
    """Draw a bar for each task and model, the first task at the top."""
    places = range(len(results.tasks))
    sides = ("teacher", "student") if results.teacher else ("student",)
    for number, side in enumerate(sides):
        found = [getattr(task, side) for task in results.tasks.values()]
        shift = BAR * (number - (len(sides) - 1) / 2)
        axes.barh(
            [place + shift for place in places],
            [100 * each.value for each in found],
            BAR,
            xerr=[100 * (each.stderr or 0.0) for each in found],
            color=COLORS[number],
            ecolor=LIGHT.muted,
            label=side,
        )
    axes.set_yticks(places, list(results.tasks))
    axes.set_ylim(len(results.tasks) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("right answers, %")
    if len(sides) > 1:
        axes.figure.legend(loc="outside lower center", ncols=len(sides))
