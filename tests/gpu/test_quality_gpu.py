"""A quality run on a GPU: processes side by side, compiled steps, equal time by real clocks."""

import json
from pathlib import Path

import pytest
from quality_case import TRAIN, call, make_teacher_and_texts, write

from qat.logs import read_json_lines


@pytest.mark.gpu
def test_a_quality_run(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    make_teacher_and_texts()
    write(
        {"name": "ours"},
        {"name": "converted", "train": False},
        {"name": "reference", "method": "reference", "train": {"group_size": 16}},
        {"name": "timed", "train": {"learn": "scales"}, "equal_time_to": "reference"},
        max_steps=12,
        train={**TRAIN, "dtype": "bf16", "log_every": 4},
    )
    assert call(monkeypatch, "--workers", "2", device="cuda") == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["recipe"]: row for row in read_json_lines(Path("out/results.jsonl"))}
    assert set(rows) == {"teacher", "ours", "converted", "reference", "timed"}
    assert last["best"] in rows and rows["teacher"]["kl_nats"] < 1e-6
    assert (
        rows["timed"]["steps"] != 12 and len(json.loads(Path("out/timing.json").read_text())) == 2
    )
    for name in ("ours", "reference", "timed"):
        assert rows[name]["seconds"] > 0 and 0 < rows[name]["peak_gib"] < 4
        assert 0 < rows[name]["kl_nats"] < 2
