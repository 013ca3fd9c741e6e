"""The real libraries, offline: what is read back from their own files is what the run wrote.

MLflow, which developers do not install, is a mock.
"""

import json
import logging
import sqlite3
import struct
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from run_case import begin, cut, loss, write_steps

from qat.extensions.trackers import follow
from qat.extensions.trackers.curves import TrackerStart, Wandb
from qat.observe.config import TrackConfig

BLOCK = 2**15
SECRET = "a-value-that-nobody-may-see"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """A run followed by all three, stopped at step 3 and resumed from 2; and what was said."""
    place = tmp_path_factory.mktemp("trackers")
    run, said = place / "my_run", []
    handler = logging.Handler(logging.INFO)  # what another test made louder does not count
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("qat.extensions.trackers").addHandler(handler)
    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(follow, "POLL_S", 0.02)
        # nobody is logged in here, whatever this machine's user did
        for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "TRACKIO_DIR"):
            patch.setenv(name, str(place / "home"))
        patch.setenv("NETRC", str(place / "home" / "netrc"))
        patch.setenv("HUB_PAT", SECRET)
        patch.setattr("sys.argv", ["qat", "train", f"https://me:{SECRET}@host/student"])
        for name in ("WANDB_API_KEY", "WANDB_MODE"):
            patch.delenv(name, raising=False)
        config = TrackConfig(wandb=True, tensorboard=True, trackio=True)
        with pytest.raises(RuntimeError, match="power"), follow.follow(run, config):
            begin(run)
            write_steps(run, 1, 3)
            raise RuntimeError("power")
        with follow.follow(run, config):
            cut(run, 2)
            begin(run, commit="4567def")
            write_steps(run, 3, 4)
    yield place, said + printed.getvalue().splitlines()
    logging.getLogger("qat.extensions.trackers").removeHandler(handler)


@pytest.mark.slow
def test_wandb_keeps_the_run_for_later(place: tuple[Path, list[str]]) -> None:
    run = place[0] / "my_run"
    offline = sorted((run / "tracking" / "wandb").glob("offline-run-*"))
    run_id = json.loads((run / "tracking" / "wandb.json").read_text())["id"]
    # a folder of the same second has a number behind the run's name
    assert [f"-{run_id}" in folder.name for folder in offline] == [True, True]
    records = b"".join(b"".join(leveldb_records(f / f"run-{run_id}.wandb")) for f in offline)
    for name in (b"train/loss_nats", b"device/tokens_per_s", b"eval/kl_tail_nats", b"my_run"):
        assert name in records
    for step in range(1, 5):
        assert str(loss(step)).encode() in records
    tables = [json.loads(path.read_text())["data"] for path in run.rglob("*.table.json")]
    assert [[2, "The", "text of 2"], [4, "The", "text of 4"]] in tables


@pytest.mark.slow
def test_no_tracker_keeps_a_secret(place: tuple[Path, list[str]]) -> None:
    files = [path for path in place[0].rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.slow
def test_nobody_logged_in_is_said_once_a_process(place: tuple[Path, list[str]]) -> None:
    said = [line for line in place[1] if line.startswith("wandb: ")]
    assert len(said) == 2 and all("not logged in: the run is kept here; " in line for line in said)
    assert all("wandb sync" in line and "\n" not in line for line in said)
    assert len(place[1]) == 2


def test_a_server_that_does_not_answer_is_the_same_as_no_login(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    import wandb

    calls: list[object] = []

    def init(*, mode: str | None, id: str, **_: object) -> SimpleNamespace:
        calls.append((mode, id))
        if mode is None:
            raise wandb.errors.CommError("deadline exceeded\nwhile retrying")
        settings = SimpleNamespace(sync_dir="there")
        return SimpleNamespace(settings=settings, url=None, define_metric=lambda *_, **__: None)

    online = SimpleNamespace(settings=SimpleNamespace(mode="online"))
    monkeypatch.setattr(wandb, "setup", lambda: online)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "teardown", lambda: calls.append("teardown"))
    tracker = Wandb(TrackerStart("run", "qat", tmp_path, {}, id="abc"))
    assert (tracker.id, tracker.url) == ("abc", "") and calls == [
        (None, "abc"),
        "teardown",
        ("offline", "abc"),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "wandb: no answer from the server (deadline exceeded): the run is kept here; send it later "
        "with 'wandb sync there'"
    ]


def test_mlflow_continues_its_run_and_ends_it_with_its_state(tmp_path: Path, monkeypatch) -> None:
    library = MagicMock(__spec__=SimpleNamespace(origin="mlflow"))
    library.search_experiments.return_value = [SimpleNamespace(experiment_id="e")]
    library.start_run.return_value.info.run_id = "r"
    library.utils.validation.MAX_PARAM_VAL_LENGTH = 100
    library.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 2
    monkeypatch.setitem(sys.modules, "mlflow", library)
    monkeypatch.setattr(follow, "POLL_S", 0.02)
    run, config = tmp_path / "my_run", TrackConfig(mlflow=True)
    with pytest.raises(RuntimeError, match="power"), follow.follow(run, config):
        begin(run)
        write_steps(run, 1, 3)
        raise RuntimeError("power")
    with follow.follow(run, config):
        cut(run, 2)
        begin(run)
        write_steps(run, 3, 4)
    opened = [call.kwargs for call in library.start_run.call_args_list]
    assert [(call["run_id"], call["run_name"]) for call in opened] == [
        (None, "my_run"),
        ("r", "my_run"),
    ]
    told = [(call.kwargs["step"], call.args[0]) for call in library.log_metrics.call_args_list]
    losses = [
        (step, numbers["train/loss_nats"]) for step, numbers in told if "train/loss_nats" in numbers
    ]
    assert losses == [(step, loss(step)) for step in range(1, 5)]
    settings = {
        key: value
        for call in library.log_params.call_args_list
        for key, value in call.args[0].items()
    }
    assert settings["train.lr"] == 0.01 and settings["run.device"] == "cpu"
    texts = [call.args for call in library.log_text.call_args_list]
    assert texts[-1] == ("Thetext of 4", "samples/0000004.txt")
    assert [call.args for call in library.end_run.call_args_list] == [("FAILED",), ("FINISHED",)]


@pytest.mark.slow
def test_tensorboard_reads_the_curves_back(place: tuple[Path, list[str]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(place[0] / "my_run" / "tracking" / "tensorboard")).Reload()
    points = found.Scalars("train/loss_nats")
    assert [point.step for point in points] == [1, 2, 3, 4]
    assert [point.value for point in points] == pytest.approx([loss(s) for s in range(1, 5)])
    assert [point.step for point in found.Scalars("eval/kl_tail_nats")] == [2, 4]
    assert [point.step for point in found.Scalars("device/tokens_per_s")] == [1, 2, 3, 4]
    (_, sample) = found.Tensors("eval/sample/text_summary")
    assert sample.tensor_proto.string_val[0] == b"**The**text of 4"
    (config,) = found.Tensors("config/text_summary")
    assert b"| train.lr | 0.01 |" in config.tensor_proto.string_val[0]


@pytest.mark.slow
def test_trackio_holds_one_run(place: tuple[Path, list[str]]) -> None:
    with sqlite3.connect(place[0] / "home" / "qat.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics").fetchall()
        (config,) = database.execute("select config from configs").fetchone()
    assert len({row[0] for row in rows}) == 1 and {row[1] for row in rows} == {"my_run"}
    metrics = [(step, json.loads(values)) for _, _, step, values in rows]
    losses = [(step, m["train/loss_nats"]) for step, m in metrics if "train/loss_nats" in m]
    assert losses == [(step, loss(step)) for step in range(1, 5)]
    tables = [m["eval/samples"]["_value"] for _, m in metrics if "eval/samples" in m]
    assert [row["text"] for row in tables[-1]] == ["text of 2", "text of 4"]
    assert json.loads(config)["train.lr"] == 0.01


def leveldb_records(path: Path) -> Iterator[bytes]:
    """The payloads of a log in LevelDB's format behind wandb's header of 7 bytes."""
    data, place = path.read_bytes(), 7
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        _, length, _ = struct.unpack_from("<IHB", data, place)
        yield data[place + 7 : place + 7 + length]
        place += 7 + length
