"""Stalls, drops of speed and slow ranks: each is reported once."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks_case import run_ranks

from qat.backend import device as backends
from qat.logs import read_json_lines
from qat.ranks import Ranks
from qat.train import pulse
from qat.train.pulse import Drop, Pulse, Slow, SlowRanks, Watchdog, slow_ranks


def test_a_stall_is_reported_once_and_later_in_first_steps_and_pauses() -> None:
    now, found = [0.0], []
    dog = Watchdog(10, lambda: now[0], found.append)

    def look(*times: float) -> list[float]:
        found.clear()
        for now[0] in times:
            dog.look()
        return [*found]

    assert look(30, 31, 99) == [31]  # the first step may take three times as long
    now[0] = 100
    dog.progress(1)
    assert look(105, 110, 111, 200) == [11]
    dog.progress(1)
    assert look(209, 215) == [15]
    dog.progress(pulse.PAUSE)
    assert look(315, 316) == [101]


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


STEPS = 4


def batches(seconds: float) -> Iterator[None]:
    for _ in range(STEPS * 2):
        time.sleep(seconds)
        yield None


def beat_on(ranks: Ranks, path: Path, *, fetch_s: float, work_s: float) -> list[float]:
    """Return the time in exchanges that each beat reports of a rank with such steps."""
    with Pulse(path, backends.select("cpu"), ranks, stall_s=600.0, flops_share=None) as pulse:
        for step, _ in enumerate(pulse.timed(batches(fetch_s)), 1):
            time.sleep(work_s)
            ranks.sum_([torch.ones(3)])
            pulse.stepped(step, 10)
            if step % 2 == 0:
                pulse.beat(step, loss_nats=1.0, grad_norm=1.0, facts={})
        ranks.wait()
        if ranks.is_first:
            pulse.compare_ranks()
    path = path / f"heartbeat-rank{ranks.rank}.jsonl"
    return [line["exchange_s"] for line in read_json_lines(path)]


@pytest.mark.parametrize(
    ("cause", "fetch_s", "work_s"), [("device", 0.001, 0.06), ("data", 0.06, 0.001)]
)
def test_the_slow_rank_is_named_with_its_cause(
    tmp_path: Path, cause: str, fetch_s: float, work_s: float
) -> None:
    def act(ranks: Ranks) -> list[float]:
        mine = {"fetch_s": fetch_s, "work_s": work_s} if ranks.rank == 1 else {}
        return beat_on(ranks, tmp_path, **{"fetch_s": 0.001, "work_s": 0.01, **mine})

    fast, slow = run_ranks(2, act, tmp_path / "ranks")
    assert sum(fast) > 2 * sum(slow)
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["slow_rank"], event["cause"]) == ("slow_rank", 1, cause)
    assert event["times_median"] > 1.5
