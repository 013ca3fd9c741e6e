"""The pulse: what a heartbeat says, and that nothing about it stops a run."""

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from train_case import config

from qat.backend import device as backends
from qat.logs import JsonLines, read_json_lines
from qat.observe.runs import step_seconds, token_count
from qat.ranks import ALONE, Ranks
from qat.train.pulse import Pulse


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def make_pulse(path: Path, clock: Clock, *, ranks: Ranks = ALONE, **values: object) -> Pulse:
    found = config(path, **values)
    times = {"stall_s": found.stall_s, "beat_s": found.beat_s, "clock": clock}
    return Pulse(path, backends.select("cpu"), ranks, flops_share=1e-3, **times)


def take_steps(pulse: Pulse, clock: Clock, steps: range, seconds: float) -> None:
    for step in steps:
        clock.now += seconds
        pulse.stepped(step, 100)


def slowly(count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(0.001)
        yield number


def beat(pulse: Pulse, step: int) -> float:
    return pulse.beat(step, loss_nats=0.5, grad_norm=1.5, facts={"compiled": False})


def test_a_heartbeat_holds_speed_waits_and_memory(tmp_path: Path) -> None:
    clock = Clock()
    with make_pulse(tmp_path, clock) as pulse:
        assert list(pulse.timed(slowly(3))) == [0, 1, 2]
        take_steps(pulse, clock, range(1, 4), 2.0)
        assert beat(pulse, 3) == 50.0
    (line,) = read_json_lines(tmp_path / "heartbeat-rank0.jsonl")
    assert (line["step"], line["rank"], line["pid"]) == (3, 0, os.getpid())
    assert line["time"].endswith("+00:00") and line["elapsed_s"] == 6.0
    assert (line["loss_nats"], line["grad_norm"], line["compiled"]) == (0.5, 1.5, False)
    assert (line["tokens_per_s"], line["rank_tokens_per_s"], line["step_s"]) == (50.0, 50.0, 2.0)
    assert line["mfu_frac"] == pytest.approx(0.05)
    assert line["data_wait_s"] >= 1e-3 <= line["data_wait_s_p50"] <= line["data_wait_s_p95"]
    assert 0 <= line["step_s_p50"] <= line["step_s_p95"]
    assert line["mem_alloc_mib"] == pytest.approx(1024 * line["mem_alloc_gib"])
    assert line["host_rss_mib"] > 1 and line["plain_kernels"] == {}
    assert line["host_rss_gib"] == pytest.approx(line["host_rss_mib"] / 1024)
    unknown = ("exchange_s", "mem_reserved_mib", "gpu_util_pct", "gpu_power_w", "gpu_temp_c")
    unknown += ("mem_reserved_gib", "alloc_retries", "alloc_failures")
    assert all(line[name] is None for name in unknown)


def test_a_long_step_leaves_a_heartbeat_that_was_not_asked_for(tmp_path: Path) -> None:
    clock = Clock()
    with make_pulse(tmp_path, clock, beat_s=30.0) as pulse:
        for step in range(1, 9):
            take_steps(pulse, clock, range(step, step + 1), 10.0)
            if step == 4:
                beat(pulse, step)
            else:
                pulse.beat_if_due(step, lambda: {"compiled": True})
    lines = read_json_lines(tmp_path / "heartbeat-rank0.jsonl")
    assert [line["step"] for line in lines] == [3, 4, 7]  # 30 s after the last one
    assert [line["loss_nats"] for line in lines] == [None, 0.5, None]
    assert [line["compiled"] for line in lines] == [True, False, True]
    assert [line["tokens_per_s"] for line in lines] == [10.0] * 3
    assert token_count(lines) == 700 and step_seconds(lines) == 70.0


def test_no_seconds_ask_for_no_heartbeat(tmp_path: Path) -> None:
    clock = Clock()
    with make_pulse(tmp_path, clock, beat_s=0.0) as pulse:
        take_steps(pulse, clock, range(1, 2), 1e6)
        pulse.beat_if_due(1, dict)
    assert not (tmp_path / "heartbeat-rank0.jsonl").exists()


def test_a_pause_is_no_training(tmp_path: Path) -> None:
    clock = Clock()
    with make_pulse(tmp_path, clock) as pulse:
        take_steps(pulse, clock, range(1, 3), 1.0)
        with pulse.pause():
            clock.now += 1000
        take_steps(pulse, clock, range(3, 5), 1.0)
        beat(pulse, 4)
    (line,) = read_json_lines(tmp_path / "heartbeat-rank0.jsonl")
    assert line["tokens_per_s"] == 100.0 and line["elapsed_s"] == 1004.0


def test_each_rank_has_files_of_its_own(tmp_path: Path) -> None:
    clock, ranks = Clock(), Ranks(1, 2, torch.device("cpu"))
    with make_pulse(tmp_path, clock, ranks=ranks) as pulse:
        take_steps(pulse, clock, range(1, 2), 1.0)
        beat(pulse, 1)
        pulse.event("not_finite", step=1, loss_nats=float("nan"))
    assert {path.name for path in tmp_path.iterdir()} == {
        "heartbeat-rank1.jsonl",
        "events-rank1.jsonl",
    }
    (line,) = read_json_lines(tmp_path / "heartbeat-rank1.jsonl")
    assert (line["rank"], line["rank_tokens_per_s"], line["exchange_s"]) == (1, 50.0, 0.0)
    (event,) = read_json_lines(tmp_path / "events-rank1.jsonl")
    assert event.pop("time") and event == {"elapsed_s": 1.0, "rank": 1, "step": 1} | {
        "kind": "not_finite",
        "loss_nats": "nan",
    }


def test_a_drop_of_speed_is_an_event_and_one_warning(tmp_path: Path, caplog) -> None:
    clock = Clock()
    with make_pulse(tmp_path, clock) as pulse:
        for step in range(1, 16):
            take_steps(pulse, clock, range(step, step + 1), 20.0 if step < 11 else 60.0)
            beat(pulse, step)
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["step"]) == ("throughput_drop", 13)
    assert event["share"] == pytest.approx(1 / 3)
    assert caplog.text.count("33 % of what was usual") == 1


def test_a_loop_that_stands_still_is_found_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("qat.train.pulse.LOOK_S", 0.01)
    clock = Clock()
    with make_pulse(tmp_path, clock, stall_s=5.0) as pulse:
        pulse.stepped(1, 100)
        clock.now += 6
        for _ in range(500):
            if (tmp_path / "stacks-rank0.txt").exists():
                break
            time.sleep(0.01)
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["step"], event["still_s"]) == ("stall", 1, 6.0)
    assert "test_a_loop_that_stands_still" in (tmp_path / "stacks-rank0.txt").read_text()


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path: Path, monkeypatch, caplog) -> None:
    real = JsonLines.write

    def full(self: JsonLines, **values: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    clock = Clock()
    with make_pulse(tmp_path, clock) as pulse:
        for step, write in enumerate((full, full, real), 1):
            monkeypatch.setattr(JsonLines, "write", write)
            take_steps(pulse, clock, range(step, step + 1), 1.0)
            beat(pulse, step)
    assert [line["step"] for line in read_json_lines(tmp_path / "heartbeat-rank0.jsonl")] == [3]
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "No space left" in warnings[0].getMessage()


def test_stacks_that_cannot_be_written_stop_nothing(tmp_path: Path, caplog) -> None:
    (tmp_path / "stacks-rank0.txt").mkdir()
    with make_pulse(tmp_path, Clock()) as pulse:
        pulse._report_stall(9.0)
    assert len(read_json_lines(tmp_path / "events.jsonl")) == 1
    assert "no stacks in" in caplog.text


def heartbeats(path: Path, *steps: int, text: str = "") -> None:
    """Append a line of each of two ranks per step, of which rank 1 is slow."""
    for rank in range(2):
        with (path / f"heartbeat-rank{rank}.jsonl").open("a") as file:
            for step in steps:
                line = {"rank": rank, "step": step, "step_s": 1.0, "data_wait_s": 0.0}
                file.write(json.dumps({**line, "exchange_s": 0.7 - 0.4 * rank}) + "\n")
            file.write(text)


def test_the_first_rank_compares_the_heartbeats_of_all(tmp_path: Path, caplog) -> None:
    heartbeats(tmp_path, 7, 8, 9)  # of an earlier process
    with make_pulse(tmp_path, Clock(), ranks=Ranks(0, 2, torch.device("cpu"))) as pulse:
        heartbeats(tmp_path, 1, 2)
        pulse.compare_ranks()
        heartbeats(tmp_path, 3)
        pulse.compare_ranks()
        heartbeats(tmp_path, text="\0\0\n")
        for _ in range(2):
            pulse.compare_ranks()
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["slow_rank"], event["cause"]) == ("slow_rank", 1, "device")
    assert event["times_median"] == pytest.approx(7 / 3)
    assert "rank 1 takes 2.33 times as long" in caplog.text
    assert caplog.text.count("compared no more") == 1
