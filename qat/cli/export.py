"""`qat export`: a deployable form of a packed checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qat.config import Required
from qat.export.config import ExportConfig

if TYPE_CHECKING:
    from qat.export.model import ExportReport


def export(
    model: Required[str],
    *,
    config: Annotated[ExportConfig, Parameter(name="*")],
    out: Required[Path],
) -> dict[str, object]:
    """Write MODEL in a deployable form, read it back and compare its logits with MODEL's.

    Args:
        model: directory of a packed checkpoint, or of a run.
        config: settings.
        out: directory to make.
    """
    from qat.export.model import export_model

    report = export_model(model, config, out)
    _show(report, config, out)
    is_equal = report.logits_max_diff == 0
    return dict(out=out, to=config.to, logits_equal=is_equal, **report._asdict())


def _show(report: "ExportReport", config: ExportConfig, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("form", "dtype", "size", "bits per weight", "logits", title=str(out))
    size = f"{report.bytes / 1e6:.2f} MB"
    difference = report.logits_max_diff
    logits = "equal" if difference == 0 else f"within {difference:.2g}"
    table.add_row(config.to, report.dtype, size, f"{report.bits_per_weight:.3f}", logits)
    Console().print(table)
