"""Archives: what is packed comes back, and evil, damaged and half ones leave no trace."""

import gzip
import hashlib
import os
import subprocess
import tarfile
from itertools import product
from pathlib import Path

import lz4.frame
import pytest
from cli_case import call
from hub_case import checkpoint, contents, named, tar_bytes, write_archive

from qat.errors import ConfigError, HubError
from qat.files import sha256_file
from qat.hub.files import MIB, sha256_tree
from qat.hub.push import pack
from qat.hub.unpack import unpack

HONEST = (named("name/config.json"), b"{}")
EVIL = {
    "absolute path": (named("/tmp/evil"), b"x"),
    "parent": (named("name/../../evil"), b"x"),
    "windows parent": (named("name\\..\\..\\evil"), b"x"),
    "symlink out": (named("name/link", tarfile.SYMTYPE, "/etc"), b""),
    "symlink inside": (named("name/link", tarfile.SYMTYPE, "config.json"), b""),
    "hard link": (named("name/link", tarfile.LNKTYPE, "name/config.json"), b""),
    "character device": (named("name/null", tarfile.CHRTYPE), b""),
    "block device": (named("name/disk", tarfile.BLKTYPE), b""),
    "pipe": (named("name/pipe", tarfile.FIFOTYPE), b""),
    "twice": (named("name/config.json"), b"[]"),
    "below a file": (named("name/config.json/x"), b"[]"),
    "over a directory": (named("name"), b"x"),
    "control characters": (named("name/\x1b[2J"), b"x"),
    "not utf-8": (named("name/\udcff"), b"x"),
    "no name": (named(""), b"x"),
    "long part": (named("name/" + "a" * 256), b"x"),
    "long name": (named("name/" + "/".join(["a" * 250] * 5)), b"x"),
    "deep": (named("a/" * 20 + "b"), b"x"),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return an empty directory for the archive of a test."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def refuse(archive: Path, message: str) -> None:
    before = sorted(os.listdir(archive.parent))
    with pytest.raises(HubError, match=message) as caught:
        unpack(archive, archive.parent / "out")
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(archive.parent)) == before


@pytest.mark.parametrize("suffix", [".tar.lz4", ".tgz"])
def test_what_was_packed_comes_back(suffix: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model", 3 * MIB)
    pack(source, tmp_path / f"model{suffix}")
    unpack(tmp_path / f"model{suffix}", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(source)
    mode = (tmp_path / "out").stat().st_mode & 0o777
    assert mode == 0o755


@pytest.mark.parametrize("how", ["gnu", "posix", "ustar"])
def test_what_the_tar_command_packed(how: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model")
    name = "long" * 12
    (source / name / name).mkdir(parents=True)
    (source / name / name / f"{name}.json").write_text("{}")
    command = ["tar", f"--format={how}", "-czf", "a.tgz", "./model"]
    subprocess.run(command, cwd=tmp_path, check=True)
    unpack(tmp_path / "a.tgz", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(source)


@pytest.mark.parametrize("prefix", ["", "./", "name/", "name/name/", "./name/name/name/"])
def test_directories_around_everything_are_left_out(prefix: str, place: Path) -> None:
    members = [(named(f"{prefix}{name}"), b"{}") for name in ("a.json", "b/c.json")]
    unpack(write_archive(place / "a.tar.lz4", *members), place / "out")
    assert contents(place / "out") == {"a.json": b"{}", "b/c.json": b"{}"}
    assert sorted(os.listdir(place)) == ["a.tar.lz4", "out"]


def test_a_mac_leaves_no_litter(place: Path) -> None:
    litter = [(named(name), b"x" * 700) for name in ("name/._config.json", "name/.DS_Store")]
    members = [litter[0], HONEST, litter[1], (named("name/last"), b"y")]
    unpack(write_archive(place / "a.tar.lz4", *members), place / "out")
    assert contents(place / "out") == {"config.json": b"{}", "last": b"y"}


def test_evil_members_are_refused(place: Path) -> None:
    for what in EVIL:
        archive = write_archive(place / "a.tar.lz4", HONEST, EVIL[what])
        refuse(archive, "do not trust this archive")


def test_bombs_are_refused(place: Path, monkeypatch) -> None:
    monkeypatch.setattr("qat.hub.unpack.FLOOR_BYTES", 2 * MIB)
    zeros = (named("name/zeros"), bytes(3 * MIB))
    archive = write_archive(place / "a.tar.lz4", HONEST, zeros)
    refuse(archive, r"unpacks to more than 2,097,152 bytes")


@pytest.mark.parametrize(
    "many",
    [
        [(named(f"name/{i}"), b"") for i in range(70)],
        [(named(f"name/{i}", tarfile.DIRTYPE), b"") for i in range(70)],
        [(named(f"{i}/" + "d/" * 14 + "f"), b"") for i in range(5)],
    ],
    ids=["files", "directories", "implied"],
)
def test_a_bomb_of_names_is_refused(place: Path, monkeypatch, many: list) -> None:
    archive = write_archive(place / "a.tar.lz4", *many)
    monkeypatch.setattr("qat.hub.unpack.FLOOR_BYTES", MIB)
    refuse(archive, "more than 64 files and directories")
    monkeypatch.setattr("qat.hub.unpack.MEMBERS", 20)
    refuse(archive, "more than 20 files and directories")


def test_a_size_that_the_disk_cannot_hold_is_refused(place: Path, monkeypatch) -> None:
    class Full:
        free = 17 * MIB

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    archive = write_archive(place / "a.tar.lz4", HONEST, (named("name/zeros"), bytes(2 * MIB)))
    refuse(archive, "or the disk has left; free some space")
    Full.free = MIB
    refuse(archive, "the disk has less than 16 MiB left, expected room for its files")


def test_half_an_archive_is_refused(place: Path) -> None:
    whole = tar_bytes(HONEST, (named("name/random"), os.urandom(5000)))
    for how, keep in product((lz4.frame.compress, gzip.compress), (0.2, 0.5, 0.9, 0.999)):
        packed = how(whole)
        (place / "a.tgz").write_bytes(packed[: int(len(packed) * keep)])
        refuse(place / "a.tgz", "is damaged: .*fetch it again")


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


LZ4 = lz4.frame.compress
WHOLE = tar_bytes(HONEST, (named("name/b"), b"x" * 600))
CHECKED = LZ4(tar_bytes((named("name/random"), os.urandom(4000))), content_checksum=True)
SPARSE = tar_bytes(HONEST, (named("name/sparse", tarfile.GNUTYPE_SPARSE), b""))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *((LZ4(WHOLE[:end]), "ends early") for end in (512, 1024, 1536, 2000)),
        (LZ4(WHOLE) + b"rubbish", "is damaged"),
        (gzip.compress(WHOLE) + b"rubbish", "is damaged"),
        (LZ4(WHOLE + b"x" * 512), "other data follows the end"),
        (LZ4(WHOLE + bytes(2 * MIB)), "zeros follow the end"),
        (flipped(CHECKED, 2000), "is damaged"),
        # the second header's name, so that its checksum is wrong: tarfile would call it the end
        (LZ4(flipped(WHOLE, 1024)), "no header of a member at byte 1,024"),
        (LZ4(SPARSE), "sparse file, which can claim"),
        (b"<!DOCTYPE html><p>Quota exceeded", "is a web page, expected"),
        (b"PK\x03\x04zip", "expected .tar.lz4 or .tgz"),
        (b"", "expected .tar.lz4 or .tgz"),
        (LZ4(b""), "ends early"),
        (LZ4(bytes(1024)), "holds no files"),
    ],
)
def test_what_is_no_whole_archive_is_refused(place: Path, data: bytes, message: str) -> None:
    (place / "a.tgz").write_bytes(data)
    refuse(place / "a.tgz", message)


def test_headers_that_cost_time_are_refused(place: Path) -> None:
    for kind, payload, message in (
        (tarfile.XHDTYPE, b"9" * 20000, "a number of more than 63 digits"),
        (tarfile.XHDTYPE, b"2 2 " * 4000 + b"=", "not a list of keys and values"),
        (tarfile.XHDTYPE, b"12 a=b\n", "not a list of keys and values"),
        (tarfile.XHDTYPE, b"0 a=b\n", "not a list of keys and values"),
        (tarfile.XHDTYPE, b"28 GNU.sparse.size=10000000\n", "sparse file, which can claim"),
        (tarfile.GNUTYPE_LONGNAME, b"a" * 2**17, "a header has 131,072 bytes"),
    ):
        refuse(write_archive(place / "a.tar.lz4", (named("x", kind), payload), HONEST), message)
    chain = [(named("x", tarfile.GNUTYPE_LONGNAME), b"name/a") for _ in range(2000)]
    refuse(write_archive(place / "a.tar.lz4", *chain, HONEST), "more than 4 headers")


def test_a_target_in_use_stays_as_it_is(place: Path) -> None:
    archive = write_archive(place / "a.tar.lz4", HONEST)
    out = place / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="out is not empty"):
        unpack(archive, out)
    assert contents(out) == {"mine": b"mine"}
    bad = write_archive(place / "b.tar.lz4", HONEST, EVIL["pipe"])
    with pytest.raises(HubError):
        unpack(bad, out, replace=True)
    assert contents(out) == {"mine": b"mine"}
    unpack(archive, out, replace=True)
    assert contents(out) == {"config.json": b"{}", "mine": b"mine"}  # qat did not write it
    assert sorted(os.listdir(place)) == ["a.tar.lz4", "b.tar.lz4", "out"]
    with pytest.raises(ConfigError, match="is a file, expected a directory"):
        unpack(archive, bad)
    with pytest.raises(HubError, match="nowhere.tgz is not there"):
        unpack(place / "nowhere.tgz", place / "new")


def test_an_unwritable_target_is_one_line(place: Path) -> None:
    archive = write_archive(place / "a.tar.lz4", HONEST)
    (place / "file").write_text("")
    with pytest.raises(HubError, match="writing stopped"):
        unpack(archive, place / "file" / "out")


def test_force_replaces_no_working_directory(tmp_path: Path, monkeypatch, capsys) -> None:
    archive = write_archive(tmp_path / "a.tar.lz4", (named("m/config.json"), b"{}"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("mine.txt").write_text("mine")
    assert call(monkeypatch, "hub", "unpack", archive, "--out", ".", "--force") == 1
    assert "out=. is the working directory" in capsys.readouterr().err
    assert os.listdir(".") == ["mine.txt"] and os.listdir(tmp_path / "here") == ["mine.txt"]


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
