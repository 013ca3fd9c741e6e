"""Stops: a signal or a file saves and ends the run, and the finished run does not show it."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from train_case import assert_same_end, config

from qat.errors import Stopped
from qat.logs import read_json_lines
from qat.train import resume as stop
from qat.train.optim import Optimizer
from qat.train.resume import HALT, SOAK, Stops
from qat.train.run import RunDirectory
from qat.train.start import TrainReport, train_student

pytestmark = pytest.mark.usefixtures("plain_signals")


def run(place: Path, out: Path, *, resume: bool = False, **values: object) -> TrainReport:
    return train_student(config(place, **values), str(place / "student"), out, resume=resume)


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainReport]:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, run(place, out)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: object) -> None:
    """Call `act` in the middle of optimizer step number `step`."""
    real = Optimizer.step

    def watched(self: Optimizer, number: int) -> torch.Tensor:
        if number == step:
            act()
        return real(self, number)

    monkeypatch.setattr(Optimizer, "step", watched)


@pytest.mark.parametrize(("name", "step", "code"), [("SIGTERM", 1, 143), ("HALT", 3, 3)])
def test_a_stopped_run_saves_and_goes_on_bit_for_bit(
    place: Path, tmp_path: Path, whole, monkeypatch, name: str, step: int, code: int
) -> None:
    out = tmp_path / "run"
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    asks = {
        "HALT": (out / HALT).touch,
        "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    }
    with monkeypatch.context() as patch:
        patch.setattr(stop, "LOOK_S", 0.0)
        at_step(patch, step, asks[name])
        message = rf"stopped by {name} after step {step + 2}; .*step-00000{step + 2} is saved: go"
        with pytest.raises(Stopped, match=message) as caught:
            run(place, out)
    assert caught.value.exit_code == code and not (out / HALT).exists()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert RunDirectory(out).pointed("latest").name == f"step-00000{step + 2}"
    (event,) = (e for e in read_json_lines(out / "events.jsonl") if e["kind"] != "resumed")
    assert event["kind"] == ("halted" if name == "HALT" else "signal") and event["wish"] == name
    assert_same_end(whole, out, run(place, out, resume=True))


def test_a_run_stopped_before_its_first_evaluation_goes_on(
    place: Path, tmp_path: Path, monkeypatch
) -> None:
    values = {"skip_first_eval": True, "eval_every": 6}
    whole, out = tmp_path / "whole", tmp_path / "run"
    report = run(place, whole, **values)
    lines = read_json_lines(whole / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [6]
    assert report.best_step == 6 and lines[0]["kind"] == "train"
    with monkeypatch.context() as patch:
        at_step(patch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped, match="step-000003 is saved"):
            run(place, out, **values)
    assert not RunDirectory(out).has_pointer("best")
    assert_same_end((whole, report), out, run(place, out, resume=True, **values))


def test_a_stop_in_the_last_step_lets_the_run_end(
    place: Path, tmp_path: Path, whole, monkeypatch
) -> None:
    at_step(monkeypatch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert_same_end(whole, tmp_path / "run", run(place, tmp_path / "run"))


def test_a_soak_stops_after_its_last_step_and_not_before(tmp_path: Path) -> None:
    stops = Stops(tmp_path / HALT)
    assert stops.requested(10**6) is None
    stops.last_step = 5
    assert [stops.requested(taken) for taken in (3, 4, 7)] == [None, SOAK, SOAK]


def test_the_first_signal_is_noted_and_the_second_acts(tmp_path: Path) -> None:
    with Stops(tmp_path / HALT) as stops:
        assert stops.requested() is None
        os.kill(os.getpid(), signal.SIGINT)
        assert stops.requested() == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_terminal_that_closes_is_one_request_and_written_to_no_more(tmp_path: Path) -> None:
    master, terminal = os.openpty()
    kept = os.dup(1)
    with Stops(tmp_path / HALT) as stops:
        os.dup2(terminal, 1)
        try:
            os.close(master)
            with pytest.raises(OSError, match="Input/output error"):
                os.write(1, b"x")
            for _ in range(3):  # from the system, the shell, and the shell's end
                os.kill(os.getpid(), signal.SIGHUP)
            os.write(1, b"x")
        finally:
            os.dup2(kept, 1)
        assert stops.requested() == "SIGHUP"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    os.close(kept)
    os.close(terminal)


def test_below_nohup_a_terminal_may_close(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stops(tmp_path / HALT) as stops:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stops.requested() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_directory_that_asks_stays(tmp_path: Path, caplog) -> None:
    (tmp_path / HALT / "thesis").mkdir(parents=True)
    stops = Stops(tmp_path / HALT)
    assert stops.requested() == HALT
    stops.clear_halt()
    assert "HALT cannot be removed (Is a directory): remove it before you go on" in caplog.text
    assert (tmp_path / HALT / "thesis").exists()


def test_the_file_is_looked_for_once_a_second_and_remembered(tmp_path: Path, monkeypatch) -> None:
    stops, now = Stops(tmp_path / HALT), [100.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    assert stops.requested() is None
    (tmp_path / HALT).touch()
    now[0] = 100.9
    assert stops.requested() is None
    now[0] = 101.1
    assert stops.requested() == HALT == stops.requested()
    stops.clear_halt()
    stops.clear_halt()
    assert not (tmp_path / HALT).exists()


def test_another_thread_takes_no_signals(tmp_path: Path) -> None:
    seen = []

    def enter() -> None:
        with Stops(tmp_path / HALT) as stops:
            seen.append((stops.requested(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(None, signal.getsignal(signal.SIGTERM))]
