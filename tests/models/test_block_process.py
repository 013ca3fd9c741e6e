"""Blocks that another process makes: the same cache, errors and log lines, and nothing left."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from cache_case import contents, texts
from ranks_case import run_ranks
from tiny import save_tiny

from qat.backend.cpu import CpuBackend
from qat.cli import run_verb
from qat.data.cache import read_manifest
from qat.data.config import CacheConfig
from qat.errors import CacheError, DataError
from qat.models import block_process
from qat.models.block_process import blocks_apart

FEW = {"sequence_length": 32, "shard_size": 4, "held_out": 0.2}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen]:
    """The processes that the test starts."""
    found = []

    class Noted(subprocess.Popen):
        def __init__(self, *args: object, **named: object) -> None:
            super().__init__(*args, **named)
            found.append(self)

    monkeypatch.setattr(block_process.subprocess, "Popen", Noted)
    return found


def chats(path: Path, bad: int | None) -> Path:
    rows = [
        json.dumps({"prompt": text, "completion": text[::-1]}) if number != bad else "{"
        for number, text in enumerate(texts(120))
    ]
    path.write_text("\n".join(rows))
    return path


@pytest.mark.slow
def test_the_cache_is_that_of_one_process(tmp_path, monkeypatch, started) -> None:
    save_tiny(tmp_path / "teacher")
    data = chats(tmp_path / "chats.jsonl", bad=100)
    words = ["--teacher", tmp_path / "teacher", "--data", data, "--top-k", "4", "--device", "cpu"]
    words += [part for name, value in FEW.items() for part in (f"--{name}", value)]

    def build(name: str) -> str:
        try:
            run_verb(["cache", *map(str, words), "--out", str(tmp_path / name)])
        except DataError as error:
            return str(error)
        return ""

    told = build("one")
    assert "row 101 is not JSON" in told
    monkeypatch.setattr(CpuBackend, "batches_ahead", 1)
    # which Python ignores there
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path / "a 'folder' {of} mine"])
    assert build("two") == told
    assert 2 < len(read_manifest(tmp_path / "two").shards)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    chats(data, bad=None)
    assert build("two") == ""
    monkeypatch.undo()
    assert build("one") == ""
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert [each.poll() is None for each in started if "block_process" in str(each.args)] == [
        False,
        False,
    ]


def test_a_process_that_dies_is_told(monkeypatch, started: list, caplog) -> None:
    caplog.set_level("INFO", logger="qat")
    record = "dict(name='qat.data', msg='a line', levelno=20, levelname='INFO')"
    child = f"""
import logging, pickle, sys
pickle.dump(logging.makeLogRecord({record}), sys.stdout.buffer)
raise SystemExit(3)
"""
    monkeypatch.setattr(block_process, "CHILD", child)
    config = CacheConfig(teacher="t", data="stdlib", **FEW)
    with (
        pytest.raises(CacheError, match="ended with status 3, expected all blocks"),
        blocks_apart(config, config.settings("plain")) as found,
    ):
        next(found)
    assert started[0].returncode == 3 and "a line" in caplog.messages


@pytest.mark.slow
def test_an_error_that_cannot_be_sent_is_printed(monkeypatch, capfd) -> None:
    child = """
class Odd(Exception):
    def __init__(self, *, why):
        super().__init__(why)
def fail(*_):
    raise Odd(why="the hub is away")
from qat.models import block_process
block_process.open_source = fail
block_process.serve()
"""
    monkeypatch.setattr(
        block_process, "CHILD", block_process.CHILD.removesuffix("serve()\n") + child
    )
    config = CacheConfig(teacher="t", data="stdlib", **FEW)
    with (
        pytest.raises(CacheError, match="ended with status 1"),
        blocks_apart(config, config.settings("plain")) as found,
    ):
        next(found)
    assert "Odd: the hub is away" in capfd.readouterr().err


@pytest.mark.slow
def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path, started: list) -> None:
    save_tiny(tmp_path / "teacher")
    config = CacheConfig(teacher=str(tmp_path / "teacher"), data="stdlib", **FEW)

    def killed(_: object) -> None:
        with blocks_apart(config, config.settings("plain")) as found:
            assert [each.index for each in islice(found, 3)] == [0, 1, 2]
            (tmp_path / "pid").write_text(str(started[0].pid))
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_ranks(1, killed, tmp_path) == [None]
    state = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    end = time.monotonic() + 20
    while state.exists() and ") Z" not in state.read_text():  # nobody may be there to reap it
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.05)
