"""Two pictures of a table: KL against bits, and KL against training time."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from qat.bench.quality.table import TEACHER, Line
from qat.report.charts import LIGHT, SERIES, Chart

SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDE, VERY_WIDE = 5.0, 100.0
"""Values whose largest is so many times the least are drawn on a logarithmic axis, and with fewer
numbers at it."""


def charts(lines: Sequence[Line], text: str) -> dict[str, bytes]:
    """SVG by file name, of the recipes below the teacher's line; KL is that on `text`."""
    students = [line for line in lines if line.method != TEACHER]
    trained = [line for line in students if line.stats["steps"].mean > 0]
    if not students:
        return {}
    pictures = {"kl_bits.svg": ("bits_per_weight", "bits a weight", students)}
    if trained:
        pictures["kl_seconds.svg"] = ("seconds", "training seconds", trained)
    return {
        name: Chart(
            name, "", "", partial(_paint, lines=drawn, text=text, key=key, label=label)
        ).render(LIGHT, "svg")
        for name, (key, label, drawn) in pictures.items()
    }


def _paint(axes: Axes, *, lines: Sequence[Line], text: str, key: str, label: str) -> None:
    for number, line in enumerate(lines):
        across, up = line.stats[key], line.stats[f"kl_nats.{text}"]
        axes.errorbar(
            across.mean,
            up.mean,
            yerr=up.std or 0.0,
            fmt=SHAPES[number // len(SERIES) % len(SHAPES)],
            color=SERIES[number % len(SERIES)],
            markersize=6,
            capsize=2,
            label=line.recipe,
        )
    _scale(axes.set_xscale, axes.xaxis, [line.stats[key].mean for line in lines])
    _scale(axes.set_yscale, axes.yaxis, [line.stats[f"kl_nats.{text}"].mean for line in lines])
    axes.margins(0.12)
    axes.set_xlabel(label)
    axes.set_ylabel(f"KL on {text}, nats a token")
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles, labels, loc="outside right upper", fontsize=8)


def _scale(set_scale, axis, values: Sequence[float]) -> None:  # noqa: ANN001 - bound to an axis
    """A logarithmic axis with plain numbers for values that span much, else a linear one."""
    if min(values) <= 0 or max(values) < WIDE * min(values):
        return
    set_scale("log")
    is_crowded = max(values) > VERY_WIDE * min(values)
    axis.set_major_locator(LogLocator(subs=(1.0,) if is_crowded else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
