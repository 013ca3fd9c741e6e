"""A sweep's table: who is ranked, what it is compared with, what is doubtful; telemetry."""

import os
from pathlib import Path

import pytest

from qat.extensions.lab.pages import markdown_table
from qat.extensions.lab.sweep import telemetry
from qat.extensions.lab.sweep.manifest import settings_table
from qat.extensions.lab.sweep.plan import SweepRun
from qat.extensions.lab.sweep.run import cells, routes_taken, spreads, summarise
from qat.extensions.lab.sweep.telemetry import (
    COLUMNS,
    machine_warnings,
    rank_facts,
    read_samples,
    sampled_telemetry,
)
from qat.logs import JsonLines


def row(group: str, cost_s: float, **values: object) -> dict[str, object]:
    steps = {"samples": [1.0, 1.01, 0.99], "step_s": 1.0, "peak_gib": None}
    return {"group": group, "cost_s": cost_s, **steps, **values}


def rows() -> list[dict[str, object]]:
    return [
        *(row("base", cost) for cost in (1.00, 1.01, 0.99)),
        *(row("fast", cost) for cost in (0.50, 0.51, 0.49)),
        *(row("like", cost) for cost in (1.02, 1.00, 1.01)),
        *(row("slow", cost) for cost in (2.0, 2.1)),
        row("once", 0.1),
    ]


GROUPS = ["base", "fast", "like", "slow", "once", "never"]


def test_only_repeats_are_ranked() -> None:
    lines = summarise(GROUPS, rows(), ["slow", "never"], "base")
    assert [line.group for line in lines] == ["fast", "base", "like", "slow", "once", "never"]
    assert [line.is_ranked for line in lines] == [True] * 3 + [False] * 3
    fast, base, like, slow, once, never = lines
    assert fast.against.verdict == "faster" and fast.against.effect == -1.0
    assert like.against.verdict == "same" and base.against is None
    assert slow.against is None and once.against is None and once.between is None
    assert fast.rate == pytest.approx(2.0) and never.rate is None and never.cost is None


def test_the_table_says_what_was_not_measured_with_a_dash() -> None:
    headings, body = cells(summarise(GROUPS, rows(), ["slow", "never"], "base"))
    shown = {words[0]: dict(zip(headings, words, strict=True)) for words in body}
    assert shown["fast"]["rank"] == "1" and shown["fast"]["x baseline"] == "2.000"
    assert shown["slow"]["rank"] == "-" and shown["slow"]["repeats"] == "2 of 3"
    assert shown["never"]["repeats"] == "0 of 1" and shown["never"]["rate"] == "-"
    assert shown["fast"]["effect"] == "+1.00" and shown["base"]["verdict"] == "-"
    assert shown["fast"]["GiB"] == "-"
    # one run has a rate, and no interval
    assert shown["once"]["rate"] == "10" and shown["once"]["95 % low"] == "-"
    assert shown["fast"]["high"] != "-"
    assert markdown_table(*cells(summarise(["base"], rows(), [], "base"))).count("\n") == 3


def test_the_spread_of_the_machine_beside_that_of_the_settings() -> None:
    machine, settings = spreads(summarise(GROUPS, rows(), [], "base"))
    assert machine < 0.03 < settings
    assert spreads([]) == (None, None)


def test_what_is_doubtful_is_said() -> None:
    trend = {"slope_mib": 1.5}
    doubtful = row("a", 1.0, samples=[1.0, 2.0], is_leaking=True, memory_trend=trend)
    doubtful |= {"fallbacks": ["ran uncompiled"], "machine_warnings": ["GPU at 90 C"]}
    (line,) = summarise(["a"], [doubtful, doubtful], [], "a")
    assert line.warnings == (
        "GPU at 90 C",
        "ran uncompiled",
        "steps of a run vary by more than 12%",
        "memory grows by 1.5 MiB a step",
    )


def test_what_a_gpu_does_not_tell_is_empty() -> None:
    known = {"gpu_util_pct": 97, "gpu_temp_c": 83, "gpu_power_w": 412.5}
    first, second = known, {**dict.fromkeys(known), "gpu_temp_c": 40, "gpu_clock_mhz": 345}
    samples = [{**first, "gpu_clock_mhz": clock} for clock in (1980, 1980, 1600, 1600)]
    found = telemetry.summarise(samples)
    assert machine_warnings(found) == ["GPU at 83 C", "GPU clock moved by 21%"]
    assert found["rss_mib"] is None and telemetry.summarise([second])["gpu_clock_mhz"] is None


def test_without_a_gpu_columns_stay_empty(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(telemetry, "gpu_samples", list)
    with sampled_telemetry(os.getpid(), tmp_path / "t" / "a.csv", 5.0):
        pass
    (sample,) = read_samples(tmp_path / "t" / "a.csv")
    assert tuple(sample) == COLUMNS and sample["rss_mib"] > 0
    assert sample["gpu_util_pct"] is None and sample["host_cpu_pct"] is None
    summary = telemetry.summarise([sample])
    assert summary["gpu_mem_mib"] is None and machine_warnings(summary) == []
    assert read_samples(tmp_path / "none.csv") == []


def test_ranks_are_told_apart(tmp_path: Path) -> None:
    for rank, seconds in ((0, 1.0), (1, 1.2), (10, 1.1)):
        lines = JsonLines(tmp_path / f"heartbeat-rank{rank}.jsonl")
        for step in range(3):
            lines.write(step=step, step_s=seconds)
        lines.close()
    found = rank_facts(tmp_path)
    assert found["rank_step_s"] == [1.0, 1.2, 1.1] and found["slowest_rank"] == 1
    assert found["rank_spread"] == pytest.approx(0.2)
    assert rank_facts(tmp_path / "none")["slowest_rank"] is None


def test_the_slowest_step_of_all_repeats_is_named() -> None:
    tails = [[[7, 1.5], [2, 1.2]], [[3, 2.5]], [[0, 1.1]]]
    repeats = [
        row("a", 1.0, repeat=number, slowest_steps=tail, step_p99_s=tail[0][1])
        for number, tail in enumerate(tails)
    ]
    (line,) = summarise(["a"], repeats, [], "a")
    assert line.slowest_step == (1, 3, 2.5) and line.step_p99_s == 1.5
    headings, (body,) = cells([line])
    shown = dict(zip(headings, body, strict=True))
    assert (shown["p99 s"], shown["max s"], shown["at"]) == ("1.5", "2.5", "repeat 1, step 3")
    sparse = [{**each, "effective": {"route": "gather"}} for each in repeats]
    assert routes_taken([*sparse, *rows()]) == ["gather (a)"]


def test_settings_of_groups_are_shared_or_stand_in_a_table(tmp_path: Path) -> None:
    common = {"verb": "bench", "student": "tiny", "command": (), "sweep": "s", "out": tmp_path}
    settings = {"a": {"steps": 2, "seq_len": 8}, "b": {"steps": 2, "seq_len": 16, "lr": 1.0}}
    runs = [
        SweepRun(**common, group=name, repeat=0, settings=each) for name, each in settings.items()
    ]
    shared, table = settings_table(runs)
    assert shared == "Settings of all groups: steps = 2."
    assert [line.split(" | ") for line in table.splitlines()[2:]] == [
        ["| a", "8", "- |"],
        ["| b", "16", "1.0 |"],
    ]
