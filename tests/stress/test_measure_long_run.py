"""The script that takes many steps: it tells what grows from what does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))


def test_what_grows_is_told() -> None:
    from measure_long_run import Look, judged

    saving = {370: 3, 371: 2}
    flat = [Look(100.0 + step % 7, 12 + saving.get(step, 0)) for step in range(400)]
    problems: list[str] = []
    slope, half_width = judged(flat, 24.0, problems)
    assert problems == [] and abs(slope) <= half_width + 1e-9
    leak = [Look(100.0 + step / 4 + step % 7, 12 + step // 50) for step in range(400)]
    slope, _ = judged(leak, 10.0, problems)
    assert slope == pytest.approx(10.0, rel=0.05)  # a quarter MiB a look, 40 looks an hour
    assert problems == ["memory grew by 80.0 MiB", "open files grew from 16 to 19"]
    with pytest.raises(ValueError, match="take more steps"):
        judged(flat[:10], 1.0, [])


def test_a_look_sees_memory_and_handles(tmp_path: Path) -> None:
    from measure_long_run import Clock, look

    before = look()
    with (tmp_path / "file").open("w"):
        assert look().handles == before.handles + 1
    assert before.rss_mib > 10
    clock = Clock(3600.0)
    began, clock.steps = clock(), 2
    assert clock() - began == pytest.approx(7200, abs=1)


@pytest.mark.slow
def test_looking_itself_keeps_nothing() -> None:
    from measure_long_run import Looks, look

    looks = Looks(1000)
    looks.append(look())
    before = look()
    for _ in range(900):
        looks.append(look())
    after = look()
    assert after.blocks - before.blocks < 450  # other threads keep some; one a look were 900
    assert len(looks.all()) == 901
    assert looks.all()[-1].heap_mib == pytest.approx(after.heap_mib, abs=0.1)


@pytest.mark.slow
def test_a_short_long_run() -> None:
    command = [sys.executable, "tests/stress/measure_long_run.py", "--steps", "400"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=SPEEDRUN.parent, capture_output=True, text=True, check=False, env=environment
    )
    # memory still settles in so few steps; everything else must be right
    shown = result.stdout
    assert "training.csv: 8" in shown and "metrics.json: 400" in shown, shown + result.stderr
    assert " instead of " not in shown and "open files grew" not in shown
