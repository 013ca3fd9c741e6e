"""Pushing: an archive in a folder, and the line that lets others pull it."""

import json
import os
from itertools import product
from pathlib import Path

import pytest
from hub_case import checkpoint, contents, legacy_cache

from qat.cli.hub import push as push_verb
from qat.errors import CheckpointError, ConfigError, HubError
from qat.files import sha256_file
from qat.hub import push as pushing
from qat.hub.files import sha256_tree
from qat.hub.pull import pull
from qat.hub.push import push, put
from qat.hub.registry import HubEntry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "My Drive").mkdir()
    return tmp_path / "My Drive"


def test_pushed_is_pulled(tmp_path: Path, folder: Path) -> None:
    source = checkpoint(tmp_path / "model")
    pushed = push(source, str(folder))
    target = folder / "model.tar.lz4"
    assert pushed.to == str(target) and pushed.kind == "checkpoint"
    assert pushed.bytes == target.stat().st_size and pushed.sha256 == sha256_file(target)
    assert os.listdir(folder) == ["model.tar.lz4"] and pushed.tree_sha256 == sha256_tree(source)
    assert sorted(os.listdir(tmp_path)) == ["My Drive", "model"]
    known = {"size": pushed.bytes, "sha256": pushed.sha256, "tree_sha256": pushed.tree_sha256}
    entry = HubEntry(kind="checkpoint", mirrors=("drive:model.tar.lz4",), **known)
    assert pull("model", entry, tmp_path / "out", drive=folder).is_verified
    assert contents(tmp_path / "out") == contents(source)
    line = pushed.add_line("model", str(target))
    assert line.startswith("qat hub add model --kind checkpoint --mirror '")
    assert line.endswith(f"--sha256 {pushed.sha256} --tree-sha256 {pushed.tree_sha256}")


def test_the_same_again_is_fine_and_another_is_not(tmp_path: Path, folder: Path) -> None:
    source = legacy_cache(tmp_path / "cache")
    first = push(source, str(folder))
    assert first.kind == "cache" and push(source, str(folder)) == first
    (source / "more").write_text("more")
    with pytest.raises(HubError, match="differs; .*--force"):
        push(source, str(folder))
    assert sha256_file(folder / "cache.tar.lz4") == first.sha256
    assert push(source, str(folder), replace=True).sha256 != first.sha256


def test_no_folder(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model")
    with pytest.raises(
        HubError, match="expected a folder .is the Drive mounted.., gs://.* hf://OWNER"
    ):
        push(source, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="private=True of .*, expected hf://OWNER"):
        push_verb(source, str(tmp_path), private=True)
    assert os.listdir(tmp_path) == ["model"]


def test_a_bucket(tmp_path: Path, bucket: Path) -> None:
    pushed = push(checkpoint(tmp_path / "model"), "gs://bucket/runs/")
    assert pushed.to == "gs://bucket/runs/model.tar.lz4"
    assert sha256_file(bucket / "runs" / "model.tar.lz4") == pushed.sha256


def test_what_reads_back_differently_does_not_appear(tmp_path: Path, folder, monkeypatch) -> None:
    source = tmp_path / "file"
    source.write_bytes(b"content")

    def lose(_: Path, out, ticker) -> None:
        out.write(b"conten")

    monkeypatch.setattr(pushing, "copy_file", lose)
    with pytest.raises(HubError, match="what was written reads back differently"):
        put(source, folder / "file")
    assert os.listdir(folder) == []


def test_of_a_run_nothing_outside_is_sent(tmp_path: Path, folder: Path) -> None:
    checkpoint(tmp_path / "private")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    for name in ("..", "../private", "/etc", "."):
        (tmp_path / "run" / "metrics.json").write_text(json.dumps({"final": name}))
        with pytest.raises(HubError, match="metrics.json names"):
            push_verb(tmp_path / "run", str(folder))
        assert os.listdir(folder) == []


def test_a_link_in_a_run_sends_nothing(tmp_path: Path, folder: Path) -> None:
    private = checkpoint(tmp_path / "private" / "step-000012").parent
    for number, name in enumerate(("student", "checkpoints", "checkpoints/step-000012")):
        run = tmp_path / str(number)
        run.mkdir()
        (run / "metrics.jsonl").write_text("")
        (run / "best").write_text("checkpoints/step-000012\n")
        if name == "student":
            (run / "metrics.json").write_text(json.dumps({"final": name}))
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(private if name == "checkpoints" else private / "step-000012")
        for to, with_trainer in product((str(folder), "hf://me/q2"), (False, True)):
            with pytest.raises((HubError, CheckpointError), match="symbolic link|no checkpoint of"):
                push_verb(run, to, with_trainer=with_trainer)
            assert os.listdir(folder) == []


def test_a_link_in_a_checkpoint_sends_nothing(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "key").write_text("secret")
    run = tmp_path / "run"
    step = checkpoint(run / "checkpoints" / "step-000012")
    (run / "metrics.jsonl").write_text("")
    (run / "best").write_text("checkpoints/step-000012\n")
    (step / "NOTES.md").symlink_to(tmp_path / "key")
    with pytest.raises(HubError, match="NOTES.md is a symbolic link"):
        push_verb(run, str(folder))
    assert os.listdir(folder) == []
