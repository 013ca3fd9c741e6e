"""The sizes that a preset makes are measured by the verbs that a user calls."""

import json
from pathlib import Path

import pytest
from cache_case import TOKENIZER
from tiny import tiny_model

ROOT = Path(__file__).parents[2]


def test_sizes_are_recorded_by_name(tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(str(ROOT / "speedrun"))
    import measure_sizes

    tiny_model("llama").save_pretrained(tmp_path / "float")
    TOKENIZER.save_pretrained(tmp_path / "float")
    figures = tmp_path / "figures.jsonl"
    measure_sizes.main([f"smollm2={tmp_path / 'float'}"], device="cpu", figures=figures)
    (line,) = map(json.loads, figures.read_text().splitlines())
    assert (line["figure"], line["goal"]) == ("smollm2_gguf_mb_default", "<= 75")
    source = (tmp_path / "float/model.safetensors").stat().st_size / 1e6
    assert 0 < line["value"] < source
    assert f"smollm2: {source:.1f} MB become" in capsys.readouterr().out
