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
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    names = [f"save_overhead_{name}percent" for name in ("frozen_", "latent_", "")]
    assert [line["figure"] for line in lines] == names
    assert lines[2]["value"] == max(line["value"] for line in lines) and lines[0]["runs"] == 2
    shown = capsys.readouterr().out.splitlines()[-4:]
    assert [text.split(":")[0] for text in shown[::2]] == ["frozen", "latent"]
    parts = "call drain there wait gather begin arrive convert write prove".split()
    assert all(text.split(":")[1].split()[::2] == parts for text in shown[1::2])
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")
def test_full_disks_lose_nothing() -> None:
    command = [sys.executable, "tests/stress/measure_disk_full.py", "--every", "33"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "full disks, at" in result.stdout
