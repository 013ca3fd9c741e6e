"""`qat bench kernels`: every kernel and its reference through the gates."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qat.bench.config import KernelsConfig
from qat.cli.tables import row_table, wide_console

if TYPE_CHECKING:
    from qat.bench.kernels.run import KernelsReport

WIDTH = 150
US = 1e6
COLUMNS = (
    ("Kernel", "case", "{}", 1),
    ("us a call", "p50_s", "{:,.2f}", US),
    ("p90", "p90_s", "{:,.2f}", US),
    ("p99", "p99_s", "{:,.2f}", US),
    ("95 % from", "low_s", "{:,.2f}", US),
    ("to", "high_s", "{:,.2f}", US),
    ("reference", "reference_s", "{:,.2f}", US),
    ("GB/s", "gb_per_s", "{:,.0f}", 1),
    ("TFLOP/s", "tflops", "{:,.1f}", 1),
    ("Bound by", "bound", "{}", 1),
    ("Of roofline", "roofline_frac", "{:.3f}", 1),
    ("x reference", "over_reference", "{:.1f}", 1),
    ("Status", "status", "{}", 1),
)


def kernels(
    *,
    config: Annotated[KernelsConfig, Parameter(name="*")] = KernelsConfig(),  # noqa: B008 - frozen
    out: Path | None = None,
) -> dict[str, object]:
    """Put every kernel through its gates: compile, correct, fast; the first that fails is the last.

    Args:
        config: settings.
        out: directory for the results; by default runs/bench/TIME.
    """
    from qat.bench.kernels.run import run_kernels

    report = run_kernels(config, out)
    console = wide_console(WIDTH)
    console.print(row_table(COLUMNS, report.rows))
    for line in _remarks(report):
        console.print(line, markup=False, highlight=False)
    report.check()
    figures = {name: value for name, value, *_ in report.figures()}
    return dict(out=report.path, kernels=len(report.rows), **figures)


def _remarks(report: "KernelsReport") -> list[str]:
    rates = report.rates
    lines = [
        f"copy {rates.copy_bytes / 1e9:,.0f} GB/s, matmul {rates.matmul_flops / 1e12:,.1f} TFLOP/s"
    ]
    for row in report.rows:
        if row["status"] == "FAILED":
            lines.append(f"{row['case']} failed the gate {row['gate']}: {row['difference']}")
    if report.least is not None:
        lines.append(f"furthest from the roofline: {report.least['case']}")
    for each in report.tuned:
        kernel, best = each.space.kernel, each.adopted
        words = "default stays" if best is None else f"{best.configuration}, {each.ratio:.3f} x"
        lines.append(f"tuned {each.case} ({kernel}): {words}")
    return [*lines, *([report.note] if report.note else [])]
