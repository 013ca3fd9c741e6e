"""Rows of results as one table: a line a recipe, mean and spread over its seeds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes

from qat.bench.page import fit_scale, markdown_table
from qat.observe.charts import LIGHT, SERIES, Chart

PER_TEXT = ("kl_nats", "top1_frac", "ppl")
COMMON = (
    "kd_nats",
    "repeated_frac",
    "distinct_frac",
    "bits_per_weight",
    "megabytes",
    "steps",
    "tokens",
    "seconds",
    "peak_gib",
)
TEACHER = "teacher"

Row = dict[str, object]


@dataclass(frozen=True)
class Stat:
    """A number over several seeds."""

    mean: float
    std: float | None
    """Of the sample; None of one seed."""


@dataclass(frozen=True)
class QualityLine:
    """A recipe in the table."""

    recipe: str
    method: str
    num_seeds: int
    workers: tuple[int, ...]
    """Jobs side by side when it ran."""
    stats: dict[str, Stat | None]
    """By name; what is told of a text as `kl_nats.TEXT`. None where nothing was measured."""


def summarise(rows: Sequence[Row], texts: Sequence[str]) -> list[QualityLine]:
    """A line for each recipe, the teacher's first, then by KL on the first of `texts`."""
    names = dict.fromkeys(row["recipe"] for row in rows)
    lines = [_line([row for row in rows if row["recipe"] == name], texts) for name in names]
    return sorted(lines, key=lambda line: (line.method != TEACHER, _kl(line, texts[0])))


def stat(values: Sequence[float | None]) -> Stat | None:
    """Mean and sample standard deviation of what was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Stat(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def columns(texts: Sequence[str]) -> list[tuple[str, str, str]]:
    """Heading, name in `QualityLine.stats`, and format of the mean."""
    return [
        ("bits/w", "bits_per_weight", "{:.3f}"),
        ("MB", "megabytes", "{:.2f}"),
        *((f"KL {text}", f"kl_nats.{text}", "{:.4f}") for text in texts),
        *((f"top-1 {text}", f"top1_frac.{text}", "{:.4f}") for text in texts),
        *((f"ppl {text}", f"ppl.{text}", "{:.3f}") for text in texts),
        ("KD", "kd_nats", "{:.4f}"),
        ("rep-4", "repeated_frac", "{:.3f}"),
        ("distinct", "distinct_frac", "{:.3f}"),
        ("steps", "steps", "{:,.0f}"),
        ("Mtokens", "tokens", "{:.2f}"),
        ("seconds", "seconds", "{:.1f}"),
        ("GiB", "peak_gib", "{:.2f}"),
    ]


def cells(
    lines: Sequence[QualityLine], texts: Sequence[str], unmade: Mapping[str, str] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Headings, and the words of each line; behind them what cannot be made, with its reason."""
    found = columns(texts)
    headings = ["recipe", "seeds", *(title for title, _, _ in found)]
    body = [
        [line.recipe, str(line.num_seeds), *(_cell(line, key, form) for _, key, form in found)]
        for line in lines
    ]
    if unmade:
        headings = [*headings, "cannot be made"]
        nothing = ["-"] * (len(headings) - 3)
        body = [[*words, ""] for words in body]
        body += [[name, "0", *nothing, reason] for name, reason in unmade.items()]
    return headings, body


def markdown(
    lines: Sequence[QualityLine], texts: Sequence[str], unmade: Mapping[str, str] | None = None
) -> str:
    """The table in Markdown."""
    return markdown_table(*cells(lines, texts, unmade))


def best(lines: Sequence[QualityLine]) -> QualityLine | None:
    """The first line below the teacher's."""
    return next((line for line in lines if line.method != TEACHER), None)


def _line(rows: list[Row], texts: Sequence[str]) -> QualityLine:
    firsts = [row for row in rows if row["text"] == texts[0]]
    stats = {name: stat([row[name] for row in firsts]) for name in COMMON}
    for text in texts:
        own = [row for row in rows if row["text"] == text]
        stats |= {f"{name}.{text}": stat([row[name] for row in own]) for name in PER_TEXT}
    return QualityLine(
        recipe=rows[0]["recipe"],
        method=rows[0]["method"],
        num_seeds=len(firsts),
        workers=tuple(sorted({row["workers"] for row in firsts})),
        stats=stats,
    )


def _kl(line: QualityLine, text: str) -> float:
    return line.stats[f"kl_nats.{text}"].mean


def _cell(line: QualityLine, key: str, form: str) -> str:
    found = line.stats[key]
    if found is None:
        return "-"
    unit = 1e6 if key == "tokens" else 1.0
    text = form.format(found.mean / unit)
    return f"{text} +- {form.format(found.std / unit)}" if found.std else text


# Two pictures of a table: KL against bits, and KL against training time.

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
