"""Logging to the console, progress bars, and JSON-lines files of a run."""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rich.console import Console
from rich.text import Text

from qat.errors import CheckpointError
from qat.files import parse_json, write_atomically

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)


UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that control a terminal, hide text, or cannot be encoded."""


def printable(text: str) -> str:
    """Return untrusted `text` with its control characters shown as escapes.

    Line feeds and tabs are kept.
    """
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class Terminal(Console):
    """A console for untrusted text: no markup, no emoji, control characters shown as escapes."""

    def __init__(self, **how: object) -> None:
        super().__init__(markup=False, emoji=False, **how)

    def render_str(self, text: str, **how: object) -> Text:
        """Return the text that rich renders, in tables too."""
        return super().render_str(printable(text), **how)


class _Console(Terminal):
    def on_broken_pipe(self) -> None:
        """Stop the output if its reader is gone, and let the work continue."""
        self.quiet = True


console = _Console(stderr=True)
"""The console of bars and log lines: lines during a bar are printed above it."""

FIRST_LINE_S, LINE_EVERY_S = 5.0, 60.0
"""Seconds before the first progress line, and between later ones, if there is no terminal."""

RECIPE, FACTS = "recipe.toml", "run.json"
METRICS, HEARTBEAT = "metrics.jsonl", "heartbeat-rank0.jsonl"
"""Files of a run: its settings, its environment, its metrics, and its speed."""
TRAINING_CSV, VAL_CSV, SUMMARY = "training.csv", "val.csv", "metrics.json"
"""Tables of training and evaluation metrics, and a summary of the run."""
EXAM, SAMPLES = "eval.json", "samples.json"
"""Files of `qat run` and `qat demo`: the scores of each model, and its text after one prompt."""
STUDENT = "student"
"""File of a `qat run` directory that names the better of its students."""
STATE_TENSORS = "trainer/state.safetensors"
"""The file of a checkpoint that only resuming needs, by far the largest part."""

HEARTBEATS, EVENTS = "heartbeat-rank*.jsonl", "events*.jsonl"
"""Patterns of the files of all ranks."""
TAIL_BYTES = 4096
"""Bytes read at a time to find the last line feed of a file."""

QUIET = ("torchao", "torch.utils._pytree", "coremltools")
"""Loggers whose warnings the user cannot act on: the first two whenever transformers finds torchao
installed, used or not; the third about features missing outside a Mac, untested versions, and each
number that it infers in float64."""


class _ConsoleHandler(logging.Handler):
    """Prints log lines on the console of the progress bars, without wrapping or markup."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line; an error of the stream does not stop the work."""
        try:
            console.out(printable(self.format(record)), highlight=False)
        except OSError:
            self.handleError(record)


def configure(verbose: bool = False) -> None:
    """Send the package's log lines to stderr; only the command line calls this."""
    logging.basicConfig(
        handlers=[_ConsoleHandler()],
        format="%(message)s",
        level=logging.WARNING,
    )
    logging.getLogger("qat").setLevel(logging.DEBUG if verbose else logging.INFO)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


def keep_to_warnings() -> None:
    """Log only warnings, on all ranks but the first, so that other lines appear once."""
    logging.getLogger("qat").setLevel(logging.WARNING)


@contextmanager
def progress(
    description: str, total: int | None, unit: str = "", *, done: int = 0
) -> Iterator["Ticker"]:
    """Show the progress of a piece of work on stderr; `Ticker.advance` moves it.

    A terminal shows a bar; nested pieces have one below the other. Elsewhere a line is logged after
    a few seconds, and then once a minute. Only the main thread shows progress, and only the first
    rank.

    Args:
        description: name of the work.
        total: number of parts; None if unknown.
        unit: name of the parts.
        done: parts that an earlier run did.
    """
    ticker = Ticker(description, total, unit, done)
    is_first = logging.getLogger("qat").level < logging.WARNING
    if not is_first or threading.current_thread() is not threading.main_thread():
        yield ticker
    elif console.is_terminal and not console.is_dumb_terminal:
        with _bars() as bars:
            task = bars.add_task("", total=total, completed=done, ticker=ticker)
            ticker.on_advance = lambda: bars.update(task, completed=ticker.done, total=ticker.total)
            try:
                yield ticker
            finally:
                bars.remove_task(task)
    else:
        # a nested piece of work logs only if it is long: the outer one shows progress too
        ticker.on_advance = _logging(ticker, LINE_EVERY_S if _LOGGED else FIRST_LINE_S)
        _LOGGED.append(ticker)
        try:
            yield ticker
        finally:
            _LOGGED.remove(ticker)


class Ticker:
    """Counts the finished parts of a piece of work."""

    def __init__(self, description: str, total: int | None, unit: str, done: int) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.done = done
        self.text = ""
        """The latest text of `note`."""
        self.on_advance: Callable[[], None] = lambda: None
        """Callback after each part."""
        self._latest = 0.0
        self._timed: tuple[float, int] | None = None
        """Time of the first finished part, which alone may include compilation, and the count
        then."""

    def advance(self, count: int = 1) -> None:
        """Add `count` finished parts."""
        self.done += count
        self._latest = time.monotonic()
        if self._timed is None:
            self._timed = (self._latest, self.done)
        self.on_advance()

    def reach(self, done: int) -> None:
        """Set the number of finished parts, unless more are finished already."""
        if done > self.done:
            self.advance(done - self.done)

    def skip(self, count: int) -> None:
        """Add `count` parts that were done before and do not count for the speed."""
        self.done += count
        self._timed = None if self._timed is None else (self._timed[0], self._timed[1] + count)

    def note(self, text: str) -> None:
        """Show `text` with the progress from the next part on."""
        self.text = text

    def left(self) -> str:
        """Return the estimated remaining time at the current speed; empty if it is unknown."""
        if self._timed is None or self.total is None or self.done >= self.total:
            return ""
        began, before = self._timed
        if self.done == before:
            return ""
        whole_s = (self._latest - began) / (self.done - before) * (self.total - self.done)
        return f"about {duration(max(0.0, whole_s - (time.monotonic() - self._latest)))} left"


def _logging(ticker: Ticker, first_s: float) -> Callable[[], None]:
    """Return a function that logs the progress of a piece of work if a line is due."""
    due = time.monotonic() + first_s

    def log() -> None:
        nonlocal due
        if time.monotonic() < due:
            return
        due = time.monotonic() + LINE_EVERY_S
        total = "" if ticker.total is None else f" of {ticker.total:,}"
        begin = f"{ticker.description}: {ticker.done:,}{total} {ticker.unit}".rstrip()
        logger.info("%s", ", ".join(filter(None, [begin, ticker.text, ticker.left()])))

    return log


_SHOWN: list["Progress"] = []
"""The progress bars of this process's terminal, if any."""
_LOGGED: list[Ticker] = []
"""Current pieces of work with log lines, outermost first."""


@contextmanager
def _bars() -> Iterator["Progress"]:
    """Yield the progress bars of the terminal; nested blocks share those of the outer one."""
    if _SHOWN:
        yield _SHOWN[0]
        return
    # imported here: `qat --help` shows no bar
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task

    class _TextColumn(ProgressColumn):
        """Return a column whose text is computed again at each refresh, without markup."""

        def __init__(self, of: Callable[[Ticker], str]) -> None:
            super().__init__()
            self._of = of

        def render(self, task: Task) -> Text:
            return Text(printable(self._of(task.fields["ticker"])), no_wrap=True)

    bars = Progress(
        _TextColumn(lambda ticker: ticker.description),
        BarColumn(),
        MofNCompleteColumn(),
        _TextColumn(lambda ticker: ticker.unit),
        _TextColumn(lambda ticker: "  ".join(filter(None, [ticker.text, ticker.left()]))),
        console=console,
        transient=True,
    )
    with bars:
        _SHOWN.append(bars)
        try:
            yield bars
        finally:
            _SHOWN.remove(bars)


def duration(seconds: float) -> str:
    """Format seconds for people: `40 s`, `12 min`, `3.4 h`, `11 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.0f} days"


def heartbeat_file(rank: int) -> str:
    """Return the name of a rank's heartbeat file: `heartbeat-rank0.jsonl`."""
    return f"heartbeat-rank{rank}.jsonl"


def events_file(rank: int) -> str:
    """Return the name of a rank's event file: `events.jsonl` for the first one."""
    return f"events-rank{rank}.jsonl" if rank else "events.jsonl"


class Lines:
    """An append-only text file. After `append` returns, its line is written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab+", buffering=0)
        self._file.truncate(_whole_bytes(self._file))  # without half a line that a crash left

    def append(self, text: str) -> None:
        """Append `text` and a line feed.

        Raises:
            OSError: it could not be written (a full disk); a partial line is removed.
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
    """Return the bytes up to the last line feed."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


class JsonLines(Lines):
    """An append-only file of JSON objects, one per line, each written whole or not at all."""

    def write(self, **values: object) -> None:
        """Append one object; keys carry their unit (`loss_nats`, `tokens_per_s`).

        Raises:
            OSError: see `Lines.append`.
        """
        self.append(json.dumps(values))


def read_json_lines(path: Path) -> list[dict]:
    """Return the objects of a JSON-lines file.

    An incomplete or zeroed last line, as a crash leaves it, is skipped.

    Raises:
        CheckpointError: another line is damaged.
    """
    return [found for _, found in _read(path)]


class Tail:
    """Incremental reader that returns each complete line of a JSON lines file once.

    The file may not exist yet, and may only grow.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict]:
        """Return the objects of the lines that were completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [parse_json(line) for line in whole.splitlines()]


def cut_after(path: Path, step: int) -> None:
    """Truncate a file of JSON lines to those up to `step` if it exists; step 0 empties it.

    Raises:
        CheckpointError: a line is damaged, or has no step.
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
    write_atomically(path, b"".join(kept))


def _read(path: Path) -> list[tuple[bytes, dict]]:
    """Return each complete line with its object."""
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    found = []
    for number, line in enumerate(lines, 1):
        try:
            entry = parse_json(line)
            if not isinstance(entry, dict):
                raise ValueError(f"it is a {type(entry).__name__}")
            found.append((line, entry))
        except ValueError as error:
            if number < len(lines) or b"\0" not in line:
                raise CheckpointError(
                    f"{path}: line {number} of {len(lines)} is damaged ({error}), expected a JSON "
                    "object; restore the file or remove that line"
                ) from None
    return found
