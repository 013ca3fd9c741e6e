"""Kills a sweep with SIGKILL at random moments, and looks for leaks where there are some and none.

python tests/stress/measure_sweep.py --kills 10 --figures FILE.jsonl
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from fault_records import record

from qat.bench.stats import leak_found_after
from qat.bench.sweep.run import MANIFEST

RECIPE = """
name = "killed"
verb = "command"
command = ["{python}", "-S", "-c", "import time; time.sleep({nap})"]
repeats = 3
timeout_s = 30
[settings]
nap = 0.2
[product]
a = [1, 2, 3, 4, 5, 6, 7, 8]
"""
NUM_RUNS, RUNS_PER_KILL = 24, 2.0
LEAKY, CLEAN, LEAKY_STEPS, CLEAN_STEPS = 20, 20, 200, 10_000


def main() -> None:
    """Measure and record the three figures; the exit status tells whether all are reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        survived = survive(Path(scratch), arguments.kills, random.Random(arguments.seed))
    found = [leak_found_after(leaking(seed)) for seed in range(LEAKY)]
    alarms = sum(leak_found_after(clean(seed)) is not None for seed in range(CLEAN))
    slowest = CLEAN_STEPS if None in found else max(found)
    print(
        f"{survived} kills survived; leaks found after {sorted(map(str, found))}; {alarms} alarms"
    )
    if arguments.figures:
        file = arguments.figures
        record(file, "sweep_kills_survived", survived, "kills", ">= 10")
        record(file, "leak_found_steps", slowest, "steps", "<= 200", runs=LEAKY)
        record(file, "leak_false_alarms", alarms, "alarms", "0", runs=CLEAN)
    raise SystemExit(survived < arguments.kills or slowest > LEAKY_STEPS or alarms > 0)


def survive(scratch: Path, kills: int, rng: random.Random) -> int:
    """Kills after which the sweep went on to the manifest of an unbroken one; 0 if it did not.

    Rows that were there before a kill must be there after it, byte for byte.
    """
    began = time.monotonic()
    start(scratch, "whole").wait()
    duration_s = time.monotonic() - began
    survived, rows = 0, {}
    while survived < kills:
        process = start(scratch, "killed")
        wait_for_life(process, scratch / "killed" / MANIFEST)
        time.sleep(rng.uniform(0, RUNS_PER_KILL * duration_s / NUM_RUNS))
        if process.poll() is not None:
            raise SystemExit(f"the sweep ended after {survived} kills; it is too short for more")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        now = read_rows(scratch / "killed")
        if any(now.get(name) != text for name, text in rows.items()):
            print(f"kill {survived + 1}: a finished run was lost or repeated")
            return 0
        survived, rows = survived + 1, now
        print(f"kill {survived}: {len(rows)} of {NUM_RUNS} runs were finished")
    start(scratch, "killed").wait()
    final = read_rows(scratch / "killed")
    is_kept = all(final.get(name) == text for name, text in rows.items())
    is_same = manifest(scratch / "killed") == manifest(scratch / "whole")
    print(f"finished rows kept: {is_kept}; same manifest: {is_same}; {len(final)} rows")
    return survived if is_kept and is_same and len(final) == NUM_RUNS else 0


def start(scratch: Path, name: str) -> subprocess.Popen:
    """The sweep in a process of its own."""
    recipe = scratch / "recipe.toml"
    if not recipe.exists():
        recipe.write_text(RECIPE, encoding="utf-8")
    command = [sys.executable, "-m", "qat", "bench", "sweep", str(recipe)]
    command += ["--allow-command", "--out", str(scratch / name)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_life(process: subprocess.Popen, manifest: Path) -> None:
    """Wait until a sweep that was started has written its manifest anew: from then on it runs."""
    manifest.unlink(missing_ok=True)
    while not manifest.exists() and process.poll() is None:
        time.sleep(0.01)


def read_rows(out: Path) -> dict[str, str]:
    """The rows of finished runs by file name; each must be whole."""
    texts = {path.name: path.read_text() for path in (out / "rows").glob("*.json")}
    for text in texts.values():
        json.loads(text)
    return texts


def manifest(out: Path) -> str:
    """What the sweep says that it consists of."""
    return (out / MANIFEST).read_text(encoding="utf-8")


def leaking(seed: int) -> list[float]:
    """Memory in MiB over 200 steps: 1 MiB a step, a warm-up, a saw and noise on top."""
    rng, step = np.random.default_rng(seed), np.arange(LEAKY_STEPS)
    return list(step + 2000 + _disturbed(rng, step))


def clean(seed: int) -> list[float]:
    """Memory in MiB over 10,000 steps that only warm up, rise and fall, and scatter."""
    rng, step = np.random.default_rng(seed), np.arange(CLEAN_STEPS)
    return list(2000 + _disturbed(rng, step))


def _disturbed(rng: np.random.Generator, step: np.ndarray) -> np.ndarray:
    height, teeth = rng.choice([0, 16, 48]), rng.integers(2, 11)
    saw = height * ((step + rng.integers(teeth)) % teeth) / teeth
    filling = rng.choice([100, 1000]) * (1 - np.exp(-step / rng.choice([3, 10])))
    return saw + filling + rng.normal(0, rng.choice([0.1, 1, 3]), len(step))


if __name__ == "__main__":
    main()
