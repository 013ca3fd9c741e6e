"""Steps that two GPUs take together, as a sweep starts them."""

from pathlib import Path

import pytest
import torch

from qat.extensions.bench.config import SweepConfig
from qat.extensions.lab.sweep.run import run_sweep

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_take_steps_together(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'name = "r"\nstudent = "tiny"\nrepeats = 1\n[product]\nranks = [1, 2]\n[settings]\n'
        'device = "cuda"\nsteps = 3\nwarmup = 3\nseq_len = 64\nbatch_size = 8\n'
    )
    report = run_sweep(SweepConfig(), recipe, tmp_path / "out")
    report.check()
    one, two = report.rows
    assert two["positions"] == 2 * one["positions"] and len(two["rank_work_s"]) == 2
    assert 0 < two["slowest_share"] <= 1 and two["peak_reserved_gib"] >= two["peak_gib"] > 0
