"""Runs of `qat train` under a real launcher, with something done behind a step of some rank."""

import os
import subprocess
import sys
from pathlib import Path

from qat.train.config import TrainConfig

DRIVER = """
import os, sys
from pathlib import Path
from signal import SIGKILL, SIGTERM
from qat import cli
from qat.train.loop import Trainer

place, follow = Path(sys.argv.pop(1)), Trainer._follow

def act(trainer, rank):
    ACT

def watched(trainer, *args):
    follow(trainer, *args)
    act(trainer, int(os.environ["RANK"]))

Trainer._follow = watched
cli.main()
"""


def launch(
    place: Path, settings: TrainConfig, *, act: str = "pass", size: int = 2, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """The ended launcher of a run in `place / "run"`; `act` sees `trainer` and `rank` each step."""
    driver = place / "driver.py"
    driver.write_text(DRIVER.replace("ACT", act))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), "--max-restarts", str(restarts), str(driver)]
    command += [str(place), "train", str(place / "student"), "--resume", "auto"]
    for name, value in settings.model_dump(mode="json", exclude_defaults=True).items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)]
    return subprocess.run(
        [*command, "--out", str(place / "run")],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
