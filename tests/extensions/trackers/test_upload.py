"""Uploads: what arrives is whole; a folder that fails is tried again and never reaches the run."""

import json
import logging
import shutil
import tempfile
from pathlib import Path

import lz4.frame
import pytest
from run_case import begin, write_steps

from qat.errors import ConfigError, HubError
from qat.extensions.trackers import upload
from qat.extensions.trackers.follow import follow
from qat.extensions.trackers.upload import Upload, check_folder
from qat.hub.files import RECEIPT
from qat.hub.unpack import unpack
from qat.observe.config import TrackConfig


def save(run: Path, step: int, *, is_best: bool = True, old: int | None = None) -> None:
    """A checkpoint as the trainer leaves it; `old` is deleted after it."""
    path = run / "checkpoints" / f"step-{step:06d}"
    (path / "trainer").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"step": step}))
    (path / "model.safetensors").write_bytes(bytes([step % 256]) * 5000)
    (path / "trainer" / "state.safetensors").write_bytes(b"moments")
    if is_best:
        (run / "best").write_text(f"checkpoints/step-{step:06d}\n")
    (run / "latest").write_text(f"checkpoints/step-{step:06d}\n")
    if old is not None:
        shutil.rmtree(run / "checkpoints" / f"step-{old:06d}")


def finish(run: Path, name: str = "q2a2_e2e_0.50_fp32") -> None:
    """The final checkpoint: the best one without the trainer's state."""
    best = run / (run / "best").read_text().strip()
    shutil.copytree(best, run / name, ignore=shutil.ignore_patterns("trainer"))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the seconds of all pauses instead of sleeping."""
    found: list[float] = []
    monkeypatch.setattr(upload.time, "sleep", found.append)
    return found


def step_in(archive: Path, place: Path) -> int:
    out = Path(tempfile.mkdtemp(dir=place))
    unpack(archive, out)
    names = {path.name for path in out.iterdir()} - {RECEIPT}
    assert names == {"config.json", "model.safetensors"}
    return json.loads((out / "config.json").read_text())["step"]


def test_a_run_ends_in_its_best_student_and_its_logs(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with follow(run, TrackConfig(gdrive_dir=folder)):
        begin(run)
        write_steps(run, 1, 4)
        save(run, 2)
        save(run, 4, old=2)
        (run / "report.html").write_text("<html>")
        finish(run)
    names = {"metrics.jsonl", "heartbeat-rank0.jsonl", "recipe.toml", "run.json", "report.html"}
    sent = {path.name for path in (folder / "run").iterdir()}
    assert sent == names | {"q2a2_e2e_0.50_fp32.tar.lz4", "resume.tar.lz4"}
    for name in names:
        assert (folder / "run" / name).read_bytes() == (run / name).read_bytes()
    assert step_in(folder / "run" / "q2a2_e2e_0.50_fp32.tar.lz4", tmp_path) == 4
    assert [*(run / "tracking").iterdir()] == []


def test_each_best_replaces_the_one_before_and_a_stopped_run_keeps_it(
    run, folder, tmp_path
) -> None:
    sender = Upload(run, folder, 1.0)
    sender.poll()
    assert not (folder / "run" / "best.tar.lz4").exists()
    for step, old in ((1, None), (2, 1)):
        save(run, step, old=old)
        sender.poll()
        assert step_in(folder / "run" / "best.tar.lz4", tmp_path) == step
    save(run, 3, is_best=False)
    sender.end(failed=True)
    assert step_in(folder / "run" / "best.tar.lz4", tmp_path) == 2


def test_a_checkpoint_that_vanishes_gives_way_to_the_better_one(
    run, folder: Path, tmp_path: Path, monkeypatch, caplog
) -> None:
    save(run, 1)
    link, sender = upload.os.link, Upload(run, folder, 1.0)

    def link_too_late(source: Path, target: Path) -> None:
        if Path(source).name == "model.safetensors" and "000001" in str(source):
            save(run, 2, old=1)
        link(source, target)

    monkeypatch.setattr(upload.os, "link", link_too_late)
    sender.poll()
    assert not (folder / "run" / "best.tar.lz4").exists()
    sender.poll()
    assert step_in(folder / "run" / "best.tar.lz4", tmp_path) == 2 and caplog.records == []


def test_files_that_are_deleted_while_they_are_packed_are_sent_whole(
    run, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    save(run, 1)

    def pack_late(student: Path, archive: Path) -> int:
        save(run, 2, old=1)
        return pack(student, archive)

    pack = upload.pack
    monkeypatch.setattr(upload, "pack", pack_late)
    sender = Upload(run, folder, 0.0)
    sender.poll()
    assert step_in(folder / "run" / "best.tar.lz4", tmp_path) == 1
    monkeypatch.setattr(upload, "pack", pack)
    sender.poll()
    assert step_in(folder / "run" / "best.tar.lz4", tmp_path) == 2


def test_a_failing_folder_is_tried_again_later_and_later(
    folder: Path, tmp_path: Path, monkeypatch, caplog
) -> None:
    run, now, tried = tmp_path / "run", [0.0], []

    def fail(source: Path, target: Path, *, replace: bool) -> None:
        tried.append(now[0])
        raise HubError("reads back differently") if len(tried) % 2 else OSError("no space")

    begin(run)
    save(run, 1)
    put = upload.put
    monkeypatch.setattr(upload, "put", fail)
    monkeypatch.setattr(upload.time, "monotonic", lambda: now[0])
    sender = Upload(run, folder, 1.0)
    for second in range(200):
        now[0] = float(second)
        sender.poll()
    assert tried == [0, 2, 6, 14, 30, 62, 122, 182]
    (record,) = caplog.records
    assert record.getMessage() == "--gdrive-dir: reads back differently; trying again"
    monkeypatch.setattr(upload, "put", put)
    now[0] = 1000.0
    sender.poll()
    assert step_in(folder / "run" / "best.tar.lz4", tmp_path) == 1


def test_leavings_of_a_killed_run_go(run, folder: Path) -> None:
    left = [
        folder / "run" / ".best.tar.lz4.part-abcd1234",
        run / "tracking" / "upload-abcd1234" / "best.tar.lz4",
    ]
    for path in left:
        path.parent.mkdir(parents=True)
        path.touch()
    Upload(run, folder, 1.0).poll()
    assert not any(path.exists() for path in left) and [*(run / "tracking").iterdir()] == []


def test_what_is_missing_in_the_end_is_said_with_a_command(
    folder: Path, tmp_path: Path, pauses: list[float], caplog
) -> None:
    run = tmp_path / "my run"
    begin(run)
    save(run, 1)
    finish(run, "q2")
    sender = Upload(run, folder, 1.0)
    folder.rmdir()
    sender.end(failed=False)
    last = caplog.records[-1].getMessage()
    assert caplog.records[-1].levelno == logging.WARNING and pauses == [0, 1, 2, 4, 8]
    target, commands = folder / "my run", f"qat hub push '{run}/q2' '{folder}/my run'"
    assert f"by hand: mkdir -p '{target}' && {commands} && cp '{run}/recipe.toml' " in last
    assert not folder.exists()
    folder.mkdir()
    sender.end(failed=False)
    assert sender.missing() == "nothing is missing" and (target / "q2.tar.lz4").exists()


def test_a_folder_that_cannot_take_the_run_is_refused_before_it(
    folder: Path, tmp_path: Path, monkeypatch
) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match="is not there.*is the Drive mounted?"):
        with follow(run, TrackConfig(gdrive_dir=tmp_path / "nowhere")):
            raise AssertionError("the run began")
    (folder / "run").mkdir()
    check_folder(run, folder)
    (folder / "run" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="a run of this name"):
        check_folder(run, folder)
    (folder / "run" / "resume.tar.lz4").touch()
    with pytest.raises(ConfigError, match="--resume"):
        check_folder(run, folder)
    begin(run)  # a run that goes on knows its own folder
    check_folder(run, folder)
    monkeypatch.setattr(upload.os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="cannot be written to"):
        check_folder(run, folder)


def contents_of(place: Path) -> bytes:
    """All bytes below `place`, unpacked where they are packed."""
    found = b""
    for path in sorted(place.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        found += lz4.frame.decompress(data) if path.name.endswith(".lz4") else data
    return found


@pytest.mark.parametrize("name", ["report.html", "checkpoints/step-000001/NOTES.md", "tracking"])
def test_a_link_is_not_sent(run, folder: Path, tmp_path: Path, name: str) -> None:
    private = tmp_path / "private"
    (private / "upload-aaaaaaaa").mkdir(parents=True)
    for file in ("key", "wandb.json", "upload-aaaaaaaa/mine"):
        (private / file).write_text("secret")
    write_steps(run, 1, 1)
    save(run, 1)
    (run / name).symlink_to(private if name == "tracking" else private / "key")
    Upload(run, folder, 1.0).poll()
    assert (folder / "run" / "metrics.jsonl").exists()
    assert b"secret" not in contents_of(folder) and (private / "upload-aaaaaaaa/mine").exists()


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/step-000001", "best"])
def test_a_checkpoint_behind_a_link_is_not_sent(run, folder: Path, tmp_path, link: str) -> None:
    save(run, 1)
    (run / link).rename(tmp_path / "elsewhere")
    (run / link).symlink_to(tmp_path / "elsewhere")
    assert upload.named(run, "best") is None
    Upload(run, folder, 0.0).poll()
    assert not list(folder.rglob("*.lz4"))
