"""Unpack an untrusted archive atomically.

`Members` admits plain files and directories inside the archive, each once. Python's `tarfile` reads
headers through `TarStream`, which rejects malformed input that `tarfile` accepts, before memory or
time run out.
"""

import gzip
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tarfile import BLOCKSIZE, TarInfo
from typing import BinaryIO

import lz4.frame

from qat.errors import HubError
from qat.files import described, sha256_file
from qat.hub.files import MIB, RECEIPT, atomic_directory, innermost_directory, mebibytes
from qat.hub.registry import write_receipt
from qat.logs import progress

OPENERS = {b"\x04\x22\x4d\x18": lz4.frame.open, b"\x1f\x8b": gzip.open}
"""Decompressors by the first bytes of a file."""
CORRUPT = (EOFError, OSError, RuntimeError, zlib.error)
"""Exceptions of the decompressors: lz4 raises RuntimeError, gzip OSError, both EOFError when
truncated."""
EXTENSIONS = b"LKxgX"
"""Header types whose payload describes the next header."""
PAYLOAD_BYTES = 2**15  # maximum size of a payload that describes a member
CHAIN = 4
"""Maximum number of such headers per member: a long name, a long link, two of pax."""
RECORD = re.compile(rb"(\d{1,5}) ([^=\0\n]{1,255})=")  # `LENGTH KEY=` of a record in a pax header
LONG_NUMBER = re.compile(rb"\d{64}")
PADDING_BYTES = MIB
"""Maximum number of zero bytes after the end: tar pads to its record size, 10 KiB by default."""
JUNK = (".DS_Store", "__MACOSX")  # metadata of macOS
KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a pipe",
}
RESERVE_BYTES = 16 * MIB
"""Free disk space that unpacking must leave."""
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


# Limits far above any legitimate archive of a cache, a checkpoint or a run.
MEMBERS = 100_000  # files and directories, including implied parent directories
DEPTH = 16  # components of a path
NAME_BYTES = 1024  # a path in UTF-8; each component may have 255
RATIO = 100  # unpacked bytes per packed byte: tensors reach 10, a gzip bomb 1,000
FLOOR_BYTES = 64 * MIB  # unpacked size that is allowed for any archive, however small
ENTRY_BYTES = 2**14  # cost of a file or directory: empty ones also take time and disk space


def unpack(archive: Path, out: Path, *, replace: bool = False) -> None:
    """Unpack `archive` (.tar.lz4 or .tgz) so that its files lie in `out`.

    Directories that enclose all files are removed: `name/files` and `name/name/files`, as one
    packer of old caches wrote it, both become `out/files`. With `replace`, files of an older `out`
    that `qat hub` fetched are replaced; others are kept, and a conflict with one is an error.

    Raises:
        HubError: the archive is damaged, truncated or not trustworthy, or `out` is in use.
    """
    with atomic_directory(out, replace=replace) as partial:
        extract(archive, partial)
        write_receipt(innermost_directory(partial), None, str(archive), sha256_file(archive))


def extract(archive: Path, into: Path) -> None:
    """Write the files of `archive` below the empty directory `into`.

    Raises:
        HubError: the archive is missing, damaged, truncated or not trustworthy.
    """
    if not archive.is_file():
        raise HubError(
            f"{archive} {described(archive)}, expected a .tar.lz4 or .tgz file; check the path"
        )
    packed, free = archive.stat().st_size, shutil.disk_usage(into).free
    limit = min(max(RATIO * packed, FLOOR_BYTES), max(0, free - RESERVE_BYTES))
    bar = progress(f"unpacking {archive.name}", mebibytes(packed), "MiB")
    with bar as ticker, archive.open("rb") as raw, open_stream(raw, archive, limit) as stream:
        num_files = 0
        members = Members(str(archive), min(MEMBERS, limit // ENTRY_BYTES))
        for written in _write_members(stream, members, into):
            num_files += written
            ticker.reach(raw.tell() // MIB)
        stream.finish()
    if num_files == 0:
        raise HubError(f"{archive} holds no files; expected those of a cache or a checkpoint")


def _write_members(stream: "TarStream", members: "Members", into: Path) -> Iterator[int]:
    """Write the members in order; yield the number of files in each, 0 or 1."""
    tar = None
    while True:
        try:
            # the constructor reads the first header, which `next` returns
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


def _write(member: TarInfo, stream: "TarStream", target: Path) -> int:
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(target, CREATE, 0o666), "wb") as file:
        for chunk in stream.chunks(member.size):
            file.write(chunk)
    return 1


class TarStream:
    """The unpacked bytes of an archive, forward only and counted.

    Args:
        file: decompressed stream.
        name: archive name in messages.
        limit: maximum number of bytes to read in all.
    """

    def __init__(self, file: BinaryIO, name: str, limit: int) -> None:
        self._file, self._name, self._limit = file, name, limit
        self._position = self._chain = 0
        self._header, self._awaits_payload = b"", False

    def tell(self) -> int:
        """Return the number of bytes read or skipped so far."""
        return self._position

    def read(self, size: int) -> bytes:
        """Return the next header, or the payload of the previous one; exactly `size` bytes."""
        if size == 1:  # tarfile reads the last byte of a member's padding
            return self._take(size)
        return self._payload(size) if self._awaits_payload else self._next_header(size)

    def seek(self, position: int) -> None:
        """Skip forward to `position`."""
        # tarfile loops forever on a member with a negative offset (CVE-2025-8194)
        if position < self._position:
            raise damaged(self._name, "a member lies before the one that precedes it")
        for _ in self.chunks(position - self._position):
            pass

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes, at most 1 MiB at a time."""
        while size > 0:
            data = self._take(min(size, MIB))
            size -= len(data)
            yield data

    def finish(self) -> None:
        """Check that the archive ended where `tarfile` stopped and that only padding follows.

        Raises:
            HubError: a header is damaged, or other bytes than padding follow.
        """
        # tarfile takes an invalid header for the end, where only the zero block may be
        if any(self._header):
            raise damaged(
                self._name, f"no header of a member at byte {self._position - BLOCKSIZE:,}"
            )
        for _ in range(PADDING_BYTES // BLOCKSIZE):
            block = self._raw(BLOCKSIZE)
            if any(block):
                raise damaged(self._name, "other data follows the end of the archive")
            if not block:
                return
        raise damaged(
            self._name, f"more than {PADDING_BYTES:,} zeros follow the end of the archive"
        )

    def _next_header(self, size: int) -> bytes:
        assert size == BLOCKSIZE
        self._header = self._take(BLOCKSIZE)
        kind = self._header[156:157]
        if kind == b"S":
            raise damaged(self._name, "it holds a sparse file, which can claim any size")
        self._awaits_payload = kind in EXTENSIONS
        self._chain = self._chain + 1 if self._awaits_payload else 0
        if self._chain > CHAIN:
            raise damaged(self._name, f"more than {CHAIN} headers describe one member")
        return self._header

    def _payload(self, size: int) -> bytes:
        # tarfile parses a long header in quadratic time (CVE-2024-6232)
        if not 0 < size <= PAYLOAD_BYTES:
            raise damaged(
                self._name, f"a header has {size:,} bytes, at most {PAYLOAD_BYTES:,} may be"
            )
        payload = self._take(size)
        self._awaits_payload = False
        if self._header[156:157] in b"xgX":
            self._check_records(payload)
        return payload

    def _check_records(self, payload: bytes) -> None:
        """Check a pax header: consecutive `LENGTH KEY=VALUE` lines, then zeros."""
        records, position = payload.rstrip(b"\0"), 0
        if LONG_NUMBER.search(records):
            raise damaged(self._name, "a header holds a number of more than 63 digits")
        while position < len(records):
            match = RECORD.match(records, position)
            position += int(match[1]) if match else 0
            if match is None or position < match.end() or records[position - 1 : position] != b"\n":
                raise damaged(self._name, "a header is not a list of keys and values")
            if match[2].startswith(b"GNU.sparse"):
                raise damaged(self._name, "it holds a sparse file, which can claim any size")

    def _take(self, size: int) -> bytes:
        data = self._raw(size)
        if len(data) < size:
            raise damaged(self._name, "it ends early: only a part of it is there")
        return data

    def _raw(self, size: int) -> bytes:
        if self._position + size > self._limit:
            # a limit of 0 means a full disk: any archive may unpack to `floor_bytes`
            if self._limit == 0:
                raise HubError(
                    f"{self._name} cannot be unpacked: the disk has less than "
                    f"{RESERVE_BYTES // MIB} MiB left, expected room for its files; free some "
                    "space, or choose an --out elsewhere"
                )
            raise HubError(
                f"{self._name} unpacks to more than {self._limit:,} bytes, which is more than its "
                "size allows or the disk has left; free some space, or do not trust this archive"
            )
        try:
            data = self._file.read(size)
        except CORRUPT as error:
            raise damaged(
                self._name, " ".join(str(error).split()) or "it cannot be decompressed"
            ) from None
        self._position += len(data)
        return data


def damaged(name: str, why: str) -> HubError:
    """Return the error for an archive that is truncated or malformed."""
    return HubError(f"{name} is damaged: {why}; fetch it again")


@contextmanager
def open_stream(raw: BinaryIO, path: Path, limit: int) -> Iterator[TarStream]:
    """Yield the stream of an open archive; lz4 or gzip is detected by its first bytes.

    Raises:
        HubError: the file is neither.
    """
    start = raw.read(512)
    raw.seek(0)
    opener = next((each for magic, each in OPENERS.items() if start.startswith(magic)), None)
    if opener is None:
        found = "a web page" if is_web_page(start) else f"a file that starts with {start[:4]!r}"
        raise HubError(f"{path} is {found}, expected .tar.lz4 or .tgz; fetch it again")
    with opener(raw) as file:
        yield TarStream(file, str(path), limit)


def is_web_page(start: bytes) -> bool:
    """Return whether a file that begins with `start` is HTML, a common answer of servers."""
    return start.lstrip().lower().startswith((b"<!doctype html", b"<html", b"<head"))


class Members:
    """The paths seen so far in one archive.

    Links are refused, even those that stay inside: caches and checkpoints never need one, and links
    are the usual way to escape from a directory.
    """

    def __init__(self, archive: str, most: int) -> None:
        """Admit at most `most` members, and as many files and directories implied by them."""
        self.archive, self._most = archive, most
        self._files: set[PurePosixPath] = set()
        self._directories: set[PurePosixPath] = {PurePosixPath()}
        self._count = 0

    def admit(self, member: TarInfo) -> PurePosixPath | None:
        """Return the path of `member` inside the archive, or None for macOS metadata to skip.

        Raises:
            HubError: the member is no file or directory, lies outside, or occurs twice.
        """
        self._count += 1
        self._check_number(self._count)
        path = self._inside(member.name)
        if not (member.isdir() or member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)):
            kind = KINDS.get(member.type, f"a member of type {member.type!r}")
            raise self._refused(f"{kind} ({shown(member.name)})")
        if member.size < 0:
            raise self._refused(f"a file of {member.size} bytes ({shown(member.name)})")
        if RECEIPT in (part.casefold() for part in path.parts):  # macOS file systems ignore case
            raise self._refused(
                f"{RECEIPT}, which 'qat hub' alone writes ('qat hub pack' omits it)"
            )
        if any(part in JUNK or part.startswith("._") for part in path.parts):
            return None
        self._claim(path, member)
        return path

    def _inside(self, name: str) -> PurePosixPath:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise self._refused(f"{shown(name)}, which lies outside of it")
        if not name or not name.isprintable():
            raise self._refused(f"the name {shown(name)}, which is not printable")
        long_part = any(len(part.encode()) > 255 for part in path.parts)
        if long_part or len(name.encode()) > NAME_BYTES or len(path.parts) > DEPTH:
            raise self._refused(f"the name {shown(name)}, which is too long or too deep")
        return path

    def _claim(self, path: PurePosixPath, member: TarInfo) -> None:
        taken = path in self._files or not self._files.isdisjoint(path.parents)
        if taken or (not member.isdir() and path in self._directories):
            raise self._refused(f"{shown(member.name)} twice")
        self._directories.update(path.parents)
        (self._directories if member.isdir() else self._files).add(path)
        self._check_number(len(self._directories) + len(self._files))

    def _check_number(self, found: int) -> None:
        if found > self._most:
            raise self._refused(f"more than {self._most:,} files and directories")

    def _refused(self, what: str) -> HubError:
        return HubError(
            f"{self.archive} holds {what}, expected files and directories inside one directory; "
            "nothing was unpacked: do not trust this archive"
        )


def shown(name: str) -> str:
    """Return a name quoted for a message, and truncated if it is long."""
    return ascii(name if len(name) <= 80 else name[:77] + "...")
