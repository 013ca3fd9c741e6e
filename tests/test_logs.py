"""Metrics files, progress and logging."""

import errno
import io
import logging
import os
import threading
from pathlib import Path
from typing import BinaryIO

import pytest
from rich.table import Table

from qat import logs
from qat.errors import CheckpointError
from qat.logs import (
    JsonLines,
    Lines,
    Tail,
    configure,
    cut_after,
    duration,
    keep_to_warnings,
    progress,
    read_json_lines,
)


def test_lines_are_there_as_soon_as_written(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write(step=1, loss_nats=0.5, sample=None)
    assert read_json_lines(tmp_path / "m.jsonl") == [{"step": 1, "loss_nats": 0.5, "sample": None}]
    lines.close()


def test_half_a_line_or_zeros_that_a_power_loss_left_are_no_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for rest in (b'{"st', b"\0" * 5000, b"\0" * 9 + b'"x": 1}\n'):
        path.write_bytes(b'{"step": 1}\n' + rest)
        assert read_json_lines(path) == [{"step": 1}]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    for bad in (b'{"st', b"[1]", b'{"a": "\xff"}', b"\0\0"):
        path = tmp_path / "m.jsonl"
        path.write_bytes(bad + b'\n{"step": 2}\n')
        with pytest.raises(CheckpointError, match=r"m\.jsonl: line 1 of 2 is damaged .*restore"):
            read_json_lines(path)


@pytest.mark.parametrize("rest", [b'{"st', b"\0" * 9000])
def test_what_a_crash_left_behind_the_last_line_is_cut_off(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + rest)
    lines = JsonLines(path)
    lines.write(step=2)
    lines.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_line_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "m.csv")
    lines.append("1,2")
    real, lines._file = lines._file, _Full(lines._file)
    with pytest.raises(OSError, match=r"No space left.*m\.csv"):
        lines.append("3,4")
    lines._file = real
    lines.append("5,6")
    lines.close()
    assert (tmp_path / "m.csv").read_text() == "1,2\n5,6\n"


class _Full:
    """A file that takes one more octet."""

    def __init__(self, file: BinaryIO) -> None:
        self.fileno, self.truncate, self._file, self._room = file.fileno, file.truncate, file, 1

    def write(self, octets: bytes) -> int:
        if self._room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._room -= 1
        return self._file.write(octets[:1])


def test_a_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"step"')
    assert tail.read() == [{"step": 1}] and tail.read() == []
    with path.open("a") as file:
        file.write(": 2}\n")
    assert tail.read() == [{"step": 2}]


def test_a_file_is_cut_back_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    cut_after(path, 3)
    assert not path.exists()
    path.write_text('{"step": 0}\n{"step":  2}\n{"step": 4}\n{"st')
    cut_after(path, 3)
    assert path.read_text() == '{"step": 0}\n{"step":  2}\n'
    cut_after(path, 0)
    assert path.read_text() == ""
    path.write_text('{"kind": "eval"}\n')
    with pytest.raises(CheckpointError, match="without a step"):
        cut_after(path, 3)


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(logs.time, "monotonic", clock)
    return clock


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Capture what the package logs without a terminal."""
    caplog.set_level(logging.INFO, logger="qat")
    return caplog


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Capture what is written to a terminal."""
    screen = io.StringIO()
    console = logs._Console(file=screen, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(logs, "console", console)
    return screen


def test_progress_speaks_off_a_terminal_but_once_a_minute(clock: Clock, told) -> None:
    with progress("work", 1000, "steps", done=100) as ticker:
        ticker.advance()  # in the first seconds
        for _ in range(600):
            clock.now += 1
            ticker.note(f"loss {clock.now:g}")
            ticker.advance()
    lines = [record.message for record in told.records]
    assert lines[0] == "work: 106 of 1,000 steps, loss 105, about 15 min left"
    assert lines[1] == "work: 166 of 1,000 steps, loss 165, about 14 min left"
    assert len(lines) == 10


def test_short_work_is_silent_off_a_terminal(clock: Clock, told) -> None:
    with progress("work", total=2, unit="steps") as ticker:
        for _ in range(2):
            clock.now += 2
            ticker.advance(1)
    assert not told.records


def test_a_piece_inside_another_is_silent_for_longer(clock: Clock, told) -> None:
    with progress("outer", total=2) as outer:
        for seconds in (10, 70):
            with progress("inner", total=2) as inner:
                clock.now += seconds
                inner.advance()
            outer.advance()
    assert told.messages == ["outer: 1 of 2", "inner: 1 of 2", "outer: 2 of 2"]
    assert not logs._LOGGED


def test_a_slow_first_part_is_told_without_a_guess(clock: Clock, told) -> None:
    with progress("work", total=1000, unit="steps") as ticker:
        clock.now += 90  # compiling
        ticker.advance()
        clock.now += 60
        ticker.advance()
    lines = [record.message for record in told.records]
    assert lines == ["work: 1 of 1,000 steps", "work: 2 of 1,000 steps, about 16.6 h left"]


def test_what_was_there_before_makes_nothing_faster(clock: Clock, told) -> None:
    with progress("work", total=None, unit="rows") as ticker:
        ticker.skip(500)
        ticker.advance()
        ticker.total = 1000
        ticker.skip(9)
        clock.now += 10
        ticker.advance()
    assert told.messages == ["work: 511 of 1,000 rows, about 82 min left"]


def test_the_time_that_is_left_runs_down_between_two_parts(clock: Clock) -> None:
    with progress("work", total=12) as ticker:
        for _ in range(3):
            ticker.advance()
            clock.now += 10
        assert ticker.left() == "about 80 s left"
        clock.now += 30
        assert ticker.left() == "about 50 s left"
        clock.now += 100
        assert ticker.left() == "about 0 s left"


def test_other_threads_and_other_ranks_are_silent(clock: Clock, told) -> None:
    def work() -> None:
        with progress("work", total=2) as ticker:
            clock.now += 100
            ticker.advance()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    keep_to_warnings()
    work()
    assert not told.records


def test_a_log_line_and_a_bar_do_not_collide(terminal: io.StringIO) -> None:
    handler = logs._ConsoleHandler()
    logger = logging.getLogger("qat.collide")
    logger.addHandler(handler)
    try:
        with progress("outer [x]", total=3, unit="steps") as outer:
            with progress("inner", total=7, unit="rows") as inner:
                inner.advance()
                logger.warning("a line :smile: with [brackets] and %s", "x" * 200)
            outer.note("loss 3")
            logs._SHOWN[0].refresh()
            outer.advance()
    finally:
        logger.removeHandler(handler)
    sent = terminal.getvalue()
    line = f"a line :smile: with [brackets] and {'x' * 200}\n"
    assert line in sent
    # the line begins where the bars were wiped away, and the bars come again below it
    before, after = sent.split(line)
    assert before.endswith("\x1b[2K") and "outer [x]" in after and "inner" in after
    assert "loss 3" in after
    assert not logs._SHOWN


def test_a_bar_ends_with_its_work(terminal: io.StringIO) -> None:
    with progress("outer", total=3) as outer:
        with pytest.raises(ValueError, match="broken"), progress("inner", total=7):
            raise ValueError("broken")
        terminal.truncate(0)
        outer.advance()
        logs._SHOWN[0].refresh()
        assert "inner" not in terminal.getvalue()


def test_a_reader_who_left_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as left:
        monkeypatch.setattr(logs, "console", logs._Console(file=left))
        record = logging.LogRecord("qat", logging.INFO, "", 0, "a line", (), None)
        for _ in range(2):
            logs._ConsoleHandler().emit(record)
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)


@pytest.mark.parametrize(("verbose", "level"), [(False, logging.INFO), (True, logging.DEBUG)])
def test_verbose_logs_more(verbose: bool, level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.NOTSET, logger="qat")  # which puts the level back afterwards
    configure(verbose)
    assert logging.getLogger("qat").level == level


def test_durations_are_for_people() -> None:
    for seconds, words in (
        (0.4, "0 s"),
        (89, "89 s"),
        (90, "2 min"),
        (5399, "90 min"),
        (5400, "1.5 h"),
        (2.5e5, "69.4 h"),
        (1e6, "12 days"),
    ):
        assert duration(seconds) == words


EVIL = "a\x1b]0;title\x07b \x9b31m [red]c[/red] :fire: \u202ed \ud800 \r\nsecond\tline"
SHOWN = ("a\\x1b]0;title\\x07b \\x9b31m [red]c[/red] :fire: \\u202ed \\ud800 \\r", "second")


def test_words_of_strangers_command_no_terminal() -> None:
    assert logs.printable(EVIL) == f"{SHOWN[0]}\n{SHOWN[1]}\tline"
    screen = io.StringIO()
    console = logs.Terminal(file=screen, force_terminal=True, width=100, color_system=None)
    console.print(EVIL)
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    console.print(table)
    said = screen.getvalue()
    assert all(said.count(words) == 4 for words in SHOWN)
    assert not set(said) & {"\x1b", "\x9b", "\x07", "\r", "\u202e"}


def test_log_lines_command_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(logs, "console", logs._Console(file=screen))
    logs._ConsoleHandler().emit(logging.makeLogRecord({"msg": "%s", "args": (EVIL,)}))
    assert SHOWN[0] in screen.getvalue() and "\x1b" not in screen.getvalue()


def test_no_verb_prints_by_another_console() -> None:
    verbs = Path(logs.__file__).parent.rglob("*.py")
    own = {path.name for path in verbs if "rich.console import Console" in path.read_text()}
    assert own == {"logs.py", "parser.py"}  # the latter names the type that cyclopts hands it
