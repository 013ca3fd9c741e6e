"""The scripts that measure speed: every one of them runs, small, on a CPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qat.bench.measure import Timing
from qat.bench.run import Setting
from qat.bench.student import Ours

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


@pytest.mark.slow
def test_a_mixture_takes_turns_with_a_dense_student(tmp_path: Path, capsys) -> None:
    import measure_moe

    out, sizes = tmp_path / "out", {"batch_size": 2, "mixture_batch_size": 4}
    measure_moe.measure(out=out, dense="tiny", mixture="tiny-moe", layers=1, device="cpu", **sizes)
    turns = [
        (row["case"], row["layers"], row["batch_size"]) for row in lines(out / "results.jsonl")
    ]
    assert turns == [("tiny", None, 2), ("tiny-moe", 1, 4)] * 2
    ratio = figures(out)["moe_step_mfu_over_dense"]
    assert ratio["value"] > 0 and ratio["runs"] == 2 and "tiny-moe" in capsys.readouterr().out


def test_an_unknown_case_is_refused() -> None:
    import measure_step_speed

    with pytest.raises(SystemExit, match="no case is called nothing"):
        measure_step_speed.chosen("nothing")


@pytest.mark.slow
def test_the_batch_found_takes_several_steps(tmp_path: Path, monkeypatch) -> None:
    import measure_max_batch

    try_steps = measure_max_batch.try_steps

    def in_little_memory(setting: Setting, ours: Ours, batch_size: int) -> Timing:
        if batch_size > 21:
            raise torch.OutOfMemoryError("full")
        return try_steps(setting, ours, batch_size)

    monkeypatch.setattr(measure_max_batch, "try_steps", in_little_memory)
    out = tmp_path / "out"
    measure_max_batch.measure(out=out, limits="0", seq_len=8, **SMALL)
    *trials, found = lines(out / "results.jsonl")
    assert {row["kind"] for row in trials} == {"trial"} and found["kind"] == "max"
    assert found["batch_size"] == 21 and 1 <= found["fastest"] <= 21
    assert found["timed_steps"] == 1 and found["positions"] == 21 * 8
    assert found["gradient_checkpointing"] and found["loss"] == "candidates"
    assert figures(out)["max_batch_139gib"]["value"] == 21


def test_a_search_that_was_cut_off_gives_what_had_fitted(tmp_path: Path) -> None:
    import measure_max_batch

    log = tmp_path / "log"
    log.write_text(
        "batch 9: fits, 1 s a step, 9 tokens/s\nmax_batch_16gib: 9 sequences\n"
        "batch 40: out of memory\nbatch 20: fits, 2 s a step, 10 tokens/s\n"
        "batch 30: fits, 3 s a step, 10 tokens/s\nbatch 35: out of memory\n"
    )
    figures_file = tmp_path / "figures.jsonl"
    measure_max_batch.settle(log, figures=figures_file, commit="abc", device="one GPU")
    (line,) = lines(figures_file)
    assert line["figure"] == "max_batch_139gib" and line["value"] == 30
    assert "30 fitted, of 35 did not" in line["note"]


@pytest.mark.slow
def test_a_point_is_measured_once_for_all_its_panels(tmp_path: Path, capsys) -> None:
    import measure_scaling

    out = tmp_path / "out"
    measure_scaling.measure(
        out=out, shapes="tiny", device="cpu", largest=4, tokens_divisor=256, steps=1
    )
    rows = lines(out / "results.jsonl")
    panels = {(row["seq_len"], row["batch_size"]): row["panels"] for row in rows}
    assert len(panels) == len(rows)
    assert panels[64, 1] == ["batch", "size"] and panels[64, 2] == ["length"]
    assert panels[64, 4] == ["batch"] and panels[128, 1] == ["length"]
    assert (out / "scaling.svg").stat().st_size > 5000
    assert figures(out)["flatness_percent"]["value"] >= 0
    assert "L = 128" in capsys.readouterr().out


@pytest.mark.slow
def test_larger_batches_than_one_that_does_not_fit_are_left_out(tmp_path, monkeypatch) -> None:
    import measure_scaling

    real = measure_scaling.time_ours

    def time_ours(setting: object, ours: object, batch_size: int) -> object:
        return None if batch_size > 4 else real(setting, ours, batch_size)

    monkeypatch.setattr(measure_scaling, "time_ours", time_ours)
    out = tmp_path / "out"
    measure_scaling.measure(
        out=out, shapes="tiny", device="cpu", panels="batch", largest=64, steps=1
    )
    status = {row["batch_size"]: row["status"] for row in lines(out / "results.jsonl")}
    assert status == {1: "OK", 4: "OK", 16: "OOM"}


@pytest.mark.slow
def test_forming_by_layer_takes_turns_with_forming_at_once(tmp_path: Path, capsys) -> None:
    import measure_layerwise

    out, sizes = tmp_path / "out", {"batch_size": 2, "seq_len": 8, "rounds": 2, "steps": 1}
    measure_layerwise.measure(out=out, **sizes, **SMALL)
    rows = lines(out / "results.jsonl")
    assert [row["case"] for row in rows[:4]] == ["whole", "layer"] * 2
    assert [row["forms_by_layer"] for row in rows[:4]] == [False, True] * 2
    assert len({row["loss_nats"] for row in rows[:4]}) == 1, "the same numbers"
    assert {row["offload"] for row in rows if row["case"] == "max_latent"} == {"latents"}
    found = figures(out)
    assert found["layerwise_over_whole"]["runs"] == 2
    assert {"step_8b_latent_tok_s", "step_70b_frozen_tok_s"} < set(found)
    said = capsys.readouterr().out
    assert "70b_frozen" in said and "max_model_one_h100_latent is not written" in said


@pytest.mark.slow
def test_the_largest_student_is_the_first_that_takes_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import measure_layerwise

    case = measure_layerwise.CASES[-1]
    assert case.shapes[0] == "qwen3-32b" and case.size is not None
    shapes = ("TINY", "tiny", "tiny")
    monkeypatch.setattr(measure_layerwise, "CASES", (replace(case, shapes=shapes),))
    time_ours = measure_layerwise.time_ours

    def full(setting: object, ours: object, batch_size: int) -> object:
        if setting.name == "TINY":
            raise torch.OutOfMemoryError("full")
        return replace(time_ours(setting, ours, batch_size), reserved_gib=70.0)

    monkeypatch.setattr(measure_layerwise, "time_ours", full)
    out, sizes = tmp_path / "out", {"batch_size": 2, "seq_len": 8, "steps": 1}
    measure_layerwise.measure(out=out, device="cpu", **sizes)
    rows = lines(out / "results.jsonl")
    tried = [(row["student"], row["status"]) for row in rows]
    assert tried == [("TINY", "OOM"), ("tiny", "OK")]
    assert set(figures(out)) == {"max_model_one_h100_latent"}


@pytest.mark.parametrize(
    ("reserved", "said"),
    [(78.2, None), (78.4, "reserved 78.4 GiB, expected at most 78.3 GiB"), (None, "no GPU")],
)
def test_a_student_is_of_a_card_that_holds_what_it_reserved(
    tmp_path: Path, capsys, reserved: float | None, said: str | None
) -> None:
    import measure_layerwise

    case = measure_layerwise.CASES[-1]
    row = {"student": "qwen3-14b", "parameters": 14.77e9, "peak_reserved_gib": reserved}
    measure_layerwise._record(tmp_path, case, row)
    printed = capsys.readouterr().out
    if said is None:
        assert figures(tmp_path)["max_model_one_h100_latent"]["value"] == 14.77
    else:
        assert said in printed and printed.count("\n") == 1
        assert not list(tmp_path.iterdir())
