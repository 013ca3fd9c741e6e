"""The script that sets several GPUs beside one takes turns, and names its figures as asked."""

import json
from functools import partial
from pathlib import Path

import pytest
from ranks_case import run_ranks

from qat.bench.student import Ours
from qat.ranks import Ranks

SPEEDRUN = Path(__file__).parents[2] / "speedrun"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))


def test_one_and_all_take_turns(tmp_path: Path) -> None:
    import measure_ranks

    def act(ranks: Ranks) -> list:
        turns = []
        speeds = measure_ranks.in_turns(
            lambda among: turns.append(among.size) or float(among.size), ranks, 2
        )
        return [turns, *speeds]

    first, second = run_ranks(2, act, tmp_path)
    assert first == [[2, 1, 2, 1], [1.0, 1.0], [2.0, 2.0]]
    assert second == [[2, 2], [], [2.0, 2.0]]


def test_figures_have_the_names_that_are_asked_for(tmp_path: Path) -> None:
    import measure_ranks

    figures = tmp_path / "figures.jsonl"
    for kind, size in (("gpu", 2), ("gpu", 4), ("cache", 4), ("latent", 2)):
        measure_ranks.report(kind, [100.0, 200.0], [190.0, 400.0], size=size, figures=figures)
    found = [json.loads(line) for line in figures.read_text().splitlines()]
    assert [(row["figure"], row["goal"]) for row in found] == [
        ("two_gpu_speedup", ">= 1.9"),
        ("four_gpu_speedup", ">= 3.7"),
        ("cache_four_gpu_speedup", ">= 3.9"),
        ("two_gpu_8b_speedup", ">= 1.9"),
    ]
    assert found[0]["value"] == 1.95 and found[0]["runs"] == 2
    with pytest.raises(SystemExit, match="of 2 and 4 only"):
        measure_ranks.report("gpu", [1.0], [3.0], size=3, figures=figures)


@pytest.mark.slow
def test_both_ways_to_hold_latent_weights_are_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import measure_ranks
    from speed_case import EXACT, LATENT, settled

    values = {"batch_size": 2, "seq_len": 16, "top_k": 8, "steps": 2, "form": "layer"}
    config = settled(device="cpu", **LATENT, **EXACT, **values)

    def act(ranks: Ranks) -> list:
        timings = [
            measure_ranks.timed(
                "tiny", config, ranks, partial(Ours, ranks=ranks, is_sharded=is_sharded)
            )
            for is_sharded in (False, True)
        ]
        if ranks.is_first:
            figures = tmp_path / "figures.jsonl"
            measure_ranks.report_sharding("sharded", 1.5, timings[1], shape="tiny", figures=figures)
        measure_ranks.say("sharded", timings[1], ranks)
        return [[each.positions, each.compiler["forms_by_layer"]] for each in timings]

    assert run_ranks(2, act, tmp_path) == [[[64, True]] * 2] * 2
    said = capfd.readouterr().out.splitlines()
    assert len(said) == 3 and "rank 1" in said[2] and "formed by layer" in said[2]
    found = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [(row["figure"], row["runs"]) for row in found] == [
        ("latents_sharded_peak_gib", 1),
        ("latents_sharded_tokens_per_s", 2),
    ]
