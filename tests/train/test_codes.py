"""The share of codes that flipped, counted by hand and over whole runs."""

from pathlib import Path

import pytest
import torch
from quantized import SPECS, tiny_quantized
from train_case import config, make_trainer

from qat.logs import read_json_lines
from qat.nn.latent import to_latent
from qat.nn.quant_linear import quant_linears
from qat.train.judge import CodeWatch


def shares(place: Path, out: Path, **values: object) -> list[float | None]:
    make_trainer(config(place, **values), place / "student", out).train()
    lines = read_json_lines(out / "metrics.jsonl")
    return [line.get("codes_flipped_frac") for line in lines if line["kind"] == "eval"]


def test_counts_what_moved_since_it_was_last_asked() -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    names = [*quant_linears(model)]
    to_latent(model, names)
    linears = [*quant_linears(model).values()]
    total = sum(linear.weight.numel() for linear in linears)
    watch = CodeWatch(model)
    assert watch.flipped_frac() is None
    assert watch.flipped_frac() == 0.0
    before = linears[2].indices()
    with torch.no_grad():
        linears[2].weight[:3, :5] *= -1.0
    flips = int((linears[2].indices() != before).sum())
    again = CodeWatch(model)
    again.load(watch.state())
    assert 0 < flips <= 15
    assert watch.flipped_frac() == again.flipped_frac() == pytest.approx(flips / total)
    assert watch.flipped_frac() == 0.0


@pytest.mark.slow
def test_runs_log_it_with_every_evaluation_after_the_first(place: Path, tmp_path: Path) -> None:
    first, *later = shares(place, tmp_path / "moving", lr=0.1)
    assert first is None and len(later) == 2 and all(0 < share < 1 for share in later)
    still = shares(place, tmp_path / "still", lr=0.0, lr_scales=0.0, lr_codebook=0.0)
    assert still[1:] == [0.0, 0.0]
    frozen = shares(place, tmp_path / "frozen", learn="scales,codebook")
    assert frozen == [None, None, None]
