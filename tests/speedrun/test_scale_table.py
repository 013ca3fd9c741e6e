"""The scale table's arithmetic, by hand."""

import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "speedrun"))
    import scale_table

    yield scale_table
    sys.modules.pop("scale_table")


def test_the_tables(script: ModuleType, monkeypatch: object, capsys: object) -> None:
    flags = ["--train", "1=36000", "--cache", "2=72000", "--bytes", "all=100", "--length", "10"]
    monkeypatch.setattr("sys.argv", ["scale_table.py", *flags])
    script.main()
    printed = capsys.readouterr().out
    assert "| all: 100 B, `--shard-size 1048576` | 0.10, 96 |" in printed  # 1e11 / (2**20 * 1000)
    assert "| train 4B | 9,000 (extrapolated) | 31 h |" in printed
    assert "| cache 4B | 36,000 (extrapolated) | 8 h |" in printed
    assert "| frozen codes | 2.35 | 50B (of the above: 32B) |" in printed


def test_shards_have_up_to_a_gib(script: ModuleType) -> None:
    for sequence_bytes in (100, 14_499, 3e6):
        assert 2**29 < script.shard_size(sequence_bytes) * sequence_bytes <= 2**30


def test_a_measured_rate_is_taken_as_it_is(script: ModuleType) -> None:
    measured = [(0.6, 100.0), (4.0, 10.0)]
    assert script.speed(measured, 4.0) == (10.0, True)
    assert script.speed(measured, 8.0) == (5.0, False)
