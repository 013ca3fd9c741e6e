"""Unpacking trusts nothing: evil, damaged and half archives leave no trace."""

import gzip
import os
import subprocess
import tarfile
from pathlib import Path

import lz4.frame
import pytest
from cli_case import call
from hub_case import checkpoint, contents, named, tar_bytes, write_archive

from qat.errors import ConfigError, HubError
from qat.hub.files import MIB
from qat.hub.push import pack
from qat.hub.unpack import Limits, unpack

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


def refuse(archive: Path, message: str, limits: Limits | None = None) -> None:
    before = sorted(os.listdir(archive.parent))
    with pytest.raises(HubError, match=message) as caught:
        unpack(archive, archive.parent / "out", limits=limits or Limits())
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


def test_a_sparse_file_is_refused(place: Path) -> None:
    sparse = (named("name/sparse", tarfile.GNUTYPE_SPARSE), b"")
    refuse(write_archive(place / "a.tar.lz4", HONEST, sparse), "sparse file, which can claim")


def test_bombs_are_refused(place: Path) -> None:
    zeros = (named("name/zeros"), bytes(3 * MIB))
    archive = write_archive(place / "a.tar.lz4", HONEST, zeros)
    refuse(archive, r"unpacks to more than 2,097,152 bytes", Limits(floor_bytes=2 * MIB))


@pytest.mark.parametrize(
    "many",
    [
        [(named(f"name/{i}"), b"") for i in range(70)],
        [(named(f"name/{i}", tarfile.DIRTYPE), b"") for i in range(70)],
        [(named(f"{i}/" + "d/" * 14 + "f"), b"") for i in range(5)],
    ],
    ids=["files", "directories", "implied"],
)
def test_a_bomb_of_names_is_refused(place: Path, many: list) -> None:
    archive = write_archive(place / "a.tar.lz4", *many)
    refuse(archive, "more than 64 files and directories", Limits(floor_bytes=MIB))
    refuse(archive, "more than 20 files and directories", Limits(members=20))


def test_a_size_that_the_disk_cannot_hold_is_refused(place: Path, monkeypatch) -> None:
    class Full:
        free = 17 * MIB

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    archive = write_archive(place / "a.tar.lz4", HONEST, (named("name/zeros"), bytes(2 * MIB)))
    refuse(archive, "or the disk has left; free some space")
    Full.free = MIB
    refuse(archive, "the disk has less than 16 MiB left, expected room for its files")


def test_half_an_archive_is_refused(place: Path) -> None:
    for how in (lz4.frame.compress, gzip.compress):
        for keep in (0.2, 0.5, 0.9, 0.999):
            content = (named("name/random"), os.urandom(5000))
            whole = how(tar_bytes(HONEST, content))
            (place / "a.tgz").write_bytes(whole[: int(len(whole) * keep)])
            refuse(place / "a.tgz", "is damaged: .*fetch it again")


def test_a_tar_file_without_its_end_is_refused(place: Path) -> None:
    for end in (512, 1024, 1536, 2000):
        whole = tar_bytes(HONEST, (named("name/b"), b"x" * 600))
        (place / "a.tar.lz4").write_bytes(lz4.frame.compress(whole[:end]))
        refuse(place / "a.tar.lz4", "ends early")


def test_rubbish_at_the_end_is_refused(place: Path) -> None:
    whole = tar_bytes(HONEST)
    packed = lz4.frame.compress(whole)
    for data in (packed + b"rubbish", gzip.compress(whole) + b"rubbish"):
        (place / "a.tgz").write_bytes(data)
        refuse(place / "a.tgz", "is damaged")
    (place / "a.tgz").write_bytes(lz4.frame.compress(whole + b"x" * 512))
    refuse(place / "a.tgz", "other data follows the end")
    (place / "a.tgz").write_bytes(lz4.frame.compress(whole + bytes(2 * MIB)))
    refuse(place / "a.tgz", "zeros follow the end")


def test_a_flipped_bit_is_noticed(place: Path) -> None:
    archive = write_archive(place / "a.tar.lz4", (named("name/random"), os.urandom(4000)))
    data = bytearray(archive.read_bytes())
    data[2000] ^= 1
    archive.write_bytes(data)
    refuse(archive, "is damaged")


def test_a_damaged_header_does_not_end_the_archive(place: Path) -> None:
    whole = bytearray(tar_bytes(HONEST, (named("name/b"), b"x")))
    whole[1024] ^= 1  # the second header's name, so that its checksum is wrong
    (place / "a.tar.lz4").write_bytes(lz4.frame.compress(bytes(whole)))
    refuse(place / "a.tar.lz4", "no header of a member at byte 1,024")


def test_headers_that_cost_time_are_refused(place: Path) -> None:
    for payload in (
        b"9" * 20000,
        b"2 2 " * 4000 + b"=",
        b"12 a=b\n",
        b"0 a=b\n",
        b"30 GNU.sparse.size=10000000\n",
    ):
        evil = (named("x", tarfile.XHDTYPE), payload)
        refuse(write_archive(place / "a.tar.lz4", evil, HONEST), "is damaged")


def test_long_headers_and_chains_of_them_are_refused(place: Path) -> None:
    long = (named("x", tarfile.GNUTYPE_LONGNAME), b"a" * 2**17)
    refuse(write_archive(place / "a.tar.lz4", long, HONEST), "a header has 131,072 bytes")
    chain = [(named("x", tarfile.GNUTYPE_LONGNAME), b"name/a") for _ in range(2000)]
    refuse(write_archive(place / "a.tar.lz4", *chain, HONEST), "more than 4 headers")


def test_what_is_no_archive_is_refused(place: Path) -> None:
    for data, message in (
        (b"<!DOCTYPE html><p>Quota exceeded", "is a web page, expected"),
        (b"PK\x03\x04zip", "expected .tar.lz4 or .tgz"),
        (b"", "expected .tar.lz4 or .tgz"),
        (lz4.frame.compress(b""), "ends early"),
        (lz4.frame.compress(bytes(1024)), "holds no files"),
    ):
        (place / "a.tgz").write_bytes(data)
        refuse(place / "a.tgz", message)


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
