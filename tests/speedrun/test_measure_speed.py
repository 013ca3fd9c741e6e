"""The script that measures steps runs, small, on a CPU."""

import json
from pathlib import Path

import pytest
import torch

SPEEDRUN = Path(__file__).parents[2] / "speedrun"
SMALL = {"shape": "tiny", "device": "cpu"}


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    torch.set_num_threads(1)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures(out: Path) -> dict[str, dict]:
    return {line["figure"]: line for line in lines(out / "figures.jsonl")}


@pytest.mark.slow
def test_quantized_inputs_take_turns_with_their_baseline(tmp_path: Path) -> None:
    import measure_step_speed

    out = tmp_path / "out"
    cases = "frozen_exact,frozen_exact_a8,frozen_exact_a8s,frozen_exact_f8"
    measure_step_speed.measure(out=out, only=cases, steps=2, batch_size=2, seq_len=8, **SMALL)
    rows = [row for row in lines(out / "results.jsonl") if row["kind"] == "step"]
    assert [row["to"] for row in rows] == ["q2a4", "q2a4_a8", "q2a4_a8s", "q2a4_f8"]
    found = figures(out)
    assert found.keys() == {
        "frozen_exact_tok_s",
        *(f"{k}_step_over_w" for k in ("a8", "a8s", "f8")),
    }
    speeds = {row["case"]: row["tokens_per_s_of_rounds"] for row in rows}
    ratios = [a / b for a, b in zip(speeds["frozen_exact"], speeds["frozen_exact_a8"], strict=True)]
    assert found["a8_step_over_w"]["value"] == pytest.approx(sum(ratios) / 2, abs=1e-3)


@pytest.mark.slow
def test_cases_take_turns_and_ratios_stay_within_a_round(tmp_path: Path, capsys) -> None:
    import measure_step_speed

    out = tmp_path / "out"
    cases = "frozen_candidates,frozen_candidates_504,latent_exact,reference_504"
    measure_step_speed.measure(out=out, only=cases, steps=2, batch_size=2, seq_len=8, **SMALL)
    rows = lines(out / "results.jsonl")
    turns = [row["case"] for row in rows if row["kind"] == "round"]
    in_order = cases.split(",")
    assert turns == [*in_order, *in_order[-2::-1]]
    merged = {row["case"]: row for row in rows if row["kind"] == "step"}
    assert merged["reference_504"]["timed_steps"] == 2
    assert merged["latent_exact"]["learn"] == "weights,scales,codebook"
    assert merged["frozen_candidates_504"]["loss"] == "candidates"
    assert len(merged["frozen_candidates"]["tokens_per_s_of_rounds"]) == 2
    found = figures(out)
    assert set(found) == {"frozen_candidates_tok_s", "over_reference"}
    assert found["over_reference"]["runs"] == 2 and found["over_reference"]["spread"] is not None
    assert "frozen_candidates_504" in capsys.readouterr().out


def test_an_unknown_case_is_refused() -> None:
    import measure_step_speed

    with pytest.raises(SystemExit, match="no case is called nothing"):
        measure_step_speed.chosen("nothing")
