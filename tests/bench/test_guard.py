"""`qat bench guard`: its twins do the same work, its verdicts, and that it always exits with 0."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from qat.bench.guard import run, twins
from qat.bench.guard.parts import Part, all_parts, weight_parts
from qat.bench.guard.run import Guarded, guarded, read_ratios, run_guard, take_turns, write_ratios
from qat.bench.stats import Interval
from qat.cli import main
from qat.quant.codebook import weighted_kmeans


def test_the_twins_do_the_same_work() -> None:
    form, pack, unpack = weight_parts()
    torch.testing.assert_close(form.ours(), form.twin(), rtol=1e-3, atol=0)  # scales are rounded
    assert torch.equal(pack.ours(), pack.twin()) and torch.equal(unpack.ours(), unpack.twin())
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=2_000), rng.random(2_000)
    levels = twins.lloyd(values, weights, 4)
    np.testing.assert_allclose(levels, weighted_kmeans(values, weights, 4), atol=0.05)


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_ratio_is_that_of_the_work() -> None:
    part = Part("busy", lambda: busy(0.002), lambda: busy(0.001))
    found = guarded(part, 5, None)
    assert found.ratio.median == pytest.approx(2, rel=0.2) and found.verdict == "new"
    assert [len(seconds) for seconds in take_turns(part.ours, part.twin, 3)] == [3, 3]


@pytest.mark.parametrize(
    ("now", "committed", "verdict"),
    [
        (Interval(1.3, 1.2, 1.4), Interval(1.0, 0.9, 1.1), "slower"),
        (Interval(1.3, 1.0, 1.4), Interval(1.0, 0.9, 1.1), "same"),
        (Interval(1.1, 1.09, 1.11), Interval(1.0, 0.99, 1.01), "same"),
        (Interval(0.8, 0.79, 0.81), Interval(1.0, 0.9, 1.1), "faster"),
    ],
)
def test_a_verdict_needs_15_percent_and_intervals_apart(now, committed, verdict) -> None:
    assert Guarded("x", 1.0, 1.0, now, 0.1, committed).verdict == verdict


def test_ratios_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_ratios(tmp_path / "none.json") == {}
    found = [Guarded("x", 1.0, 1.0, Interval(1.5, 1.25, 1.75), 0.1, None)]
    write_ratios(found, "a processor", tmp_path / "ratios.json")
    assert read_ratios(tmp_path / "ratios.json") == {"x": Interval(1.5, 1.25, 1.75)}


def test_every_part_has_a_committed_ratio_and_runs() -> None:
    names = [part.name for part in all_parts()]
    assert set(read_ratios()) == set(names)
    threads = torch.get_num_threads()
    assert [each.name for each in run_guard(rounds=1)] == names
    assert torch.get_num_threads() == threads


def test_a_slowdown_is_printed_and_exits_with_0(monkeypatch, capsys, tmp_path) -> None:
    part = Part("busy", lambda: busy(0.002), lambda: busy(0.001))
    monkeypatch.setattr(run, "all_parts", lambda: [part])
    monkeypatch.setattr(run, "read_ratios", lambda path: {"busy": Interval(1.0, 0.9, 1.1)})
    monkeypatch.setattr(sys, "argv", ["qat", "bench", "guard"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    last = json.loads(printed.splitlines()[-1])
    assert last["slower"] == ["busy"] and last["changes"]["busy"] == pytest.approx(2, rel=0.3)
    assert "slower" in printed and "Committed" in printed
