"""Packing: the same bytes for the same content, whole or not at all."""

import gzip
import hashlib
import os
import subprocess
import tarfile
from pathlib import Path

import lz4.frame
import pytest
from hub_case import checkpoint, contents

from qat.errors import HubError
from qat.files import sha256_file
from qat.hub.files import sha256_tree
from qat.hub.push import pack
from qat.hub.unpack import unpack


@pytest.mark.parametrize("suffix", [".tar.lz4", ".tgz", ".tar.gz"])
def test_equal_content_gives_equal_bytes(suffix: str, tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "a" / "model"), checkpoint(tmp_path / "b" / "model")
    os.utime(other / "config.json", (1, 1))
    (other / "config.json").chmod(0o600)
    (other / ".DS_Store").write_text("litter")
    archives = [tmp_path / f"{name}{suffix}" for name in "ab"]
    assert [pack(*each) for each in zip((one, other), archives, strict=True)] == [3, 3]
    assert archives[0].read_bytes() == archives[1].read_bytes()
    opener = lz4.frame.open if suffix.endswith("lz4") else gzip.open
    with opener(archives[0]) as file, tarfile.open(fileobj=file) as tar:
        members = tar.getmembers()
    names = [member.name for member in members]
    assert names == ["model/config.json", "model/model.safetensors", "model/more/notes.txt"]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m in members} == {(0, 0, 0, "", 0o644)}


def test_a_nested_directory_is_packed_as_one(tmp_path: Path) -> None:
    checkpoint(tmp_path / "name" / "name")
    pack(tmp_path / "name", tmp_path / "a.tar.lz4")
    unpack(tmp_path / "a.tar.lz4", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "name" / "name")


@pytest.mark.parametrize("target", ["private/key", "private", "model/config.json", "nowhere"])
def test_a_link_is_not_packed(tmp_path: Path, target: str) -> None:
    source = checkpoint(tmp_path / "model")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    (source / "more" / "NOTES.md").symlink_to(tmp_path / target)
    with pytest.raises(HubError, match=r"NOTES\.md is a symbolic link"):
        pack(source, tmp_path / "a.tgz")
    assert sorted(os.listdir(tmp_path)) == ["model", "private"]


def test_a_directory_that_holds_one_link_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "name").symlink_to(tmp_path / "private")
    with pytest.raises(HubError, match="name is a symbolic link"):
        pack(tmp_path / "name", tmp_path / "a.tgz")


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    (tmp_path / "alias").symlink_to("model")
    pack(tmp_path / "alias", tmp_path / "a.tgz")
    unpack(tmp_path / "a.tgz", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "model")


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model")
    with pytest.raises(HubError, match="nowhere is not there"):
        pack(tmp_path / "nowhere", tmp_path / "a.tgz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HubError, match="holds no files"):
        pack(tmp_path / "empty", tmp_path / "a.tgz")
    with pytest.raises(HubError, match=r"must end in .tar.lz4, .tgz, .tar.gz"):
        pack(source, tmp_path / "a.zip")
    with pytest.raises(HubError, match="which it packs"):
        pack(source, source / "a.tgz")
    (tmp_path / "a.tgz").write_text("mine")
    with pytest.raises(HubError, match="is there already"):
        pack(source, tmp_path / "a.tgz")
    assert (tmp_path / "a.tgz").read_text() == "mine"
    os.mkfifo(source / "pipe")
    with pytest.raises(HubError, match="a pipe, socket or device"):
        pack(source, tmp_path / "b.tgz")
    assert sorted(os.listdir(tmp_path)) == ["a.tgz", "empty", "model"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    source = checkpoint(tmp_path / "model")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(HubError, match="No space left"):
        pack(source, tmp_path / "a.tar.lz4")
    assert os.listdir(tmp_path) == ["model"]


def test_the_hash_of_a_tree_is_what_sha256sum_says(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model")
    before = sha256_tree(source)
    command = "find * -type f | LC_ALL=C sort | xargs sha256sum | sha256sum"
    said = subprocess.run(
        ["sh", "-c", command], cwd=source, capture_output=True, text=True, check=True
    )
    assert said.stdout.split()[0] == before
    (source / ".qat-hub.json").write_text("{}")
    assert sha256_tree(source) == before
    (source / "more" / "notes.txt").rename(source / "notes.txt")
    assert sha256_tree(source) != before
    path = source / "config.json"
    assert sha256_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()
