"""The script that compares gradients: it runs, and its angles are what they are called."""

import json
from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER, teacher, texts
from quantized import SPECS, tiny_quantized
from tiny import VOCAB

from qat.models.checkpoint import save_checkpoint

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch, _seeded: None) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    torch.set_num_threads(1)


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, str]:
    teacher().model.save_pretrained(tmp_path / "teacher")
    TOKENIZER.save_pretrained(tmp_path / "teacher")
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), TOKENIZER, tmp_path / "student")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in texts(60)))
    names = {name: str(tmp_path / name) for name in ("teacher", "student")}
    return {**names, "text": str(text), "device": "cpu"}


@pytest.mark.slow
def test_angles_shrink_with_what_a_cache_holds(pair: dict, tmp_path: Path, monkeypatch) -> None:
    import measure_gradient_angle as script

    targets = [
        script.Target("sampled", 50),
        script.Target("sampled", 800),
        script.Target("tail", 4),
        script.Target("tail", VOCAB),
        script.Target("candidates", 4),
    ]
    monkeypatch.setattr(script, "TARGETS", targets)
    out, figures = tmp_path / "angles.jsonl", tmp_path / "figures.jsonl"
    script.measure(**pair, sequences=4, batches=2, out=out, figures=figures)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["loss"], row["size"]) for row in rows] == [t[:2] for t in targets]
    assert all(row["batches"] == 2 and row["batch_tokens"] == 256 for row in rows)
    few, many, narrow, all_words, blind = (row["weights_deg"] for row in rows)
    assert few / many > 5  # draws of their own would give 4, the root of 800 / 50
    assert all_words < 0.05 < narrow < blind
    assert rows[0]["hidden_deg"] > few, "single tokens are noisier than their sum"
    (figure,) = [json.loads(line) for line in figures.read_text().splitlines()]
    assert figure["figure"] == "sampled_gradient_angle_deg" and figure["goal"] == "<= 5"
    assert figure["value"] == pytest.approx(few, abs=0.01) and figure["runs"] == 2


def test_a_text_without_one_batch_is_refused(pair: dict) -> None:
    import measure_gradient_angle as script

    with pytest.raises(SystemExit, match="holds no 64000 tokens; give a longer one"):
        script.measure(**pair, sequences=1000)
