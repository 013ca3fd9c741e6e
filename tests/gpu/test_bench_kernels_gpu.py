"""`qat bench kernels` on a GPU: the gates, a tuned table, and what kernels then say they ran."""

import json
from pathlib import Path

import pytest

from qat.extensions.lab.config import KernelsConfig
from qat.extensions.lab.kernels.run import run_kernels
from qat.extensions.lab.kernels.token_tiles import name_of
from qat.kernels import tuned

pytestmark = pytest.mark.gpu


def test_kernels_pass_and_the_tuned_table_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tables")
    tuned.forget_tables()
    config = KernelsConfig(shape="tiny", only="gated unit,gather-dot", repeats=5, limit_s=1.0)
    report = run_kernels(config, tmp_path / "plain")
    assert {row["status"] for row in report.rows} == {"OK"}
    assert all(0 < row["roofline_frac"] for row in report.rows)
    alone = config.model_dump(exclude={"by"})
    settings = {**alone, "tune": True, "figures": tmp_path / "figures.jsonl"}
    report = run_kernels(KernelsConfig(**settings), tmp_path / "tuned")
    assert report.worst_ratio >= 1.0 and len(report.tuned) == 3
    (table,) = (tmp_path / "tables").iterdir()
    assert tuned.read_table(table)["measured"]["device"]
    lines = (tmp_path / "figures.jsonl").read_text().splitlines()
    assert "autotune_worst_ratio" in [json.loads(line)["figure"] for line in lines]
    tuned.forget_tables()


def test_a_linear_is_tuned_within_a_recorded_token(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tables")
    tuned.forget_tables()
    config = KernelsConfig(only="down", tune="token", repeats=5, limit_s=1.0)
    report = run_kernels(config, tmp_path / "tuned")
    report.check()
    assert [row["case"] for row in report.rows] == ["matvec, down, 2-bit"]
    token = report.token
    assert "default" in token.times and token.ratio >= 1.0
    ((site, tile),) = token.chosen.items()
    assert tuned.used()[name_of(site)]["source"] == "forced"
    (table,) = (tmp_path / "tables").iterdir()
    written = tuned.read_table(table).get(site[0], {}).get(tuned.named(site[1]))
    assert written == (None if token.entries()[site] is None else tile._asdict())
    tuned.forget_tables()
