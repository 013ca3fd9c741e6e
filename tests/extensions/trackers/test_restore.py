"""A run that is lost with its machine comes back from where an upload left it."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from crash import stopped_at
from run_case import begin, write_steps
from test_upload import save
from train_case import assert_same_end, config

from qat.errors import ConfigError, HubError
from qat.extensions.trackers import upload
from qat.extensions.trackers.follow import follow
from qat.extensions.trackers.upload import STATE, Upload, named, restore, stage_run
from qat.hub import push
from qat.observe.config import TrackConfig
from qat.train.optim import Optimizer
from qat.train.run import RunDirectory
from qat.train.start import TrainReport, train_student


def run(place: Path, out: Path, *, resume: bool = False) -> TrainReport:
    # what is judged at step 3 stays the best one: later students are judged by one sequence
    settings = config(place, save_every=1, eval_every=3, keep=1)
    return train_student(settings, str(place / "student"), out, resume=resume)


def sent(run: Path, folder: Path) -> Path:
    """Unpack what the folder holds of a run, and return the directory."""
    there = run.with_name("there") / run.name
    shutil.rmtree(there, ignore_errors=True)
    restore(there, folder)
    return there


@pytest.fixture(scope="module")
def whole(place: Path) -> tuple[Path, TrainReport]:
    """A run that nothing stopped."""
    return place / "whole", run(place, place / "whole")


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_lost_machine_loses_no_run(place, whole, folder, tmp_path, step, caplog) -> None:
    caplog.set_level(logging.INFO)
    out = tmp_path / "run"
    with follow(out, TrackConfig(gdrive_dir=folder)), stopped_at(Optimizer, "step", step):
        run(place, out)
    shutil.rmtree(out)
    restore(out, folder)
    assert f"brought {out} back from {folder}/run/{STATE}, as it was at check" in caplog.text
    assert RunDirectory(out).pointed("latest").name == f"step-{step:06d}"
    assert_same_end(whole, out, run(place, out, resume=True))


def test_the_best_student_comes_back_without_its_trainer(run, folder: Path) -> None:
    write_steps(run, 1, 3)
    save(run, 2)
    save(run, 3, is_best=False)
    (run / "tracking").mkdir()
    (run / "tracking/wandb.json").write_text("{}")
    Upload(run, folder, 1.0).poll()
    there = sent(run, folder)
    names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    model = {f"checkpoints/step-00000{n}/{f}" for n in (2, 3) for f in ("config.json", "model")}
    logs = {"recipe.toml", "run.json", "metrics.jsonl", "heartbeat-rank0.jsonl"}
    state = {"checkpoints/step-000003/trainer/state.safetensors"}
    pointers = {"best", "latest", "tracking/wandb.json"}
    assert names == {n.replace("/model", "/model.safetensors") for n in model} | logs | state | (
        pointers
    )
    assert (there / "best").read_text() == "checkpoints/step-000002\n"


def test_one_state_is_there_and_a_new_one_now_and_then(folder: Path, tmp_path, monkeypatch) -> None:
    run, now = tmp_path / "run", [0.0]
    monkeypatch.setattr(upload.time, "monotonic", lambda: now[0])
    begin(run)
    sender, arrived = Upload(run, folder, 1.0), []
    for second in range(0, 1500, 100):
        now[0] = float(second)
        save(run, second, is_best=False)
        sender.poll()
        arrived.append((sent(run, folder) / "latest").read_text().strip())
    steps = [int(name[-6:]) for name in arrived]
    assert steps == [0] * 6 + [600] * 6 + [1200] * 3
    sender.end(failed=True)
    assert (sent(run, folder) / "latest").read_text() == "checkpoints/step-001400\n"
    assert [path.name for path in (folder / "run").glob("*.lz4")] == [STATE]


def test_a_killed_upload_leaves_the_older_state(run, folder: Path, monkeypatch) -> None:
    save(run, 1, is_best=False)
    Upload(run, folder, 1.0).poll()
    save(run, 2, is_best=False)

    def half(source: Path, out, ticker) -> None:
        out.write(source.read_bytes()[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(push, "copy_file", half)
        with pytest.raises(KeyboardInterrupt):
            Upload(run, folder, 1.0).poll()
    assert (sent(run, folder) / "latest").read_text() == "checkpoints/step-000001\n"


def test_a_state_that_is_too_large_is_not_sent_and_said(run, folder: Path, caplog) -> None:
    sender = Upload(run, folder, 4096 / 2**30)
    for step in (1, 2):
        save(run, step, is_best=False)
        sender.end(failed=True)
    (record,) = warnings(caplog)
    assert "GiB, more than --gdrive-state-gib 3.81e-06: it is not sent, and" in record.getMessage()
    assert not (folder / "run" / STATE).exists() and sender.missing() == "nothing is missing"
    Upload(run, folder, 0.0).end(failed=True)
    assert not (folder / "run" / STATE).exists() and warnings(caplog) == [record]


def warnings(caplog) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_checkpoint_that_is_deleted_meanwhile(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(run)
    save(run, 1)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(FileNotFoundError, match="step-000001"):
        stage_run(run, tmp_path / "staged")


def test_what_is_here_is_not_replaced(run, folder: Path) -> None:
    save(run, 1)
    Upload(run, folder, 1.0).poll()
    facts = {"device": "another"}
    (run / "run.json").write_text(json.dumps(facts))
    restore(run, folder)
    assert json.loads((run / "run.json").read_text()) == facts
    (run / "recipe.toml").unlink()
    with pytest.raises(ConfigError, match="is not empty"):
        restore(run, folder)
    shutil.rmtree(run)
    archive = folder / "run" / STATE
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(HubError, match="damaged|incomplete|ends"):
        restore(run, folder)
    assert not run.exists()


def test_a_pointer_that_leads_elsewhere_sends_nothing(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best").write_text("../private\n")
    (tmp_path / "staged").mkdir()
    assert named(tmp_path / "run", "best") is None
    stage_run(tmp_path / "run", tmp_path / "staged")
    assert list((tmp_path / "staged").iterdir()) == []
