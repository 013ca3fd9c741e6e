"""Stalls, drops of speed and slow ranks: each is reported once."""

import pytest

from qat.train import pulse
from qat.train.pulse import Drop, Slow, SlowRanks, Watchdog, slow_ranks


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
