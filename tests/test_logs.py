"""Metrics files, progress and logging."""

import logging
from pathlib import Path

import pytest

from qat.logs import JsonLines, configure, progress, read_json_lines


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


def test_progress_is_silent_without_a_terminal(capsys) -> None:
    with progress("work", total=2, unit="steps") as ticker:
        ticker.advance(1)
        ticker.advance(1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("verbose", "level"), [(False, logging.INFO), (True, logging.DEBUG)])
def test_verbose_logs_more(verbose: bool, level: int) -> None:
    configure(verbose)
    assert logging.getLogger("qat").level == level
