"""The charts of a report, each in a light and a dark theme: data in, image bytes out."""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from qat.observe.runs import Conversion, Module, TrainingRun
from qat.observe.summary import Result

SERIES = ("#3b6fd4", "#d9822b", "#2f9e76", "#b5499c", "#8a6fdf", "#c9a227", "#4aa3c7", "#d1495b")
COLORS = SERIES * 4  # a chart of more runs than that is unreadable
WIDTH, LEGEND_MARK, LEGEND_LETTER = 5.6, 0.65, 0.085  # inches: a chart, a legend's mark, a letter
LONGEST_NAME = 56
MARKERS = {1: "v", 2: "D", 3: "^", 4: "o"}
MAX_POINTS = 800
SAME_BITS = 1.05
"""Bits per weight within this ratio count as the same place on the axis: scales and codebooks of
one format cost slightly different bits in weights of different sizes."""
DISTANCES = {  # from the teacher on held-out text: the line style and the label of each
    "kl_tail_nats": ("-", "KL with tail"),
    "kd_nats": ("--", "KD"),
}
NEAR = 0.06  # labels of dots closer than this fraction of both axes are stacked
WIDE, VERY_WIDE = 5.0, 100.0  # ratios of values for a logarithmic axis, and for fewer ticks


@dataclass(frozen=True)
class Theme:
    """The colours of the light or the dark theme."""

    ink: str
    muted: str
    grid: str
    paper: str


LIGHT = Theme(ink="#1c2430", muted="#5c6776", grid="#e3e7ec", paper="#ffffff")
DARK = Theme(ink="#e6eaf0", muted="#9aa5b4", grid="#2c3440", paper="#171c24")

STYLE: dict[str, Any] = {
    "text.parse_math": False,  # names are not formulas, even with dollar signs in them
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": LIGHT.ink,
    "axes.labelcolor": LIGHT.muted,
    "axes.edgecolor": LIGHT.grid,
    "axes.facecolor": LIGHT.paper,
    "figure.facecolor": LIGHT.paper,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": LIGHT.grid,
    "grid.linewidth": 0.8,
    "xtick.color": LIGHT.muted,
    "ytick.color": LIGHT.muted,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.labelcolor": LIGHT.ink,
    "svg.hashsalt": "qat",
}


@dataclass(frozen=True)
class Chart:
    """One chart: a file-name stem, a heading, an explaining caption, and its drawing function."""

    name: str
    title: str
    caption: str
    paint: Callable[[Axes], None]

    def render(self, form: str) -> bytes:
        """Render the light theme as `svg` or `png`; the same input gives the same bytes."""
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
            axes = figure.subplots()
            self.paint(axes)
            if form == "png":  # on the page the heading stands above the chart
                axes.set_title(_shown(self.title), loc="left", weight="bold")
            buffer = io.BytesIO()
            metadata = {"Date": None} if form == "svg" else {"Software": "qat"}
            figure.savefig(buffer, format=form, dpi=200, metadata=metadata)
        return buffer.getvalue()


def in_dark(svg: bytes) -> bytes:
    """Replace the light colours of an SVG by the dark ones, which is faster than drawing again."""
    for light, dark in zip(astuple(LIGHT), astuple(DARK), strict=True):
        svg = svg.replace(light.encode(), dark.encode())
    return svg


def size_charts(results: Sequence[Result]) -> list[Chart]:
    """Chart distance from the teacher against size, if at least two sizes are known."""
    known = [each for each in results if None not in (each.megabytes, each.kl_nats)]
    if len({each.megabytes for each in known}) < 2:
        return []
    caption = "Down is closer to the original, left is smaller; the arrow is training."
    return [Chart("size", "Size and distance", caption, partial(_paint_sizes, known))]


def run_charts(runs: list[TrainingRun]) -> list[Chart]:
    """Chart loss, held-out divergence and speed of all runs together, where measured."""
    charts = []
    if any(run.steps for run in runs):
        caption = "Nats a token at each optimizer step; the bold line is a running mean."
        charts.append(Chart("loss", "Training loss", caption, partial(_paint_loss, runs)))
    if any(run.evals for run in runs):
        caption = "On documents never trained on; lower is better."
        if any(row.get(key) is not None for run in runs for row in run.evals for key in DISTANCES):
            title = "Held-out divergence from the teacher"
            charts.append(Chart("held-out", title, caption, partial(_paint_distances, runs)))
        else:  # a cache of draws gives no distance
            title = "Held-out cross-entropy with the teacher's draws"
            paint = partial(_paint_evals, runs, "sampled_ce_nats", "nats a token")
            charts.append(Chart("held-out", title, caption, paint))
        caption = "Of the student on the same documents; lower is better."
        paint = partial(_paint_evals, runs, "ppl", "perplexity")
        charts.append(Chart("perplexity", "Held-out perplexity", caption, paint))
    if any(run.heartbeats for run in runs):
        caption = "Input positions a second, padding included, over all micro-batches of a step."
        charts.append(Chart("speed", "Speed", caption, partial(_paint_speed, runs)))
    return charts


def conversion_charts(conversion: Conversion) -> list[Chart]:
    """Chart the error by layer of one conversion, and bits against error if bits differ."""
    label, modules = conversion.label, conversion.modules
    if not modules:  # a conversion of the attention alone
        return []
    kind = conversion.kind_of_error
    sizes = sorted({module.vector_size for module in modules} - {1})
    sizes_note = "".join(f"; v{size}: vectors of {size} weights" for size in sizes)
    by_kind: dict[str, list[Module]] = {}
    for module in modules:
        by_kind.setdefault(module.kind, []).append(module)
    caption = f"The {kind} error of each quantized linear; the marker shows its bits{sizes_note}."
    inside = {name: each for name, each in by_kind.items() if each[0].layer is not None}
    paint = partial(_paint_layers, inside, f"{kind} error")
    charts = [Chart(f"{label}-layers", f"{label}: error by layer", caption, paint)]
    bits = [module.bits_per_weight for module in modules]
    if max(bits) > SAME_BITS * min(bits):
        caption = (
            "One dot a linear or table; bits include scales and codebook. Down and left is better."
        )
        paint = partial(_paint_bits, by_kind, f"{kind} error")
        charts.append(Chart(f"{label}-bits", f"{label}: bits against error", caption, paint))
    return charts


def smooth(values: Iterable[float], weight: float) -> list[float]:
    """Return the exponential running mean, unbiased at the start; `weight` is in [0, 1)."""
    mean, scale, result = 0.0, 0.0, []
    for value in values:
        mean = weight * mean + (1 - weight) * value
        scale = weight * scale + (1 - weight)
        result.append(mean / scale)
    return result


def thin(rows: list[Any]) -> list[Any]:
    """Return at most about `MAX_POINTS` rows, evenly spaced, the last one included."""
    stride = max(1, -(-len(rows) // MAX_POINTS))
    kept = rows[::stride]
    return kept if not rows or kept[-1] is rows[-1] else [*kept, rows[-1]]


def _paint_sizes(results: Sequence[Result], axes: Axes) -> None:
    """Draw a dot and a label for each model; an arrow marks training at the same size."""
    places = [(float(each.megabytes or 0), float(each.kl_nats or 0)) for each in results]
    right, top = (1.15 * max(values) for values in zip(*places, strict=True))
    for index, (each, color, (x, y)) in enumerate(zip(results, COLORS, places, strict=False)):
        axes.plot([x], [y], "o", color=color, markersize=8)
        near = [abs(y - other) < NEAR * top and abs(x - at) < NEAR * right for at, other in places]
        side, shift = ("right", -8) if x > right / 2 else ("left", 8)
        place = (shift, 6 - 14 * sum(near[:index]))  # below the labels of nearby dots
        text = f"{_shown(each.name)}, {x:.3g} MB"
        axes.annotate(text, (x, y), place, textcoords="offset points", ha=side)
    for (x, y), (next_x, next_y) in pairwise(places):
        if abs(next_x - x) < 0.02 * right and next_y < y - NEAR * top:
            style = {"arrowstyle": "->", "color": LIGHT.muted, "shrinkA": 7, "shrinkB": 7}
            axes.annotate("", (next_x, next_y), (x, y), arrowprops=style)
    axes.set_xlim(0, right)
    axes.set_ylim(-0.04 * top, top)
    axes.set_xlabel("MB")
    axes.set_ylabel("KL, nats a token")


def _paint_loss(runs: list[TrainingRun], axes: Axes) -> None:
    for run, color in zip(runs, COLORS, strict=False):
        losses = [row["loss_nats"] for row in run.steps]
        means = smooth(losses, 1 - 1 / max(1.0, len(losses) / 60))
        points = thin(list(zip((row["step"] for row in run.steps), losses, means, strict=True)))
        if not points:
            continue
        steps, raw, mean = zip(*points, strict=True)
        axes.plot(steps, raw, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, mean, color=color, label=_shown(run.label), marker=_dot(points))
    _finish(axes, "step", "nats a token")


def _paint_distances(runs: list[TrainingRun], axes: Axes) -> None:
    """Draw a line per run and distance: a colour for each run, a line style for each distance."""
    for key, (dash, _) in DISTANCES.items():
        _draw_evals(runs, key, axes, dash=dash, is_named=dash == "-" and len(runs) > 1)
    for dash, name in DISTANCES.values():
        axes.plot([], [], dash, color=axes.xaxis.label.get_color(), label=name)
    _finish(axes, "step", "nats a token")


def _paint_evals(runs: list[TrainingRun], key: str, unit: str, axes: Axes) -> None:
    _draw_evals(runs, key, axes)
    values = [row[key] for run in runs for row in run.evals if row.get(key) is not None]
    _finish(axes, "step", unit, floor=0.9 * min(values, default=0.0))


def _draw_evals(
    runs: list[TrainingRun], key: str, axes: Axes, *, dash: str = "-", is_named: bool = True
) -> None:
    for run, color in zip(runs, COLORS, strict=False):
        rows = [row for row in run.evals if row.get(key) is not None]
        steps, values = [row["step"] for row in rows], [row[key] for row in rows]
        label = _shown(run.label) if is_named else None
        axes.plot(steps, values, dash, color=color, marker="o", label=label)


def _paint_speed(runs: list[TrainingRun], axes: Axes) -> None:
    for run, color in zip(runs, COLORS, strict=False):
        rows = thin(run.heartbeats)
        steps = [row["step"] for row in rows]
        speeds = [row["tokens_per_s"] for row in rows]
        axes.plot(steps, speeds, color=color, label=_shown(run.label), marker=_dot(rows))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _finish(axes, "step", "tokens/s")


def _paint_layers(kinds: dict[str, list[Module]], unit: str, axes: Axes) -> None:
    for (kind, modules), color in zip(kinds.items(), COLORS, strict=False):
        layers, errors = [m.layer for m in modules], [m.error for m in modules]
        marker = MARKERS.get(modules[0].bits, "s")
        size = modules[0].vector_size
        label = f"{kind} ({modules[0].bits:g} bit{f' v{size}' if size > 1 else ''})"
        axes.plot(layers, errors, marker=marker, color=color, alpha=0.9, label=label)
    _finish(axes, "layer", unit)


def _paint_bits(kinds: dict[str, list[Module]], unit: str, axes: Axes) -> None:
    for (kind, modules), color in zip(kinds.items(), COLORS, strict=False):
        bits, errors = [m.bits_per_weight for m in modules], [m.error for m in modules]
        axes.plot(bits, errors, "o", color=color, alpha=0.75, label=kind)
    most = max(module.bits_per_weight for modules in kinds.values() for module in modules)
    axes.set_xlim(0, 1.06 * most)
    _finish(axes, "bits a weight", unit)


def _finish(axes: Axes, x: str, y: str, *, floor: float = 0.0) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    last = axes.dataLim.x1
    if x == "step" and last > 0:  # all charts of a run share the range of steps
        axes.set_xlim(-0.03 * last, 1.03 * last)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(floor, 1.04 * axes.get_ylim()[1])
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        widest = LEGEND_MARK + LEGEND_LETTER * max(map(len, labels))
        columns = max(1, min(3, len(labels), int(WIDTH / widest)))
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _shown(name: str) -> str:
    """Return a label for the legend, which would skip one with a leading underscore.

    The middle of a name longer than the chart is wide is left out.
    """
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME // 2]}...{name[3 - LONGEST_NAME // 2 :]}"
    return f" {name}" if name.startswith("_") else name


def _dot(points: list[Any]) -> str | None:
    """Return a marker if the points are few enough to tell apart."""
    return "o" if len(points) <= 20 else None


def fit_scale(axis: Axis, values: Sequence[float]) -> None:
    """Use a logarithmic axis with plain numbers if the values span a wide range."""
    if min(values) <= 0 or max(values) < WIDE * min(values):
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    is_crowded = max(values) > VERY_WIDE * min(values)
    axis.set_major_locator(LogLocator(subs=(1.0,) if is_crowded else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
