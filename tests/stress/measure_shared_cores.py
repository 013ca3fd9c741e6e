"""How much slower the demo is beside another demo on the same cores.

Both are processes of their own. Rounds alone and beside the other take turns, so that a machine
that others use too is as busy in both. The demo's own time is taken, without its imports.

python tests/stress/measure_shared_cores.py --figures FILE.jsonl
GOMP_SPINCOUNT=300000 python tests/stress/measure_shared_cores.py  # spinning, GNU's default
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cyclopts import App
from fault_records import record

app = App(help=__doc__)
LIMIT_S = 3600


@app.default
def measure(*, figures: Path | None = None, steps: int = 200, rounds: int = 1) -> None:
    """Time the demo alone and beside another one.

    Parameters
    ----------
    steps
        Training steps of the demo; the default is the demo's.
    rounds
        Pairs of measurements; the figure is the median of their ratios.
    """
    ratios, alone = [], []
    for number in range(rounds):
        alone.append(_demo_s(steps))
        beside_s = _beside_s(steps)
        ratios.append(beside_s / alone[-1])
        print(
            f"round {number + 1} of {rounds}: {alone[-1]:.1f} s alone, {beside_s:.1f} s beside "
            f"another: {ratios[-1]:.2f} times as long",
            flush=True,
        )
    if figures is not None:
        spread = statistics.stdev(ratios) if rounds > 1 else None
        ratio = round(statistics.median(ratios), 3)
        record(
            figures, "demo_beside_another_ratio", ratio, "times", "<= 3", runs=rounds, spread=spread
        )
        record(figures, "demo_alone_s", statistics.median(alone), "s", "", runs=rounds)


def _beside_s(steps: int) -> float:
    """Seconds of a demo beside another that goes on until it is done."""
    with tempfile.TemporaryDirectory() as place:
        # more steps than it will ever take: its training lasts as long as the one that is timed
        other = _start(Path(place), 1000 * steps, stdout=subprocess.DEVNULL)
        try:
            seconds = _demo_s(steps)
            if other.poll() is not None:
                raise RuntimeError(f"the other demo ended early, with status {other.returncode}")
        finally:
            other.terminate()
            other.wait(LIMIT_S)
    return seconds


def _demo_s(steps: int) -> float:
    """Seconds that a demo says it took."""
    with tempfile.TemporaryDirectory() as place:
        demo = _start(Path(place), steps, stdout=subprocess.PIPE)
        said, _ = demo.communicate(timeout=LIMIT_S)
        if demo.returncode:
            raise RuntimeError(f"the demo ended with status {demo.returncode}")
    return json.loads(said.splitlines()[-1])["seconds"]


def _start(place: Path, steps: int, stdout: int) -> subprocess.Popen:
    words = [sys.executable, "-m", "qat", "demo", "--out", place / "demo", "--steps", str(steps)]
    return subprocess.Popen(words, stdout=stdout, stderr=subprocess.DEVNULL, text=True)


if __name__ == "__main__":
    app()
