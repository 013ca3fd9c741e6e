"""Ranks that exchange sums: for which one the others wait, told from their heartbeats."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks_case import run_ranks

from qat.backend import device as backends
from qat.logs import read_json_lines
from qat.ranks import Ranks
from qat.train.pulse import Pulse

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
