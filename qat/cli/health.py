"""How a run fared, as a table at its end."""

import logging
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qat.errors import QatError

logger = logging.getLogger(__name__)

COLOURS = {"ok": "green", "look": "yellow", "bad": "bold red"}


def show_health(run: Path) -> None:
    """Print the answers to the questions of `qat.report.health` about `run` on stdout.

    A run that has its student does not fail for it.
    """
    from qat.report.health import health
    from qat.report.runs import read_directory

    try:
        checks = health(read_directory(run))
    except (OSError, QatError) as error:
        logger.warning("no table of the run's health: %s", error)
        return
    table = Table("Health", "Found", "Limit", "")
    for check in checks:
        state = f"[{COLOURS[check.state]}]{check.state}[/]"
        table.add_row(check.name, check.found, check.limit, state)
    Console().print(table)
