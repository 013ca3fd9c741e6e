"""One logger, one progress bar, one metrics file: how a run tells what it does."""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task
from rich.text import Text

from qat.errors import CheckpointError
from qat.files import parse_json, write_atomically

logger = logging.getLogger(__name__)


UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters by which a text commands a terminal, hides, or cannot be written at all."""


def printable(text: str) -> str:
    """`text`, which anybody may have written, with its control characters shown as escapes.

    Line feeds and tabs stay.
    """
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class Terminal(Console):
    """A console for words that anybody may have written: they are shown, none is obeyed.

    No markup, no emoji; control characters of texts and tables are shown as escapes.
    """

    def __init__(self, **how: object) -> None:
        super().__init__(markup=False, emoji=False, **how)

    def render_str(self, text: str, **how: object) -> Text:
        """What rich shows of a text, in tables too."""
        return super().render_str(printable(text), **how)


class _Console(Terminal):
    def on_broken_pipe(self) -> None:
        """Nobody reads any more: say nothing, and let the work go on."""
        self.quiet = True


console = _Console(stderr=True)
"""Where bars and log lines go: a line that comes while a bar is shown is printed above it."""

FIRST_LINE_S, LINE_EVERY_S = 5.0, 60.0
"""Off a terminal, work that takes longer than the first says how far it is, then as often as the
second."""

RECIPE, FACTS = "recipe.toml", "run.json"
METRICS, HEARTBEAT = "metrics.jsonl", "heartbeat-rank0.jsonl"
"""A run's files: what was asked, what it ran on, its numbers, and its speed."""
TRAINING_CSV, VAL_CSV, SUMMARY = "training.csv", "val.csv", "metrics.json"
"""The same numbers as tables, and in the end what the run came to."""
EXAM, SAMPLES = "eval.json", "samples.json"
"""Files of `qat run` and `qat demo`: what each model scored, and what it wrote after one prompt."""
STATE_TENSORS = "trainer/state.safetensors"
"""Of a checkpoint: what only going on needs, by far the most of it."""

HEARTBEATS, EVENTS = "heartbeat-rank*.jsonl", "events*.jsonl"
"""Patterns of the files of all ranks."""
TAIL_BYTES = 4096
"""To read at a time when the last line feed of a file is looked for."""

QUIET = ("torchao", "torch.utils._pytree", "coremltools")
"""Loggers that warn of what nobody can mend: the first two whenever transformers finds torchao
installed, used or not; the third of what it lacks off a Mac, of versions that it was not tested
with, and of each number that it infers in float64."""


class _ConsoleHandler(logging.Handler):
    """Prints log lines on the console of the progress bars, unbroken and as they are."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line; a stream that fails does not fail the work."""
        try:
            console.out(printable(self.format(record)), highlight=False)
        except OSError:
            self.handleError(record)


def configure(verbose: bool = False) -> None:
    """Send the package's log lines to stderr; called by the command line only."""
    logging.basicConfig(
        handlers=[_ConsoleHandler()],
        format="%(message)s",
        level=logging.WARNING,
    )
    logging.getLogger("qat").setLevel(logging.DEBUG if verbose else logging.INFO)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


def keep_to_warnings() -> None:
    """For each of several ranks but the first: what all would say, that one says."""
    logging.getLogger("qat").setLevel(logging.WARNING)


@contextmanager
def progress(
    description: str, total: int | None, unit: str = "", *, done: int = 0
) -> Iterator["Ticker"]:
    """Tell on stderr how far a piece of work is, which `Ticker.advance` moves.

    A terminal shows a bar; pieces inside one another have one below the other. Elsewhere a line is
    logged after a few seconds, and once a minute from then on. Only the main thread tells, and of
    several ranks the first.

    Args:
        description: what is done.
        total: number of parts; None if unknown.
        unit: what parts are called.
        done: parts that an earlier run did.
    """
    ticker = Ticker(description, total, unit, done)
    is_first = logging.getLogger("qat").level < logging.WARNING
    if not is_first or threading.current_thread() is not threading.main_thread():
        yield ticker
    elif console.is_terminal and not console.is_dumb_terminal:
        with _bars() as bars:
            task = bars.add_task("", total=total, completed=done, ticker=ticker)
            ticker.tell = lambda: bars.update(task, completed=ticker.done, total=ticker.total)
            try:
                yield ticker
            finally:
                bars.remove_task(task)
    else:
        # inside another piece of work a short one is that one's part
        ticker.tell = _Lines(ticker, LINE_EVERY_S if _TOLD else FIRST_LINE_S).tell
        _TOLD.append(ticker)
        try:
            yield ticker
        finally:
            _TOLD.remove(ticker)


class Ticker:
    """Counts the parts of a piece of work that are done."""

    def __init__(self, description: str, total: int | None, unit: str, done: int) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.done = done
        self.said = ""
        """What `note` was given last."""
        self.tell: Callable[[], None] = lambda: None
        """Called after each part."""
        self._latest = 0.0
        self._timed: tuple[float, int] | None = None
        """When the first part was done, which alone may be compiled, and the parts before it."""

    def advance(self, count: int = 1) -> None:
        """So many parts more are done."""
        self.done += count
        self._latest = time.monotonic()
        if self._timed is None:
            self._timed = (self._latest, self.done)
        self.tell()

    def skip(self, count: int) -> None:
        """So many parts were done before: they do not tell how fast the others go."""
        self.done += count
        self._timed = None if self._timed is None else (self._timed[0], self._timed[1] + count)

    def note(self, text: str) -> None:
        """Tell `text` too from the next part on."""
        self.said = text

    def left(self) -> str:
        """How long the rest takes at the speed until now; empty where nobody can know yet."""
        if self._timed is None or self.total is None or self.done >= self.total:
            return ""
        began, before = self._timed
        if self.done == before:
            return ""
        whole_s = (self._latest - began) / (self.done - before) * (self.total - self.done)
        return f"about {duration(max(0.0, whole_s - (time.monotonic() - self._latest)))} left"


class _Lines:
    """Logs how far a piece of work is, now and then."""

    def __init__(self, ticker: Ticker, first_s: float) -> None:
        self._ticker = ticker
        self._due = time.monotonic() + first_s

    def tell(self) -> None:
        """Log a line if one is due."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LINE_EVERY_S
        ticker = self._ticker
        total = "" if ticker.total is None else f" of {ticker.total:,}"
        begin = f"{ticker.description}: {ticker.done:,}{total} {ticker.unit}".rstrip()
        logger.info("%s", ", ".join(filter(None, [begin, ticker.said, ticker.left()])))


class _Words(ProgressColumn):
    """Words beside a bar."""

    def __init__(self, of: Callable[[Ticker], str]) -> None:
        super().__init__()
        self._of = of

    def render(self, task: Task) -> Text:
        """The text of this moment, printed as it is."""
        return Text(printable(self._of(task.fields["ticker"])), no_wrap=True)


_SHOWN: list[Progress] = []
"""The bars of this process's terminal, while there are any."""
_TOLD: list[Ticker] = []
"""Pieces of work under way that lines tell of, the outermost first."""


@contextmanager
def _bars() -> Iterator[Progress]:
    """The bars of the terminal: a block inside another one has those of the outer one."""
    if _SHOWN:
        yield _SHOWN[0]
        return
    bars = Progress(
        _Words(lambda ticker: ticker.description),
        BarColumn(),
        MofNCompleteColumn(),
        _Words(lambda ticker: ticker.unit),
        _Words(lambda ticker: "  ".join(filter(None, [ticker.said, ticker.left()]))),
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
    """A time for people: `40 s`, `12 min`, `3.4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


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
    write_atomically(path, b"".join(kept))


def _read(path: Path) -> list[tuple[bytes, dict]]:
    """Each whole line and its object."""
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
