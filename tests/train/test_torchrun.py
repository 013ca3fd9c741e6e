"""A real launcher: two ranks train, one is killed, and the group goes on from what was saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_case import config, make_place

from qat.logs import read_json_lines
from qat.train.start import train_student

KILLED_ONCE = """
import os, signal, sys
from pathlib import Path
from qat import cli
from qat.train.loop import Trainer

place, advance = Path(sys.argv.pop(1)), Trainer._advance

def killed_once(trainer, *args):
    if trainer.step == 5 and os.environ["RANK"] == "1" and not (place / "killed").exists():
        (place / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return advance(trainer, *args)

Trainer._advance = killed_once
cli.main()
"""


@pytest.mark.slow
def test_a_killed_rank_restarts_the_group_which_goes_on(tmp_path: Path) -> None:
    make_place(tmp_path)
    settings = config(tmp_path, batch_size=2, global_batch_size=8, learn="scales,codebook")
    train_student(settings, str(tmp_path / "student"), tmp_path / "alone", resume=False)
    (tmp_path / "driver.py").write_text(KILLED_ONCE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", str(tmp_path / "driver.py")]
    command += [str(tmp_path), "train", str(tmp_path / "student"), "--resume", "auto"]
    for name, value in settings.model_dump(mode="json", exclude_defaults=True).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "killed").exists()
    assert json.loads(ended.stdout.splitlines()[-1])["steps"] == 6
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [entry["step"] for entry in facts["resumed"]] == [4]
    ours, alone = (
        [line["loss_nats"] for line in lines if line["kind"] == "train"]
        for lines in (read_json_lines(tmp_path / run / "metrics.jsonl") for run in ("run", "alone"))
    )
    assert ours == pytest.approx(alone, rel=1e-5)
