"""One logger, one progress bar, one metrics file: how a run tells what it does."""

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from qat.errors import CheckpointError

console = Console(stderr=True)

RECIPE, FACTS = "recipe.toml", "run.json"
METRICS, HEARTBEAT = "metrics.jsonl", "heartbeat-rank0.jsonl"
"""A run's files: what was asked, what it ran on, its numbers, and its speed."""
TRAINING_CSV, VAL_CSV, SUMMARY = "training.csv", "val.csv", "metrics.json"
"""The same numbers as tables, and in the end what the run came to."""

HEARTBEATS, EVENTS = "heartbeat-rank*.jsonl", "events*.jsonl"
"""Patterns of the files of all ranks."""
TAIL_BYTES = 4096
"""To read at a time when the last line feed of a file is looked for."""

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


def heartbeat_file(rank: int) -> str:
    """Name of the file in which a rank tells how it is: `heartbeat-rank0.jsonl`."""
    return f"heartbeat-rank{rank}.jsonl"


def events_file(rank: int) -> str:
    """Name of the file of what befell a rank: `events.jsonl` of the first one."""
    return f"events-rank{rank}.jsonl" if rank else "events.jsonl"


class Lines:
    """An append-only text file. Each line is there when `append` returns, whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab+", buffering=0)
        self._file.truncate(_whole_bytes(self._file))

    def append(self, text: str) -> None:
        """Append `text` and a line feed.

        Raises:
            OSError: it could not be written (a full disk); nothing of it stays.
        """
        before, rest = os.fstat(self._file.fileno()).st_size, f"{text}\n".encode()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(before)
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Close the file; later lines fail."""
        self._file.close()


def _whole_bytes(file: BinaryIO) -> int:
    """Bytes up to the last line feed: what a crash left behind it is no line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


class JsonLines:
    """An append-only file of JSON objects, one a line, each whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)

    def write(self, **values: object) -> None:
        """Append one object; keys carry their unit (`loss_nats`, `tokens_per_s`).

        Raises:
            OSError: see `Lines.append`.
        """
        self._lines.append(json.dumps(values))

    def close(self) -> None:
        """Close the file; later writes fail."""
        self._lines.close()


def read_json_lines(path: Path) -> list[dict]:
    """The objects of a JSON-lines file.

    A last line that a crash cut short, or left as zeros, is left out.

    Raises:
        CheckpointError: another line is damaged.
    """
    return [found for _, found in _read(path)]


def cut_after(path: Path, step: int) -> None:
    """Cut a file of JSON lines back to those up to `step`, at step 0 to nothing, if it is there.

    Raises:
        CheckpointError: a line is damaged, or belongs to no step.
    """
    if not path.exists():
        return
    kept = []
    for line, found in _read(path):
        if not isinstance(found.get("step"), int):
            raise CheckpointError(
                f"{path} has a line without a step, {line[:60]!r}, expected one in each; restore "
                "the file or remove that line"
            )
        if 0 < step >= found["step"]:
            kept.append(line)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(b"".join(kept))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _read(path: Path) -> list[tuple[bytes, dict]]:
    """Each whole line and its object."""
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append((line, _object(line)))
        except ValueError as error:
            if number < len(lines) or b"\0" not in line:
                raise CheckpointError(
                    f"{path}: line {number} of {len(lines)} is damaged ({error}), expected a JSON "
                    "object; restore the file or remove that line"
                ) from None
    return found


def _object(line: bytes) -> dict:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}")
    return found
