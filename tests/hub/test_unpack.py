"""Unpacking trusts nothing: evil, damaged and half archives leave no trace."""

import gzip
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
from qat.hub.files import MIB
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
