"""Unpacks an archive that nobody vouches for, whole or not at all."""

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tarfile import TarInfo

from qat.errors import HubError
from qat.files import sha256_file
from qat.hub.files import atomic_directory, mebibytes, peeled
from qat.hub.limits import MIB, USUAL, Limits
from qat.hub.members import Members
from qat.hub.receipt import leave_receipt
from qat.hub.tar_stream import TarStream, damaged, open_stream
from qat.logs import progress

RESERVE_BYTES = 16 * MIB
"""Of the disk, left free."""
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


def unpack(archive: Path, out: Path, *, replace: bool = False, limits: Limits = USUAL) -> None:
    """Unpack `archive` (.tar.lz4 or .tgz) so that its files lie in `out`.

    Directories around all files are left out: `name/files` and, as one packer of old caches wrote
    it, `name/name/files` both become `out/files`. With `replace`, files of an older `out` that
    `qat hub` brought give way; others stay, and stop it if they are in the way.

    Raises:
        HubError: the archive is damaged, incomplete or not to be trusted, or `out` is in use.
    """
    with atomic_directory(out, replace=replace) as partial:
        extract(archive, partial, limits)
        leave_receipt(peeled(partial), None, str(archive), sha256_file(archive))


def extract(archive: Path, into: Path, limits: Limits = USUAL) -> None:
    """Write the files of `archive` below the empty directory `into`.

    Raises:
        HubError: the archive is missing, damaged, incomplete or not to be trusted.
    """
    if not archive.is_file():
        raise HubError(f"{archive} is not there; expected .tar.lz4 or .tgz; check the path")
    packed, free = archive.stat().st_size, shutil.disk_usage(into).free
    limit = limits.unpacked_bytes(packed, max(0, free - RESERVE_BYTES))
    bar = progress(f"unpacking {archive.name}", mebibytes(packed), "MiB")
    with bar as ticker, archive.open("rb") as raw, open_stream(raw, archive, limit) as stream:
        num_files = shown = 0
        members = Members(str(archive), limits, limits.entries(limit))
        for written in _write_members(stream, members, into):
            num_files += written
            ticker.advance(raw.tell() // MIB - shown)
            shown = raw.tell() // MIB
        stream.finish()
    if num_files == 0:
        raise HubError(f"{archive} holds no files; expected those of a cache or a checkpoint")


def _write_members(stream: TarStream, members: Members, into: Path) -> Iterator[int]:
    """Write one member after the other; the number of files in each."""
    tar = None
    while True:
        try:
            # the constructor reads the first header, and `next` gives it
            tar = tar or tarfile.TarFile(fileobj=stream, encoding="utf-8")
            member = tar.next()
            if member is None:
                return
            tar.members.clear()
            path = members.admit(member)
            if path is not None:
                tarfile.data_filter(member, str(into))
        except (tarfile.TarError, ValueError, OverflowError) as error:
            raise damaged(members.archive, " ".join(str(error).split())) from None
        yield 0 if path is None else _write(member, stream, into / path)


def _write(member: TarInfo, stream: TarStream, target: Path) -> int:
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(target, CREATE, 0o666), "wb") as file:
        for chunk in stream.chunks(member.size):
            file.write(chunk)
    return 1
