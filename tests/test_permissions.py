"""Written files have the permissions that the user's umask allows, and never more."""

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_case import build
from quantized import SPECS, tiny_quantized

from qat.files import allowed, held, whole_directory, write_atomically
from qat.hub.files import atomic_file
from qat.hub.unpack import unpack
from qat.logs import JsonLines
from qat.models.checkpoint import save_checkpoint


@pytest.fixture(params=[0o077, 0o022, 0o027], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def modes(place: Path) -> set[tuple[str, int]]:
    return {
        ("directory" if path.is_dir() else "file", stat.S_IMODE(path.stat().st_mode))
        for path in place.rglob("*")
    }


def test_new_files_and_directories_follow_the_umask(tmp_path: Path, umask: int) -> None:
    place = tmp_path / "place"
    with whole_directory(place / "whole") as partial:
        (partial / "inside").mkdir()
        (partial / "inside" / "file").touch()
    with atomic_file(place / "hub") as file:
        file.write(b"x")
    write_atomically(place / "small", "x")
    JsonLines(place / "lines.jsonl").close()
    with held(place / "locked"):
        pass
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), None, place / "checkpoint")
    build(place / "cache", num_sequences=10)
    expected = {("directory", 0o777 & ~umask), ("file", 0o666 & ~umask)}
    assert modes(place) == expected
    assert (allowed(0o777), allowed(0o666)) == (0o777 & ~umask, 0o666 & ~umask)


def test_an_archive_cannot_open_or_arm_files(tmp_path: Path, umask: int) -> None:
    archive = tmp_path / "evil.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, mode in (("name/config.json", 0o6777), ("name/run.sh", 0o7777)):
            member = tarfile.TarInfo(name)
            member.mode = mode
            tar.addfile(member)
    unpack(archive, tmp_path / "place" / "out")
    for kind, mode in modes(tmp_path / "place"):
        assert mode == (0o777 if kind == "directory" else 0o666) & ~umask
