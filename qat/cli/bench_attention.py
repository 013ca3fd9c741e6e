"""`qat bench attention`: dense against sparse attention, and from which length on it pays."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qat.bench.config import AttentionConfig
from qat.cli.tables import row_table, wide_console

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
    from qat.bench.attention import run_attention

    report = run_attention(config, out)
    console = wide_console(WIDTH)
    console.print(row_table(COLUMNS, report.rows))
    for row in report.crossovers:
        console.print(_said(row), markup=False, highlight=False)
    return dict(out=report.path, crossovers=report.crossovers)


def _said(row: dict) -> str:
    kind = f"{row['way']}, {row['pass']}, {row['heads']}/{row['key_heads']} heads"
    length = row["length"]
    return f"{kind}: " + (
        "dense is as fast at every length" if length is None else f"faster from {length:,} on"
    )
