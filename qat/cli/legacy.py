"""`qat convert --from anemll`: what the verb does with a checkpoint of another program."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qat.errors import ConfigError
from qat.models.config import ConvertConfig

if TYPE_CHECKING:
    from qat.anemll.checkpoint import ImportReport

Foreign = Literal["anemll"]
"""Whose checkpoints can be read."""
MEANT = {"base"}
"""The settings of `qat convert` that an import reads."""


def convert_foreign(source: str, config: ConvertConfig, out: Path) -> dict[str, object]:
    """Import the checkpoint at `source` into `out`; what the last line says of it.

    Raises:
        ConfigError: a setting is given that an import does not read.
        CheckpointError: see `qat.anemll.checkpoint.import_checkpoint`.
    """
    given = sorted(config.model_fields_set - MEANT)
    if given:
        raise ConfigError(
            f"{given[0]}={getattr(config, given[0])} is given with --from, which keeps a "
            "checkpoint's own format; drop it, and convert or judge the result afterwards"
        )
    from qat.anemll.checkpoint import import_checkpoint

    report = import_checkpoint(Path(source), config.base, out)
    _show(report)
    return dict(
        out=out,
        version=report.version,
        linears=report.linears,
        adapters=report.adapters,
        floored=report.floored,
        bits_per_weight=round(report.bits_per_weight, 4),
        megabytes=round(report.megabytes, 3),
    )


def _show(report: "ImportReport") -> None:
    from rich.table import Table

    from qat.logs import Terminal

    title = f"version {report.version}: {report.bits_per_weight:.3f} bits per weight"
    table = Table("format", "linears", title=title)
    for name, count in report.formats.items():
        table.add_row(name, str(count))
    console = Terminal()
    console.print(table)
    if report.adapters:
        console.print(f"{report.adapters} linears have a LoRA, which is kept")
    if report.floored:
        console.print(
            f"{report.floored} weights, whose scale version 1 raises to 1e-8, became zero; their "
            "linears took an entry more in their codebook"
        )
