"""How a run fared, as a table at its end."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

COLOURS = {"ok": "green", "look": "yellow", "bad": "bold red"}


def show_health(run: Path) -> None:
    """Print the answers to the questions of `qat.report.health` about `run` on stdout."""
    from qat.report.health import health
    from qat.report.runs import read_directory

    table = Table("Health", "Found", "Limit", "")
    for check in health(read_directory(run)):
        state = f"[{COLOURS[check.state]}]{check.state}[/]"
        table.add_row(check.name, check.found, check.limit, state)
    Console().print(table)
