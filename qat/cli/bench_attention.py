"""`qat bench attention`: dense against sparse attention, and from which length on it pays."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qat.bench.config import AttentionConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

WIDTH = 130
COLUMNS = (
    ("Way", "way", "{}", 1),
    ("Pass", "pass", "{}", 1),
    ("S", "length", "{:,}", 1),
    ("Heads", "heads", "{}", 1),
    ("ms a call", "p50_s", "{:,.3f}", 1e3),
    ("95 % from", "low_s", "{:,.3f}", 1e3),
    ("to", "high_s", "{:,.3f}", 1e3),
    ("x best dense", "over_dense", "{:.2f}", 1),
    ("Memory", "peak_gib", "{:.2f} GiB", 1),
    ("First call", "compile_s", "{:.1f} s", 1),
    ("Status", "status", "{}", 1),
)
"""Title, key of a row, format, factor."""


def attention(
    *,
    config: Annotated[AttentionConfig, Parameter(name="*")] = AttentionConfig(),  # noqa: B008
    out: Path | None = None,
) -> dict[str, object]:
    """Time one layer's attention, dense and sparse in turns; compiling is reported apart.

    Args:
        config: settings.
        out: directory for the results; by default runs/bench/TIME.
    """
    from rich.console import Console

    from qat.bench.attention.run import run_attention

    report = run_attention(config, out)
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(table_of(report.rows))
    for row in report.crossovers:
        console.print(_said(row), markup=False, highlight=False)
    return dict(out=report.path, crossovers=report.crossovers)


def table_of(rows: "Sequence[dict]") -> "Table":
    """One line a row, with dashes for what it lacks."""
    from rich.table import Table

    table = Table(*(title for title, *_ in COLUMNS))
    for row in rows:
        values = [(row.get(key), form, factor) for _, key, form, factor in COLUMNS]
        table.add_row(
            *("-" if v is None else form.format(v * factor) for v, form, factor in values)
        )
    return table


def _said(row: dict) -> str:
    kind = f"{row['way']}, {row['pass']}, {row['heads']}/{row['key_heads']} heads"
    length = row["length"]
    return f"{kind}: " + (
        "dense is as fast at every length" if length is None else f"faster from {length:,} on"
    )
