"""What a server's log-probs differ by, measured on a server that plays its engine."""

import json
from pathlib import Path

import measure_served
import pytest
from cache_case import TOKENIZER, texts
from engine_case import NAME, Stage, played


def test_a_server_that_runs_is_compared_with_its_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, folder, figures = Stage(), tmp_path / "teacher", tmp_path / "figures.jsonl"
    stage.model.model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    (tmp_path / "text.txt").write_text("\n\n".join(texts()), encoding="utf-8")

    def measured(address: str) -> dict[str, float]:
        figures.unlink(missing_ok=True)
        words = ["--teacher", str(folder), "--text", str(tmp_path / "text.txt")]
        words += ["--figures", str(figures), "--address", address, "--name", NAME]
        words += ["--length", "16", "--sequences", "8", "--top-k", "5"]
        monkeypatch.setattr("sys.argv", ["measure_served.py", *words])
        measure_served.main()
        lines = map(json.loads, figures.read_text().splitlines())
        return {line["figure"]: line["value"] for line in lines}

    with played(stage) as address:
        assert 0 <= measured(address)["served_diff"] < 1e-4
        stage.change = lambda answer: shift(answer, 0.25)
        found = measured(address)
    assert found["served_diff"] == pytest.approx(0.25, abs=1e-3)
    assert found["served_diff_mean"] == pytest.approx(0.25, abs=1e-3)


def shift(answer: dict, by: float) -> None:
    """Make every log-prob of an answer smaller."""
    for choice in answer["choices"]:
        for entries in choice["prompt_logprobs"][1:]:
            for entry in entries.values():
                entry["logprob"] -= by
