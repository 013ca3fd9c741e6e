"""The scaling figure: which rows make which curve."""

import json
import sys
from pathlib import Path

import pytest

SPEEDRUN = Path(__file__).parents[2] / "speedrun"
sys.path.insert(0, str(SPEEDRUN))

import plot_scaling  # noqa: E402


def row(**values: object) -> dict:
    common = {
        "kind": "step",
        "student": "qwen3-0.6b",
        "parameters": 6e8,
        "seq_len": 64,
        "batch_size": 8,
        "tokens_per_s": 1000.0,
        "gradient_checkpointing": False,
        "device": "NVIDIA H200",
        "dtype": "bf16",
    }
    return {**common, **values}


ROWS = [
    row(),
    row(batch_size=32, tokens_per_s=3000.0),
    row(batch_size=32, tokens_per_s=2000.0),
    row(seq_len=256, tokens_per_s=2500.0),
    row(student="qwen3-4b", parameters=4e9, tokens_per_s=500.0),
    row(kind="trial", tokens_per_s=9.0),
    row(kind="max", batch_size=512, tokens_per_s=4000.0, gradient_checkpointing=True),
]


def test_each_panel_keeps_the_fastest_row_of_a_point(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in ROWS))
    rows = plot_scaling.read_rows(path)
    assert len(rows) == 6
    assert plot_scaling.against_batch(rows) == {
        "qwen3-0.6b, L = 64": [(8, 1000.0), (32, 3000.0)],
    }
    assert plot_scaling.against_length(rows) == {"qwen3-0.6b": [(64, 4000.0), (256, 2500.0)]}
    assert plot_scaling.against_size(rows) == {"L = 64": [(0.6, 4000.0), (4.0, 500.0)]}


def test_a_row_that_names_its_panels_is_drawn_there_alone() -> None:
    rows = [row(batch_size=size, panels=["batch"]) for size in (1, 2)]
    rows += [row(seq_len=length, panels=["length"]) for length in (64, 128)]
    assert list(plot_scaling.against_batch(rows)) == ["qwen3-0.6b, L = 64"]
    assert list(plot_scaling.against_length(rows)) == ["qwen3-0.6b"]
    assert plot_scaling.against_size(rows) == {}


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_figure_is_written(tmp_path: Path, suffix: str, monkeypatch, capsys) -> None:
    path, out = tmp_path / "results.jsonl", tmp_path / f"scaling.{suffix}"
    path.write_text("".join(json.dumps(line) + "\n" for line in ROWS))
    monkeypatch.setattr(sys, "argv", ["plot_scaling.py", str(path), "--out", str(out)])
    plot_scaling.main()
    assert out.stat().st_size > 5000
    assert capsys.readouterr().out == f"{out}: 6 rows\n"
