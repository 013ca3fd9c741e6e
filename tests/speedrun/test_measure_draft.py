"""The script that times a teacher alone and with a student that drafts."""

import json
from pathlib import Path

import measure_draft
import pytest
from tiny import save_tiny


@pytest.mark.slow
def test_a_draft_that_is_the_teacher(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", initializer_range=0.3)
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "figures.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n')
    asked = measure_draft.Asked(
        (3,), prompts, max_new_tokens=12, runs=1, device="cpu", figures=figures
    )
    model = str(tmp_path / "model")
    measure_draft.main(model, draft=model, asked=asked)
    found = {
        line["figure"]: line["value"] for line in map(json.loads, figures.read_text().splitlines())
    }
    assert found["draft_accepted_length_coder"] == 4
    assert found["draft_speedup_coder"] > 0
    rates = [found[f"draft_{name}_tok_s_coder"] for name in ("alone", "drafted")]
    assert min(rates) > 0
