"""Packs a directory into one file: the same bytes for the same content, whole or not at all."""

import gzip
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import lz4.frame

from qat.errors import HubError
from qat.hub.files import SUFFIXES, atomic_file, is_archive, mebibytes, peeled, regular_files
from qat.logs import Ticker, progress


def pack(directory: Path, out: Path, *, name: str | None = None, skip: str | None = None) -> int:
    """Write the files of `directory` into the archive `out`; their number.

    They lie in a directory called `name`, else as `directory` is; `skip` names one directly in it
    that is left out.

    Names are sorted, and owners, modes and times are left out: equal content gives equal bytes.

    Raises:
        HubError: `directory` is missing or empty, or `out` exists, lies inside it or has a suffix
            of no known archive.
    """
    if not directory.is_dir():
        raise HubError(f"{directory} is not there, expected a directory to pack; check the path")
    root = peeled(directory)
    files = regular_files(root, skip)
    _check(directory, files, out)
    name = name or directory.resolve().name
    with atomic_file(out) as file, _compressor(file, out) as packed:
        _write(packed, root, name, files)
    return len(files)


def _check(directory: Path, files: list[Path], out: Path) -> None:
    if not files:
        raise HubError(f"{directory} holds no files, so there is nothing to pack; check the path")
    if not is_archive(out.name):
        raise HubError(f"out={out} must end in {', '.join(SUFFIXES)}; rename it")
    if out.exists():
        raise HubError(f"out={out} is there already; remove it or choose another --out")
    if out.resolve().is_relative_to(directory.resolve()):
        raise HubError(f"out={out} lies inside {directory}, which it packs; choose another --out")


@contextmanager
def _compressor(file: BinaryIO, out: Path) -> Iterator[BinaryIO]:
    if out.name.endswith(".lz4"):
        with lz4.frame.open(file, "wb", content_checksum=True) as packed:
            yield packed
    else:
        with gzip.GzipFile(
            filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0
        ) as packed:
            yield packed


def _write(packed: BinaryIO, root: Path, name: str, files: list[Path]) -> None:
    total = sum(mebibytes(path.stat().st_size) for path in files)
    with (
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        progress(f"packing {name}", total, "MiB") as ticker,
    ):
        for path in files:
            member = tarfile.TarInfo(f"{name}/{path.relative_to(root).as_posix()}")
            with path.open("rb") as file:
                member.size = path.stat().st_size
                tar.addfile(member, _Ticking(file, ticker))


class _Ticking:
    """A file that moves a progress bar as it is read."""

    def __init__(self, file: BinaryIO, ticker: Ticker) -> None:
        self._file, self._ticker, self._read = file, ticker, 0

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes, as a file does."""
        data = self._file.read(size)
        before, self._read = self._read, self._read + len(data)
        self._ticker.advance(mebibytes(self._read) - mebibytes(before))
        return data
