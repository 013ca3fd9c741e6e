"""The scale table's arithmetic, by hand."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from qat.models.cost import StepBytes


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "speedrun"))
    import scale_table

    yield scale_table
    sys.modules.pop("scale_table")


def test_the_tables(script: ModuleType, monkeypatch: object, capsys: object) -> None:
    flags = ["--train", "1=36000", "--cache", "2=72000", "--bytes", "all=100", "--length", "10"]
    monkeypatch.setattr("sys.argv", ["scale_table.py", *flags])
    monkeypatch.setattr(script, "STUDENTS", ("tiny",))
    script.main()
    printed = capsys.readouterr().out
    assert "| all: 100 B, `--shard-size 1048576` | 0.10, 96 |" in printed  # 1e11 / (2**20 * 1000)
    assert "| train 4B | 9,000 (extrapolated) | 31 h |" in printed
    assert "| cache 4B | 36,000 (extrapolated) | 8 h |" in printed
    assert "| latents, fp32, fp32 moments | 0.0, 0.0 |" in printed
    assert "| latents, fp32, fp32 moments | tiny | tiny | tiny | tiny | tiny |" in printed


def test_a_device_holds_the_largest_student_beside_its_activations(script: ModuleType) -> None:
    gib = script.GIB
    held = {
        "all": {
            "small": StepBytes(10 * gib, 0, 0, 30 * gib, gib, 0),
            "large": StepBytes(10 * gib, 0, 0, 60 * gib, gib, 0),
        }
    }
    assert [[*cells] for cells in script.memory(held)] == [["all", "40.0, 11.0", "70.0, 11.0"]]
    ((_, *cells),) = script.limits(held, 12.0)  # of 23.5, 39.4, 79.1, 139.8 and 178.4 GiB
    assert cells[:2] == ["large (at once: none)"] * 2
    assert cells[2:] == ["large (at once: small)", "large", "large"]


def test_shards_have_up_to_a_gib(script: ModuleType) -> None:
    for sequence_bytes in (100, 14_499, 3e6):
        assert 2**29 < script.shard_size(sequence_bytes) * sequence_bytes <= 2**30


def test_a_measured_rate_is_taken_as_it_is(script: ModuleType) -> None:
    measured = [(0.6, 100.0), (4.0, 10.0)]
    assert script.speed(measured, 4.0) == (10.0, True)
    assert script.speed(measured, 8.0) == (5.0, False)
