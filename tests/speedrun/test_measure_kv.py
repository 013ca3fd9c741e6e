"""The script that measures packed keys and values runs, small, on a CPU."""

import json
from pathlib import Path

import pytest
import torch

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.mark.slow
def test_the_tiny_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    torch.set_num_threads(1)
    import measure_kv

    out = tmp_path / "figures.jsonl"
    small = {"shape": "tiny", "batch": 2, "positions": 40, "steps": 2, "rounds": 2}
    with torch.no_grad():
        measure_kv.measure(**small, device="cpu", figures=out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = {line["figure"]: line["value"] for line in lines}
    # heads of 32 numbers: 64 bytes in bf16, 16 or 32 and 4 packed; speed is no figure of a CPU
    assert found == {"kv8_bytes_per_token": 36 / 64, "kv_bytes_per_token": round(20 / 64, 4)}
    assert [line["goal"] for line in lines] == ["", "<= 0.27"]
    said = capsys.readouterr().out
    assert "round 2 of 2" in said and "over bf16" in said
    assert "bf16, no past" in said and "times at most" in said


def test_speed_is_a_figure_where_steps_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    import measure_kv

    monkeypatch.setattr(measure_kv.Case, "token_bytes", lambda case: 4.0)
    cases = [measure_kv.Case(name, [], None, []) for name in measure_kv.SPECS]
    ratios = {"bf16": [1.0, 1.0], "8 bits": [1.4, 1.6], "4 bits": [2.0, 2.2]}
    measure_kv.conclude(cases, ratios, tmp_path / "f.jsonl", has_speed=True)
    lines = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
    found = {line["figure"]: (line["value"], line["goal"]) for line in lines}
    assert found["kv4_decode_over_bf16"] == (2.1, ">= 1.5")
    assert found["kv8_decode_over_bf16"] == (1.5, "")
