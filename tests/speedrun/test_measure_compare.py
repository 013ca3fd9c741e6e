"""The script that plants slowdowns runs, small, on a CPU, and counts what it says it counts."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))


def test_planted_and_equal_kernels_are_counted(tmp_path: Path, monkeypatch, capsys) -> None:
    import measure_compare

    pieces = []

    def clock(work: Callable[[], None], calls: int) -> float:
        """One second a piece of the kernel's work."""
        pieces.clear()
        work()
        return float(len(pieces))

    monkeypatch.setattr(measure_compare, "form", lambda *_, **__: pieces.append(1))
    monkeypatch.setattr(measure_compare, "cpu_clock", clock)
    monkeypatch.setattr(measure_compare, "ON_CPU", measure_compare.Scale(8, 32, 3, 1e-5))
    figures = tmp_path / "figures.jsonl"
    with pytest.raises(SystemExit) as stop:
        measure_compare.measure(device="cpu", comparisons=6, samples=3, figures=figures)
    assert stop.value.code == 0
    found = {row["figure"]: row for row in map(json.loads, figures.read_text().splitlines())}
    assert found["planted_slowdown_flagged"]["value"] == 6
    assert found["false_alarms"]["value"] == 0
    assert found["false_alarms_not_in_turns"]["unit"] == "of 5 comparisons"
    assert "slowed: ratio 1.1500, from 1.1500 to 1.1500" in capsys.readouterr().out


def test_the_clock_is_the_processors(monkeypatch) -> None:
    import measure_compare

    assert measure_compare.cpu_clock(lambda: time.sleep(0.02), 1) < 0.01
    scale = measure_compare.Scale(8, 32, 3, 1e-5)
    work = measure_compare.kernel(scale, measure_compare.select("cpu"), 1)
    assert measure_compare.calls_in_a_sample(work, measure_compare.cpu_clock, 1e-5) >= 1
