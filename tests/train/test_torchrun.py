"""A real launcher: two ranks train, one is killed, and the group goes on from what was saved."""

import json
from pathlib import Path

import pytest
from torchrun_case import launch
from train_case import config, make_place

from qat.logs import read_json_lines
from qat.train.start import train_student

KILL_ONE_ONCE = """
    if trainer.step == 5 and rank == 1 and not (place / "killed").exists():
        (place / "killed").touch()
        os.kill(os.getpid(), SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_rank_restarts_the_group_which_goes_on(tmp_path: Path) -> None:
    make_place(tmp_path)
    settings = config(tmp_path, batch_size=2, global_batch_size=8, learn="scales,codebook")
    train_student(settings, str(tmp_path / "student"), tmp_path / "alone", resume=False)
    ended = launch(tmp_path, settings, act=KILL_ONE_ONCE, restarts=1)
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
