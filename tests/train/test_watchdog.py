"""The watchdog: what it tells of, how often, and that it ends with the run."""

import json
import math
import time
from pathlib import Path

import pytest

from qat.train.pulse import Drop, Pace, Slow, SlowRanks, Stall, Watchdog, slow_ranks


def test_a_stall_is_told_once() -> None:
    stall, pace = Stall(10), Pace(since=100.0, step=5, taken=5)
    assert [stall.look(pace, now) for now in (105, 110, 111, 200)] == [None, None, 11, None]
    pace.since = 200.0
    assert [stall.look(pace, now) for now in (209, 215)] == [None, 15]


def test_a_first_step_gets_three_times_as_long_and_a_pause_ten_times() -> None:
    stall, pace = Stall(10), Pace(since=0.0)
    assert [stall.look(pace, now) for now in (30, 31)] == [None, 31]
    stall, pace = Stall(10), Pace(since=0.0, taken=1, is_paused=True)
    assert [stall.look(pace, now) for now in (100, 101)] == [None, 101]
    pace.is_paused, pace.since = False, 1000.0
    assert [stall.look(pace, now) for now in (1010, 1011)] == [None, 11]


def test_a_drop_of_speed_is_told_when_it_lasts() -> None:
    drop = Drop()
    assert all(drop.look(100.0, 20.0) is None for _ in range(10))
    assert drop.look(20.0, 20.0) is None  # one slow stretch is none
    assert drop.look(100.0, 20.0) is None
    assert [drop.look(50.0, 20.0) for _ in range(4)] == [None, None, 0.5, None]
    assert drop.look(100.0, 20.0) is None
    assert [drop.look(50.0, 20.0) for _ in range(3)] == [None, None, 0.5]


def test_short_stretches_add_up_to_a_drop_that_stays_the_usual_speed() -> None:
    drop = Drop()
    for _ in range(20):
        drop.look(100.0, 1.0)
    found = [drop.look(10.0, 1.0) for _ in range(200)]
    assert found == [None] * 29 + [0.1] + [None] * 170


def beat(rank: int, step: int, own_s: float, *, wait_s: float = 0.0) -> dict[str, float]:
    """A line of a rank that spent `own_s` of a step of one second outside the exchange."""
    return {"rank": rank, "step": step, "step_s": 1.0, "exchange_s": 1.0 - own_s} | {
        "data_wait_s": wait_s
    }


def test_the_rank_that_the_others_wait_for_is_named_with_its_cause() -> None:
    by_rank = {0: beat(0, 1, 0.5), 1: beat(1, 1, 0.9), 2: beat(2, 1, 0.55), 3: beat(3, 1, 0.5)}
    assert slow_ranks(by_rank) == [Slow(1, pytest.approx(1.8), "device")]
    by_rank[1] = beat(1, 1, 0.9, wait_s=0.4)
    assert slow_ranks(by_rank) == [Slow(1, pytest.approx(1.8), "data")]
    assert slow_ranks({0: beat(0, 1, 0.5), 1: beat(1, 1, 0.58)}) == []


def test_a_slow_rank_is_told_after_three_beats_of_all_ranks() -> None:
    ranks = SlowRanks(2)
    told = []
    for step in range(1, 8):
        told += [(step, s.slow_rank) for s in ranks.look([beat(0, step, 0.4)])]  # rank 1 is late
        own_s = 0.4 if step == 2 else 0.8
        told += [(step, s.slow_rank) for s in ranks.look([beat(1, step, own_s)])]
    assert told == [(5, 1)]


def test_the_first_beat_counts_though_one_rank_comes_late() -> None:
    ranks = SlowRanks(2)
    told = []
    for step in range(1, 4):
        ranks.look([beat(0, step, 0.4)])
        told += ranks.look([beat(1, step, 0.8)])
    assert [each.slow_rank for each in told] == [1]


def make_dog(path: Path, pace: Pace, now: float = 0.0, **values: object) -> tuple[Watchdog, list]:
    """A watchdog of steps that may take a second, and the list of what it tells."""
    told: list[tuple] = []
    settings = {
        "event": lambda kind, **facts: told.append((kind, facts)),
        "sample": lambda: {"gpu_temp_c": 41},
        "stacks": path / "stacks-rank0.txt",
        "stall_s": 1.0,
        "clock": lambda: now,
    }
    return Watchdog(pace, **{**settings, **values}), told


def test_stacks_that_cannot_be_written_stop_nothing(tmp_path: Path, caplog) -> None:
    dog, told = make_dog(tmp_path / "missing", Pace(since=0.0, taken=1), now=9.0)
    dog.look()
    assert len(told) == 1 and "no stacks in" in caplog.text


def test_the_first_rank_reads_the_heartbeats_of_all(tmp_path: Path, caplog) -> None:
    paths = [tmp_path / f"heartbeat-rank{rank}.jsonl" for rank in range(2)]
    paths[0].write_text(json.dumps(beat(0, 9, 0.1)) + "\n")  # of an earlier process
    dog, told = make_dog(tmp_path, Pace(since=0.0), heartbeats=paths)
    dog._sampled_s = math.inf  # the thread leaves the files to this test
    with dog:
        for rank, path in enumerate(paths):
            with path.open("a") as file:
                for step in (1, 2, 3):
                    file.write(json.dumps(beat(rank, step, 0.3 + 0.4 * rank)) + "\n")
        dog.compare()
    (event,) = [facts for kind, facts in told if kind == "slow_rank"]
    assert event == {"slow_rank": 1, "times_median": pytest.approx(7 / 3), "cause": "device"}
    assert "rank 1 takes 2.33 times as long" in caplog.text


def test_a_heartbeat_that_cannot_be_read_ends_the_comparison(tmp_path: Path, caplog) -> None:
    path = tmp_path / "heartbeat-rank0.jsonl"
    dog, told = make_dog(tmp_path, Pace(since=0.0), heartbeats=[path, path])
    path.write_bytes(b"\0\0\n")
    for _ in range(2):
        dog.compare()
    assert told == [] and caplog.text.count("compared no more") == 1


def test_it_samples_and_ends_with_its_block(tmp_path: Path) -> None:
    dog, told = make_dog(tmp_path, Pace(since=0.0))
    with dog:
        end = time.monotonic() + 5
        while not dog.health and time.monotonic() < end:
            time.sleep(0.001)
    assert dog.health == {"gpu_temp_c": 41} and told == []
    assert not dog._thread.is_alive()
