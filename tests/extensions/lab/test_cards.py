"""The page of cards: what records measured is linked, all else is predicted from it."""

import json
from pathlib import Path

import pytest

from qat.extensions.lab.cards import STEP, Kind, Predictor, Row, page, read_rows, row_of
from qat.extensions.lab.leaderboard import RecordEntry, RecordFigure
from qat.models.devices import devices_named

T4, H100, H200 = devices_named(("T4", "H100", "H200"))
PLAIN = Kind(recomputes=False, loss="tail")
SETTINGS = """
[[original]]
card = "H200"
length = 64
batch = 24
tokens_per_s = 100

[[found]]
figure = "planned"
card = "T4"
length = 64
recomputes = true
how = "compiled"
"""


def line(batch: int, peak_gib: float, tokens_per_s: float, **more: object) -> dict[str, object]:
    """A row of a record as `qat bench` writes it, on an H200 without recomputation."""
    step = {"kind": "step", "case": "ours", "status": "OK", "device": "NVIDIA H200"}
    step |= {"gradient_checkpointing": False, "loss": "tail", "seq_len": 64, "batch_size": batch}
    return {**STEP, **step, "peak_gib": peak_gib, "tokens_per_s": tokens_per_s, **more}


def rows() -> list[Row]:
    """A line of 2 GiB and 1 GiB for 10 sequences of 64; searches found 0.8 of what it says."""
    limited = {"kind": "max", "status": "MAX", "limit_gib": 12.0}
    lines = [line(100, 12.0, 90_000.0), line(400, 42.0, 100_000.0), line(80, 10.0, 1.0, **limited)]
    lines += [{**each, "gradient_checkpointing": True} for each in lines]
    return [row_of(each, "2026-01-01_steps") for each in lines]


def test_what_is_no_step_of_ours_does_not_count() -> None:
    for change in (
        {"case": "plain_compiled"},
        {"status": "OOM"},
        {"learn": "weights"},
        {"device": "cpu"},
        {"attention": "nsa"},
        {"student": "qwen3-4b"},
    ):
        assert row_of(line(8, 1.0, 1.0) | change, "record") is None


def test_cards_are_predicted_within_ranges_or_measured(tmp_path: Path) -> None:
    predictor = Predictor(rows())
    assert predictor.memory(False).peak_gib(64 * 1000) == pytest.approx(102)
    room = int((T4.memory_gib - 0.8 - 2) / 0.1)
    batch = predictor.batch(PLAIN, T4, 64)
    assert batch.low <= batch.value <= batch.high and not batch.record
    assert batch.value == pytest.approx(0.8 * room)
    assert predictor.batch(PLAIN, T4, 128).value == pytest.approx(0.8 * (room // 2))
    own, other = (predictor.speed(PLAIN, card, 64) for card in (H200, H100))
    assert (own.value, own.record) == (100_000, "2026-01-01_steps")
    assert other.low < other.value < other.high and other.value < own.value
    longer = predictor.speed(PLAIN, H200, 128)
    assert 0.9 * own.value < longer.value < own.value and not longer.record
    # a T4 has no room for a saturated step without recomputation, nor, here, with it
    assert predictor.advice(H200, 64)[:2] == ["`--batch-size 256`", "16,384"]
    assert predictor.advice(T4, 64)[1] == f"{int(0.9 * 0.8 * room) * 64:,}"

    (tmp_path / "2026-01-01_steps").mkdir()
    found = [line(100, 12.0, 90_000.0), line(400, 42.0, 9e4), line(900, 92.0, 9e4, kind="max")]
    found += [{**each, "gradient_checkpointing": True} for each in found[:2]]
    text = "".join(json.dumps(each) + "\n" for each in found)
    (tmp_path / "2026-01-01_steps" / "step.jsonl").write_text(text)
    assert Predictor(read_rows(tmp_path)).batch(PLAIN, H200, 64).record == "2026-01-01_steps"
    assert Predictor(read_rows(tmp_path)).batch(PLAIN, H200, 128).value == 450
    settings = tmp_path / "cards.toml"
    settings.write_text(SETTINGS)
    planned = RecordFigure(figure="planned", value=7, device="cpu")
    written = page(tmp_path, settings, [RecordEntry("2026-01-02", "plan", planned)])
    assert "[900](2026-01-01_steps)" in written and "[7](2026-01-02_plan), compiled" in written
    assert written.splitlines()[-1].endswith("| 900 |")
