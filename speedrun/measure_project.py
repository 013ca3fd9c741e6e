"""What the project itself costs: the demo, the test suite, and `qat --help`, in seconds.

python speedrun/measure_project.py --figures figures.jsonl
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cyclopts import App
from figures import ROOT, record

app = App(help=__doc__)
QAT = [sys.executable, "-m", "qat"]


@app.default
def measure(*, figures: Path, demos: int = 3, helps: int = 20) -> None:
    """Append `demo_seconds`, `suite_seconds` and `help_seconds` (medians) to FIGURES."""
    help_s = [seconds(*QAT, "--help") for _ in range(helps)]
    with tempfile.TemporaryDirectory() as folder:
        demo_s = [seconds(*QAT, "demo", "--out", f"{folder}/demo") for _ in range(demos)]
    suite_s = [seconds(sys.executable, "-m", "pytest", "-p", "no:cacheprovider")]
    for name, runs, goal in (
        ("help_seconds", help_s, 0.5),
        ("demo_seconds", demo_s, 240),
        ("suite_seconds", suite_s, 300),
    ):
        spread = statistics.stdev(runs) if len(runs) > 1 else None
        median = round(statistics.median(runs), 3)
        record(figures, name, median, "s", f"<= {goal}", runs=len(runs), spread=spread)


def seconds(*command: str) -> float:
    """Wall-clock seconds of a command that must succeed."""
    began = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    app()
