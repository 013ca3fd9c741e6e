"""The picture of a sweep: each group's rate, every repeat as a dot, the interval as a bar."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes

from qat.bench.page import fit_scale
from qat.bench.sweep.table import Line
from qat.observe.charts import LIGHT, SERIES, Chart


def chart(lines: Sequence[Line], unit: str) -> bytes | None:
    """SVG of the groups that finished a run, the first line on top; None if none did."""
    drawn = [line for line in lines if line.costs_s]
    if not drawn:
        return None
    return Chart("sweep", "", "", partial(_paint, lines=drawn, unit=unit)).render(LIGHT, "svg")


def _paint(axes: Axes, *, lines: Sequence[Line], unit: str) -> None:
    for height, line in enumerate(reversed(lines)):
        color = SERIES[0] if line.is_ranked else SERIES[1]
        rates = [1 / cost for cost in line.costs_s]
        if line.is_ranked:
            axes.plot(
                [1 / line.cost.high, 1 / line.cost.low], [height] * 2, color=color, lw=5, alpha=0.3
            )
        axes.plot(rates, [height] * len(rates), "o", color=color, markersize=4)
    axes.set_yticks(range(len(lines)), [line.group for line in reversed(lines)], fontsize=7)
    fit_scale(axes.set_xscale, axes.xaxis, [1 / cost for line in lines for cost in line.costs_s])
    axes.set_xlabel(unit)
    axes.margins(0.08)
