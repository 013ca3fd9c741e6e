"""The scripts about saving and full disks: each runs, small, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_what_saving_costs(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "speedrun"))
    torch.set_num_threads(1)
    import measure_save_overhead

    monkeypatch.setattr(measure_save_overhead, "SHORTEST", 2)
    out = tmp_path / "figures.jsonl"
    measure_save_overhead.measure(
        figures=out, scratch=tmp_path, shape="tiny", device="cpu", batch_size=2, seq_len=8, pairs=2
    )
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["figure"] == "save_overhead_percent" and line["runs"] == 2
    shown = capsys.readouterr().out.splitlines()[-2:]
    assert [text.split(":")[0] for text in shown] == ["frozen", "latent"]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")
def test_full_disks_lose_nothing() -> None:
    command = [sys.executable, "speedrun/measure_disk_full.py", "--every", "33"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "full disks, at" in result.stdout
