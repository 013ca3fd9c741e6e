"""The script that times rollouts, small, on a CPU."""

import json
from pathlib import Path

import pytest
import torch

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.mark.slow
def test_the_tiny_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    torch.set_num_threads(1)
    import measure_onpolicy

    monkeypatch.setattr(measure_onpolicy, "ROUNDS", 2)
    out = tmp_path / "figures.jsonl"
    measure_onpolicy.measure(
        shape="tiny", batch_size=4, seq_len=32, every=(1, 2), steps=4, device="cpu", figures=out
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    names = ["rollout_share_seconds", "rollout_share_every_2"]
    assert [line["figure"] for line in lines] == names
    assert all(0 < line["value"] < 1 and line["runs"] == 2 for line in lines)
    assert "plain rows" in capsys.readouterr().out
