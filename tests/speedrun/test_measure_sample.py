"""The script that times sampling runs, small, on a CPU."""

import json
from pathlib import Path

import pytest
import torch

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.mark.slow
def test_the_tiny_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    torch.set_num_threads(1)
    import measure_sample

    from qat.bench.measure import Roofline

    monkeypatch.setattr(measure_sample, "measure_roofline", lambda *_: Roofline(None, 1e12, 1e10))
    out = tmp_path / "figures.jsonl"
    measure_sample.measure(shape="tiny", batch=2, length=9, rounds=2, device="cpu", figures=out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    ratios = [f"sample_packed{cache}_over_bf16" for cache in ("", "_kv8", "_kv4")]
    assert [line["figure"] for line in lines] == ["sample_tok_s", "sample_bandwidth_frac", *ratios]
    assert [line["goal"] for line in lines] == [">= 40000", "", ">= 1.2", "", ""]
    assert all(line["value"] > 0 and line["runs"] == 2 for line in lines)
    assert "rows of all lengths" in capsys.readouterr().out


def test_bytes_are_those_of_weights_and_of_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    import measure_sample

    from qat.backend.device import select

    case = measure_sample.dense_cases("tiny", 2, 4, select("cpu"))[0]
    # two layers of width 64 with one head of 32 for keys and one for values, in bf16
    assert case.token_bytes == 2 * 2 * 2 * 32
    # in the four steps a row sees 1, 2, 3 and 4 tokens
    expected = 4 * case.weight_bytes + 2 * (1 + 2 + 3 + 4) * case.token_bytes
    assert case.round_bytes(2) == expected
    # a head of 4 bits has 16 bytes of codes, and 4 of scales and zeros
    student = measure_sample.packed_case("tiny", 2, 4, select("cpu"), to="q2a2_kv4")
    assert student.token_bytes == 2 * 2 * (16 + 4)


def test_the_batch_that_is_served_has_a_figure_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    from measure_sample import HEADLINE, Case, conclude

    cases = [
        Case(name, None, [], seconds=seconds, weight_bytes=1, token_bytes=1)
        for name, seconds in (
            (HEADLINE, [3.0, 3.3, 3.0]), ("q2a2", [2.0, 2.0, 2.4]), ("q2a2_kv4", [1.5, 1.5, 1.5])
        )
    ]  # fmt: skip
    row = {"tokens_per_s": 1.0, "spread": 0.0, "limit_share": 0.5}
    rows = {case.name: row for case in cases}
    conclude(cases, rows, tmp_path / "served.jsonl", is_served=True)
    lines = map(json.loads, (tmp_path / "served.jsonl").read_text().splitlines())
    found = [[line[key] for key in ("figure", "value", "goal", "runs")] for line in lines]
    name = "generate_over_bf16_batch_64"
    assert found == [[name, 1.5, ">= 1.5", 3], [f"{name}_kv4", 2.0, "", 3]]
