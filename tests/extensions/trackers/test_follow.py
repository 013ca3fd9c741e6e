"""Followers: each line once, over resumptions; what fails or hangs never reaches the run."""

import json
import logging
import shutil
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from cli_case import call
from run_case import begin, cut, loss, write_steps
from train_case import flags

from qat.errors import ConfigError
from qat.extensions.trackers import curves, follow
from qat.extensions.trackers.curves import Sample, TrackerStart, events
from qat.observe.config import TrackConfig


class Memory:
    """A tracker that remembers, and fails where it is told to."""

    def __init__(self, start: TrackerStart, fail_at: int = -1) -> None:
        self.id, self.url = start.id or "first", ""
        self.start = start
        self.points: list[tuple[int, dict]] = []
        self.tables: list[list[Sample]] = []
        self.closed: list[bool] = []
        self.fail_at = fail_at

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step == self.fail_at:
            raise RuntimeError("the server\nis tired")
        self.points.append((step, dict(numbers)))

    def samples(self, rows: list[Sample]) -> None:
        self.tables.append(list(rows))

    def flush(self) -> None: ...

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    """Every tracker that was opened."""
    found: list[Memory] = []

    def open_tracker(flag: str, start: TrackerStart) -> Memory:
        found.append(Memory(start, fail_at=3 if flag == "wandb" else -1))
        return found[-1]

    opening = {flag: partial(open_tracker, flag) for flag in follow.TRACKERS}
    monkeypatch.setattr(follow, "TRACKERS", opening)
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    return found


ONE = TrackConfig(trackio=True)


def steps(tracker: Memory, name: str) -> list[int]:
    return [step for step, numbers in tracker.points if name in numbers]


def test_everything_is_told_once_with_its_unit(opened: list[Memory], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    with follow.follow(run, ONE):
        begin(run)
        write_steps(run, 1, 3)
        time.sleep(0.1)
        write_steps(run, 4, 4)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "st')  # not yet whole
    (tracker,) = opened
    assert steps(tracker, "train/loss_nats") == [1, 2, 3, 4]
    assert steps(tracker, "device/tokens_per_s") == [1, 2, 3, 4]
    assert steps(tracker, "eval/kl_tail_nats") == [2, 4]
    assert (1, {"train/loss_nats": loss(1), "train/valid_tokens": 64}) in tracker.points
    assert (1, {"device/tokens_per_s": 1001.0}) in tracker.points
    assert tracker.tables[-1] == [Sample(2, "The", "text of 2"), Sample(4, "The", "text of 4")]
    assert tracker.closed == [False]
    assert tracker.start.name == "first" and tracker.start.project == "qat"
    assert tracker.start.config["train.lr"] == 0.01 and tracker.start.config["run.device"] == "cpu"


def test_a_resumed_run_goes_on_where_the_tracker_stands(opened: list[Memory], tmp_path) -> None:
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt), follow.follow(run, ONE):
        begin(run)
        write_steps(run, 1, 5)
        raise KeyboardInterrupt
    assert opened[0].closed == [True] and steps(opened[0], "train/loss_nats") == [1, 2, 3, 4, 5]
    with follow.follow(run, ONE):
        time.sleep(0.1)  # the old files are not the resumed run's yet
        assert len(opened) == 1
        cut(run, 3)
        begin(run)
        write_steps(run, 4, 7)
    second = opened[1]
    assert second.start.id == "first" and second.id == "first"
    assert steps(second, "train/loss_nats") == [6, 7] == steps(second, "device/tokens_per_s")
    assert steps(second, "eval/kl_tail_nats") == [6]
    assert [row.step for row in second.tables[-1]] == [2, 4, 6]


def test_a_tracker_that_fails_is_gone_after_one_line(opened, tmp_path, caplog) -> None:
    run = tmp_path / "run"
    with (
        caplog.at_level(logging.WARNING),
        follow.follow(run, TrackConfig(wandb=True, trackio=True)),
    ):
        begin(run)
        write_steps(run, 1, 5)
    failed, other = sorted(opened, key=lambda tracker: -tracker.fail_at)
    assert steps(failed, "train/loss_nats") == [1, 2] and failed.closed == [False]
    assert steps(other, "train/loss_nats") == [1, 2, 3, 4, 5]
    (record,) = caplog.records
    assert record.getMessage() == (
        "--wandb stopped following the run, which goes on without it: RuntimeError: the server is "
        "tired"
    )


def test_a_tracker_that_hangs_is_left(opened: list[Memory], tmp_path, monkeypatch, caplog) -> None:
    free = threading.Event()
    monkeypatch.setattr(Memory, "close", lambda self, failed: free.wait(20))
    monkeypatch.setattr(curves.Curves, "limit_s", 0.05)
    with follow.follow(tmp_path / "run", ONE):
        begin(tmp_path / "run")
    free.set()
    assert [r.getMessage() for r in caplog.records] == [
        "--trackio had not finished 0 s after the run and was left; the last of "
        "metrics.jsonl may be missing there"
    ]


def test_a_run_that_is_refused_has_no_followers(opened: list[Memory], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match="refused"), follow.follow(run, ONE):
        raise ConfigError("refused")
    assert opened == [] and not run.exists()


def test_a_missing_library_is_said_before_the_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(follow, "is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=r"--wandb, .*; run: .*\[wandb\]"):
        with follow.follow(tmp_path / "run", TrackConfig(wandb=True)):
            raise AssertionError("the run began")


def test_names_of_the_run(opened: list[Memory], tmp_path: Path, monkeypatch) -> None:
    config = TrackConfig(wandb=True, wandb_name="mine", wandb_project="theirs", trackio=True)
    with follow.follow(tmp_path / "run", config):
        begin(tmp_path / "run")
    named = sorted((tracker.start.name, tracker.start.project) for tracker in opened)
    assert named == [("mine", "theirs"), ("run", "qat")]


def test_only_numbers_are_curves() -> None:
    line = {"step": 3, "a_nats": 0.5, "b": None, "compiled": True, "graphs": 2, "why": "x"}
    (event,) = events([line])
    assert event.numbers == {"device/a_nats": 0.5, "device/graphs": 2} and event.step == 3
    assert json.dumps(event.numbers)


def test_followers_are_no_part_of_the_recipe(place: Path, tmp_path, monkeypatch, capsys) -> None:
    out, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    words = [*flags(place, max_steps=2), "--out", out]
    recipe.write_text("[train]\ntensorboard = true\nwandb_project = 'mine'\n")
    assert call(monkeypatch, "--recipe", recipe, "train", place / "student", *words) == 0
    assert [*(out / "tracking" / "tensorboard").iterdir()]
    assert "tensorboard" not in (out / "recipe.toml").read_text()
    # the run goes on with others or with none
    assert call(monkeypatch, "train", place / "student", *words, "--resume") == 0
    recipe.write_text("[train]\ntensorbord = true\n")
    assert call(monkeypatch, "--recipe", recipe, "train", place / "student", *words) == 1
    assert "did you mean 'tensorboard'?" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_the_same_command_goes_on_where_the_machine_was_lost(
    place: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    out, folder = tmp_path / "run", tmp_path / "Drive"
    folder.mkdir()
    words = [*flags(place, max_steps=2), "--out", out, "--gdrive-dir", folder, "--resume"]
    assert call(monkeypatch, "train", place / "student", *words) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    shutil.rmtree(out)
    assert call(monkeypatch, "train", place / "student", *words[:-1]) == 1
    assert "go on with it by --resume, choose another --out" in capsys.readouterr().err
    assert call(monkeypatch, "train", place / "student", *words) == 0
    for name in ("metrics.jsonl", "recipe.toml", "best", "latest", "training.csv"):
        assert (out / name).read_bytes() == before[name]
