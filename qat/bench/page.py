"""Tables of results in Markdown."""

from collections.abc import Sequence

from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator


def markdown_table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """The table in Markdown; all columns but the first are numbers."""
    rule = ["---", *("---:" for _ in headings[1:])]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (headings, rule, *body)]
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)


# Axes that show values of any span.

WIDE, VERY_WIDE = 5.0, 100.0
"""Values whose largest is so many times the least are drawn on a logarithmic axis, and with fewer
numbers at it."""


def fit_scale(set_scale, axis, values: Sequence[float]) -> None:  # noqa: ANN001 - bound to an axis
    """A logarithmic axis with plain numbers for values that span much, else a linear one."""
    if min(values) <= 0 or max(values) < WIDE * min(values):
        return
    set_scale("log")
    is_crowded = max(values) > VERY_WIDE * min(values)
    axis.set_major_locator(LogLocator(subs=(1.0,) if is_crowded else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
