"""The script that times the demo beside another one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SPEEDRUN = Path(__file__).parents[2] / "speedrun"
DEMO = "print('a table'); print('{\"seconds\": %s}')"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))


def test_the_figure_is_a_ratio_of_two_demos(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import measure_shared_cores

    others: list[subprocess.Popen] = []

    def start(place: Path, steps: int, stdout: int) -> subprocess.Popen:
        is_other = stdout == subprocess.DEVNULL
        running = [other for other in others if other.poll() is None]
        code = "import time; time.sleep(60)" if is_other else DEMO % (25 if running else 10)
        command = [sys.executable, "-S", "-c", code]
        process = subprocess.Popen(command, stdout=stdout, text=True)
        others.extend([process] if is_other else [])
        return process

    monkeypatch.setattr(measure_shared_cores, "_start", start)
    measure_shared_cores.measure(figures=tmp_path / "figures.jsonl", rounds=2)
    lines = (tmp_path / "figures.jsonl").read_text().splitlines()
    found = {line["figure"]: line["value"] for line in map(json.loads, lines)}
    assert found == {"demo_beside_another_ratio": 2.5, "demo_alone_s": 10}
    assert len(others) == 2 and all(other.returncode for other in others)


def test_another_demo_that_ends_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import measure_shared_cores

    def start(place: Path, steps: int, stdout: int) -> subprocess.Popen:
        command = [sys.executable, "-S", "-c", DEMO % 1]
        process = subprocess.Popen(command, stdout=stdout, text=True)
        if stdout == subprocess.DEVNULL:
            process.wait()
        return process

    monkeypatch.setattr(measure_shared_cores, "_start", start)
    with pytest.raises(RuntimeError, match="ended early, with status 0"):
        measure_shared_cores.measure()
