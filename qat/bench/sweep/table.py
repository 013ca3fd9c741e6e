"""Rows of a sweep as one table: a line a group, with what its repeats allow to say.

The unit of comparison is a repeat: a process of its own, whose median step stands for it. What
repeats differ by is the machine's doing, and stands beside what groups differ by.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes

from qat.bench.page import fit_scale, markdown_table
from qat.bench.stats import MIN_SAMPLES, Difference, Interval, compare, median_interval, variation
from qat.observe.charts import LIGHT, SERIES, Chart

NOISY = 0.12
"""A coefficient of variation of the steps within a run above this is warned of."""

Row = dict[str, object]


@dataclass(frozen=True)
class SweepLine:
    """A group in the table."""

    group: str
    costs_s: tuple[float, ...]
    """Of each repeat: seconds a valid token, or a run of a command."""
    failed: int
    cost: Interval | None
    """None where no repeat finished."""
    between: float | None
    """Coefficient of variation between repeats; None for a single one."""
    within: float | None
    """Of the steps inside a run, the median of the runs; None where steps were not timed."""
    against: Difference | None
    """From the baseline; None of itself, and where either has too few repeats."""
    step_s: float | None
    peak_gib: float | None
    slope_mib: float | None
    """Growth of memory a step, the largest of the repeats; None for too few steps to tell."""
    warnings: tuple[str, ...]

    @property
    def is_ranked(self) -> bool:
        """Whether it has the repeats that a rank needs."""
        return len(self.costs_s) >= MIN_SAMPLES

    @property
    def rate(self) -> float | None:
        """Valid tokens a second, or runs of a command."""
        return None if self.cost is None else 1 / self.cost.median


def summarise(
    groups: Sequence[str], rows: Sequence[Row], failed: Sequence[str], baseline: str
) -> list[SweepLine]:
    """A line for each group: ranked ones first, fastest on top; then the others as they come.

    Args:
        failed: the group of each run that failed.
    """
    by_group = {name: [row for row in rows if row["group"] == name] for name in groups}
    base = [row["cost_s"] for row in by_group[baseline]]
    lines = [
        _line(name, found, failed.count(name), None if name == baseline else base)
        for name, found in by_group.items()
    ]
    ranked = sorted((line for line in lines if line.is_ranked), key=lambda line: line.cost.median)
    return [*ranked, *(line for line in lines if not line.is_ranked)]


def spreads(lines: Sequence[SweepLine]) -> tuple[float | None, float | None]:
    """The machine's share and the settings': the median variation between repeats of a group, and
    that between the medians of ranked groups. None where there are too few."""
    between = [line.between for line in lines if line.between is not None]
    medians = [line.cost.median for line in lines if line.is_ranked]
    machine = statistics.median(between) if between else None
    return machine, variation(medians) if len(medians) > 1 else None


def cells(lines: Sequence[SweepLine]) -> tuple[list[str], list[list[str]]]:
    """Headings, and the words of each line."""
    headings = ["group", "rank", "repeats", "rate", "95 % low", "high", "between repeats"]
    headings += [
        "within a run",
        "x baseline",
        "effect",
        "p",
        "verdict",
        "step s",
        "GiB",
        "MiB/step",
    ]
    return headings, [_words(place, line) for place, line in enumerate(lines, 1)]


def markdown(lines: Sequence[SweepLine]) -> str:
    """The table in Markdown."""
    return markdown_table(*cells(lines))


def _words(place: int, line: SweepLine) -> list[str]:
    cost, found = line.cost, line.against
    done, all_runs = len(line.costs_s), len(line.costs_s) + line.failed
    return [
        line.group,
        str(place) if line.is_ranked else "-",
        str(done) if done == all_runs else f"{done} of {all_runs}",
        _word(line.rate, "{:,.4g}"),
        _word(cost and 1 / cost.high, "{:,.4g}"),
        _word(cost and 1 / cost.low, "{:,.4g}"),
        _word(line.between, "{:.1%}"),
        _word(line.within, "{:.1%}"),
        _word(found and 1 / found.ratio, "{:.3f}"),
        _word(found and -found.effect, "{:+.2f}"),
        _word(found and found.p, "{:.3f}"),
        found.verdict if found else "-",
        _word(line.step_s, "{:.4g}"),
        _word(line.peak_gib, "{:.2f}"),
        _word(line.slope_mib, "{:+.3f}"),
    ]


def _word(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _line(group: str, rows: Sequence[Row], failed: int, base: Sequence[float] | None) -> SweepLine:
    costs = [row["cost_s"] for row in rows]
    enough = base is not None and min(len(base), len(costs)) >= MIN_SAMPLES
    within = [variation(row["samples"]) for row in rows if len(row["samples"]) > 1]
    slopes = [row["memory_trend"]["slope_mib"] for row in rows if row.get("memory_trend")]
    return SweepLine(
        group=group,
        costs_s=tuple(costs),
        failed=failed,
        cost=median_interval(costs) if costs else None,
        between=variation(costs) if len(costs) > 1 else None,
        within=statistics.median(within) if within else None,
        against=compare(base, costs) if enough else None,
        step_s=_median(rows, "step_s"),
        peak_gib=_median(rows, "peak_gib"),
        slope_mib=max(slopes, default=None),
        warnings=tuple(dict.fromkeys(word for row in rows for word in row_warnings(row))),
    )


def row_warnings(row: Row) -> list[str]:
    """What is doubtful about a run, in words."""
    found = [*row.get("machine_warnings", ()), *row.get("fallbacks", ())]
    if len(row["samples"]) > 1 and variation(row["samples"]) > NOISY:
        found.append(f"steps of a run vary by more than {NOISY:.0%}")
    if row.get("is_leaking"):
        found.append(f"memory grows by {row['memory_trend']['slope_mib']:.3g} MiB a step")
    return found


def _median(rows: Sequence[Row], name: str) -> float | None:
    known = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(known) if known else None


# The picture of a sweep: each group's rate, every repeat as a dot, the interval as a bar.


def chart(lines: Sequence[SweepLine], unit: str) -> bytes | None:
    """SVG of the groups that finished a run, the first line on top; None if none did."""
    drawn = [line for line in lines if line.costs_s]
    if not drawn:
        return None
    return Chart("sweep", "", "", partial(_paint, lines=drawn, unit=unit)).render(LIGHT, "svg")


def _paint(axes: Axes, *, lines: Sequence[SweepLine], unit: str) -> None:
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
