"""Seconds of the XLA job of .ci/run from nothing: environment installed, then its tests.

python speedrun/measure_xla_ci.py FIGURES.jsonl
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figures

JOB = Path(__file__).parents[1] / ".ci/xla"


def main(path: Path) -> None:
    """Write `xla_ci_seconds` to `path`, and those of a second run, whose environment is there."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["env", f"QAT_XLA_VENV={directory}/venv", "bash", str(JOB)]
        for name in ("xla_ci_seconds", "xla_ci_again_seconds"):
            began = time.monotonic()
            subprocess.run(command, check=True)
            seconds = time.monotonic() - began
            if not Path(directory, "venv/.installed").exists():
                sys.exit("the job was skipped, so it took no time worth keeping; try again online")
            figures.record(path, name, seconds, "s", "<= 360")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
