"""What the preflight found, as a table and as the numbers of the last line."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from qat.logs import Terminal
from qat.train.config import TrainConfig

if TYPE_CHECKING:
    from qat.train.preflight import Checked

COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}


def show_findings(checked: "Checked") -> None:
    """Print the findings on stdout, the worst first; lines break between words, never in a flag."""
    words = [word for finding in checked.findings for word in finding.mend.split()]
    table = Table("", expand=True)
    table.add_column("Finding", no_wrap=True)
    table.add_column("Found", ratio=1, overflow="fold")
    table.add_column("Why it matters", ratio=1, overflow="fold")
    table.add_column("What to do", ratio=1, width=max(map(len, words), default=None))
    for finding in checked.findings:
        code, severity, *words = finding
        table.add_row(severity, code, *words, style=COLOURS[severity])
    Terminal().print(table)


def predicted(checked: "Checked", config: TrainConfig, out: Path) -> dict[str, object]:
    """What a dry run found: how many findings, and what the run would take."""
    counts = {f"{each}s": 0 for each in COLOURS}
    for finding in checked.findings:
        counts[f"{finding.severity}s"] += 1
    found: dict[str, object] = {"run": out, **counts}
    if (prediction := checked.prediction) is not None:
        found |= {
            "hours": prediction.hours(config),
            "step_s": prediction.step_s,
            "eval_s": prediction.eval_s,
            "tokens_per_s": prediction.tokens_per_s,
            "peak_gib": prediction.peak_gib,
            "disk_bytes": prediction.disk_bytes(config),
            "checkpoint_bytes": prediction.checkpoint_bytes,
        }
    return found
