"""Runs of `qat train` under a real launcher, with something done behind a step of some rank."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from qat.train.config import TrainConfig

LIMIT_S = 400
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
    how = ["--standalone", "--nproc-per-node", str(size), "--max-restarts", str(restarts)]
    with started(place, settings, how, act=act) as launcher:
        out, errors = launcher.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(launcher.args, launcher.returncode, out, errors)


@contextmanager
def started(  # noqa: PLR0917
    place: Path,
    settings: TrainConfig,
    how: Sequence[str],
    *,
    act: str = "pass",
    enter: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Yield a launcher of the same run, with flags `how`, behind the words `enter`."""
    driver = place / "driver.py"
    driver.write_text(DRIVER.replace("ACT", act))
    command = [*enter, sys.executable, "-m", "torch.distributed.run", *how, str(driver)]
    command += [str(place), "train", str(place / "student"), "--resume", "auto"]
    for name, value in settings.model_dump(mode="json", exclude_defaults=True).items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)]
    with subprocess.Popen(
        [*command, "--out", str(place / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()
