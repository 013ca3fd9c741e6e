"""Two pictures of a table: KL against bits, and KL against training time."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes

from qat.bench.page import fit_scale
from qat.bench.quality.table import TEACHER, QualityLine
from qat.observe.charts import LIGHT, SERIES, Chart

SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")


def charts(lines: Sequence[QualityLine], text: str) -> dict[str, bytes]:
    """SVG by file name, of the recipes below the teacher's line; KL is that on `text`."""
    students = [line for line in lines if line.method != TEACHER]
    trained = [line for line in students if line.stats["steps"].mean > 0]
    if not students:
        return {}
    marks = {line.recipe: mark(number) for number, line in enumerate(students)}
    pictures = {"kl_bits.svg": ("bits_per_weight", "bits a weight", students)}
    if trained:
        pictures["kl_seconds.svg"] = ("seconds", "training seconds", trained)
    return {
        name: Chart(
            name, "", "", partial(_paint, lines=drawn, marks=marks, text=text, key=key, label=label)
        ).render(LIGHT, "svg")
        for name, (key, label, drawn) in pictures.items()
    }


def mark(number: int) -> dict[str, str]:
    """Shape and colour of the recipe of that number, in both pictures."""
    shape = SHAPES[number // len(SERIES) % len(SHAPES)]
    return {"fmt": shape, "color": SERIES[number % len(SERIES)]}


def _paint(
    axes: Axes,
    *,
    lines: Sequence[QualityLine],
    marks: dict[str, dict[str, str]],
    text: str,
    key: str,
    label: str,
) -> None:
    for line in lines:
        across, up = line.stats[key], line.stats[f"kl_nats.{text}"]
        axes.errorbar(
            across.mean,
            up.mean,
            yerr=up.std or 0.0,
            markersize=6,
            capsize=2,
            label=line.recipe,
            **marks[line.recipe],
        )
    fit_scale(axes.set_xscale, axes.xaxis, [line.stats[key].mean for line in lines])
    fit_scale(axes.set_yscale, axes.yaxis, [line.stats[f"kl_nats.{text}"].mean for line in lines])
    axes.margins(0.12)
    axes.set_xlabel(label)
    axes.set_ylabel(f"KL on {text}, nats a token")
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles, labels, loc="outside right upper", fontsize=8)
