"""The watchdog: what it tells of, how often, and that it ends with the run."""

import time
from pathlib import Path

from qat.train.pulse import Drop, Pace, Stall, Watchdog


def test_a_stall_is_told_once() -> None:
    stall, pace = Stall(10), Pace(since=100.0, step=5, taken=5)
    assert [stall.look(pace, now) for now in (105, 110, 111, 200)] == [None, None, 11, None]
    pace.since = 200.0
    assert [stall.look(pace, now) for now in (209, 215)] == [None, 15]


def test_the_first_step_gets_three_times_as_long() -> None:
    stall, pace = Stall(10), Pace(since=0.0)
    assert [stall.look(pace, now) for now in (30, 31)] == [None, 31]


def test_a_pause_gets_ten_times_as_long() -> None:
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


def test_a_stall_leaves_the_stacks_of_all_threads(tmp_path: Path, caplog) -> None:
    dog, told = make_dog(tmp_path, Pace(since=0.0, step=7, taken=7), now=9.0)
    dog.look()
    dog.look()
    assert told == [("stall", {"still_s": 9.0, "stacks": "stacks-rank0.txt"})]
    stacks = (tmp_path / "stacks-rank0.txt").read_text()
    assert "9 s without a step since step 7" in stacks and "test_watchdog.py" in stacks
    assert caplog.text.count("no step ended for 9 s since step 7") == 1


def test_stacks_that_cannot_be_written_stop_nothing(tmp_path: Path, caplog) -> None:
    dog, told = make_dog(tmp_path / "missing", Pace(since=0.0, taken=1), now=9.0)
    dog.look()
    assert len(told) == 1 and "no stacks in" in caplog.text


def test_it_samples_and_ends_with_its_block(tmp_path: Path) -> None:
    dog, told = make_dog(tmp_path, Pace(since=0.0))
    with dog:
        end = time.monotonic() + 5
        while not dog.health and time.monotonic() < end:
            time.sleep(0.001)
    assert dog.health == {"gpu_temp_c": 41} and told == []
    assert not dog._thread.is_alive()
