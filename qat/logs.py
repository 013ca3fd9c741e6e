"""One logger, one progress bar, one metrics file: how a run tells what it does."""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(stderr=True)

RECIPE, FACTS = "recipe.toml", "run.json"
METRICS, HEARTBEAT = "metrics.jsonl", "heartbeat-rank0.jsonl"
"""A run's files: what was asked, what it ran on, its numbers, and its speed."""

QUIET = ("torchao", "torch.utils._pytree", "coremltools")
"""Loggers that warn of what nobody can mend: the first two whenever transformers finds torchao
installed, used or not; the third of what it lacks off a Mac, of versions that it was not tested
with, and of each number that it infers in float64."""


def configure(verbose: bool = False) -> None:
    """Send the package's log lines to stderr; called by the command line only."""
    logging.basicConfig(
        stream=sys.stderr,
        format="%(message)s",
        level=logging.WARNING,
    )
    logging.getLogger("qat").setLevel(logging.DEBUG if verbose else logging.INFO)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def progress(description: str, total: int | None, unit: str = "") -> Iterator["Ticker"]:
    """A progress bar on stderr that `advance` moves.

    It is shown on a terminal only, and for the main thread only: a terminal has room for one.
    """
    is_seen = console.is_terminal and threading.current_thread() is threading.main_thread()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
        disable=not is_seen,
    )
    with bar:
        yield Ticker(bar, bar.add_task(description, total=total, note=""))


class Ticker:
    """The handle of one progress bar."""

    def __init__(self, bar: Progress, task: int) -> None:
        self._bar = bar
        self._task = task

    def advance(self, count: int = 1) -> None:
        """Move the bar by `count`."""
        self._bar.update(self._task, advance=count)

    def note(self, text: str) -> None:
        """Show `text` behind the bar."""
        self._bar.update(self._task, note=text)


class JsonLines:
    """An append-only file of JSON objects, one a line, flushed at every line."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, **values: float | int | str | bool | None) -> None:
        """Append one object; keys carry their unit (`loss_nats`, `tokens_per_s`)."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; later writes fail."""
        self._file.close()


def read_json_lines(path: Path) -> list[dict]:
    """The objects of a JSON-lines file; a last line cut short by a crash is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
