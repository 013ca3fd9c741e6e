"""Pack a directory into an archive, and upload it to a place from which others can pull."""

import gzip
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import BinaryIO, NamedTuple

import lz4.frame

from qat.errors import HubError
from qat.files import described, sha256_file
from qat.hub.files import (
    REPOSITORY,
    SUFFIXES,
    Kind,
    atomic_file,
    copy_file,
    innermost_directory,
    is_archive,
    kind_of,
    mebibytes,
    regular_files,
    sha256_tree,
)
from qat.hub.mirrors import in_store
from qat.logs import Ticker, progress


def pack(directory: Path, out: Path, *, name: str | None = None, skip: str | None = None) -> int:
    """Write the files of `directory` into the archive `out`; return their number.

    Archive paths begin with `name`, by default that of the directory. `skip` names a top-level
    subdirectory to leave out. Paths are sorted, and owners, modes and times are omitted, so equal
    content gives equal bytes.

    Raises:
        HubError: `directory` is missing or empty, or `out` exists, lies inside it or has an unknown
            suffix.
    """
    if not directory.is_dir():
        raise HubError(
            f"{directory} {described(directory)}, expected a directory to pack; check the path"
        )
    root = innermost_directory(directory)
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
    """A file that advances a progress bar when it is read."""

    def __init__(self, file: BinaryIO, ticker: Ticker) -> None:
        self._file, self._ticker, self._read = file, ticker, 0

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes."""
        data = self._file.read(size)
        before, self._read = self._read, self._read + len(data)
        self._ticker.advance(mebibytes(self._read) - mebibytes(before))
        return data


class Pushed(NamedTuple):
    """The location of a pushed archive, its kind and size, and its hashes."""

    to: str
    kind: Kind
    bytes: int
    sha256: str
    tree_sha256: str

    def add_line(self, name: str, mirror: str) -> str:
        """Return the command that registers the archive under `name`."""
        return (
            f"qat hub add {quote(name)} --kind {self.kind} --mirror {quote(mirror)} "
            f"--size {self.bytes} --sha256 {self.sha256} --tree-sha256 {self.tree_sha256}"
        )


TRAINER = "trainer"
"""Subdirectory of a checkpoint that only training needs."""


def push(
    directory: Path,
    to: str,
    *,
    name: str | None = None,
    with_trainer: bool = False,
    replace: bool = False,
) -> Pushed:
    """Pack `directory` as NAME.tar.lz4 and copy the archive to the folder `to` or below gs://.

    In a folder the archive appears atomically, after its bytes were read back and compared. NAME is
    `name`, by default that of the directory.

    Raises:
        HubError: nothing to pack, no such folder, or it holds a different archive of that name.
    """
    inside, skip = name or directory.resolve().name, None if with_trainer else TRAINER
    name = f"{inside}.tar.lz4"
    is_remote = to.startswith("gs://")
    if not is_remote and not Path(to).is_dir():
        raise HubError(
            f"{to} {described(Path(to))}, expected a folder (is the Drive mounted?), gs://... or "
            f"{REPOSITORY}OWNER/NAME; check the path"
        )
    target = f"{to.rstrip('/')}/{name}"
    with tempfile.TemporaryDirectory(prefix=".qat-push-", dir=directory.resolve().parent) as place:
        archive = Path(place, name)
        pack(directory, archive, name=inside, skip=skip)
        root, size, sha256 = (
            innermost_directory(directory),
            archive.stat().st_size,
            sha256_file(archive),
        )
        if is_remote:
            with in_store(target) as (store, path):
                store.put_file(str(archive), path)
        else:
            put(archive, Path(target), replace=replace)
        return Pushed(target, kind_of(root), size, sha256, sha256_tree(root, skip))


def put(source: Path, target: Path, *, replace: bool = False) -> None:
    """Copy a file under a temporary name, verify it by reading it back, and rename it.

    An identical file at `target` is kept.

    Raises:
        HubError: a different file exists and `replace` is false, or the copy differs when read
            back.
    """
    sha256 = sha256_file(source)
    if target.exists() and not replace:
        if sha256_file(target) == sha256:
            return
        raise HubError(f"{target} is there already and differs; replace it with --force")
    bar = progress(f"copying {source.name}", mebibytes(source.stat().st_size), "MiB")
    with atomic_file(target) as file:
        with bar as ticker:
            copy_file(source, file, ticker)
        file.flush()
        if sha256_file(Path(file.name)) != sha256:
            raise HubError(f"{target}: what was written reads back differently; try again")
