"""Metrics files, progress and logging."""

import errno
import logging
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from qat.errors import CheckpointError
from qat.logs import JsonLines, Lines, configure, cut_after, progress, read_json_lines


def test_lines_are_there_as_soon_as_written(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write(step=1, loss_nats=0.5, sample=None)
    assert read_json_lines(tmp_path / "m.jsonl") == [{"step": 1, "loss_nats": 0.5, "sample": None}]
    lines.close()


def test_reopened_file_goes_on(tmp_path: Path) -> None:
    for step in (1, 2):
        lines = JsonLines(tmp_path / "m.jsonl")
        lines.write(step=step)
        lines.close()
    assert [row["step"] for row in read_json_lines(tmp_path / "m.jsonl")] == [1, 2]


def test_closed_file_refuses(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.close()
    with pytest.raises(ValueError, match="closed"):
        lines.write(step=1)


def test_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert read_json_lines(path) == [{"step": 1}]


def test_zeros_that_a_power_loss_left_are_no_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for zeros in (b"\0" * 5000, b"\0" * 9 + b'"x": 1}\n'):
        path.write_bytes(b'{"step": 1}\n' + zeros)
        assert read_json_lines(path) == [{"step": 1}]


@pytest.mark.parametrize("bad", [b'{"st', b"[1]", b'{"a": "\xff"}', b"\0\0"])
def test_a_damaged_line_is_named(tmp_path: Path, bad: bytes) -> None:
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


def test_progress_is_silent_without_a_terminal(capsys) -> None:
    with progress("work", total=2, unit="steps") as ticker:
        ticker.advance(1)
        ticker.advance(1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("verbose", "level"), [(False, logging.INFO), (True, logging.DEBUG)])
def test_verbose_logs_more(verbose: bool, level: int) -> None:
    configure(verbose)
    assert logging.getLogger("qat").level == level
