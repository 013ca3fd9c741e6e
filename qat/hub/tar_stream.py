"""A compressed tar file, read once from front to end, that says no before memory or time run out.

Python's `tarfile` reads headers through `read`, `seek` and `tell`; the bytes of members come from
`chunks`. What `tarfile` would swallow is refused here: a header that is longer than it may be
(CVE-2024-6232 takes quadratic time on one), chains of headers, sparse files, a seek backwards
(CVE-2025-8194 never ends), and an end without the zero block that ends every archive.
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import BinaryIO

import lz4.frame

from qat.errors import HubError
from qat.hub.limits import MIB

OPENERS = {b"\x04\x22\x4d\x18": lz4.frame.open, b"\x1f\x8b": gzip.open}
"""What decompresses, by the first bytes of a file."""
CORRUPT = (EOFError, OSError, RuntimeError, zlib.error)
"""What the decompressors raise: lz4 a RuntimeError, gzip an OSError, both EOFError at a cut."""
EXTENSIONS = b"LKxgX"
"""Types of headers that only describe the next one, by a payload."""
PAYLOAD_BYTES = 2**15
CHAIN = 4
"""How many of them may describe one member: a long name, a long link, two of pax."""
RECORD = re.compile(rb"(\d{1,5}) ([^=\0\n]{1,255})=")
LONG_NUMBER = re.compile(rb"\d{64}")
PADDING_BYTES = MIB
"""Zeros that may follow the end: tar pads to its record, 10 KiB unless told otherwise."""


class TarStream:
    """The unpacked bytes of an archive, forward only and counted.

    Args:
        file: what decompresses.
        name: the archive in messages.
        limit: bytes that may be read in all.
    """

    def __init__(self, file: BinaryIO, name: str, limit: int) -> None:
        self._file, self._name, self._limit = file, name, limit
        self._position = self._chain = 0
        self._header, self._awaits_payload = b"", False

    def tell(self) -> int:
        """Bytes read or skipped so far."""
        return self._position

    def read(self, size: int) -> bytes:
        """The next header, or the payload of the one before; never fewer bytes than `size`."""
        if size == 1:  # the last byte of a member's padding
            return self._take(size)
        return self._payload(size) if self._awaits_payload else self._next_header(size)

    def seek(self, position: int) -> None:
        """Skip to `position`."""
        if position < self._position:
            raise self._damaged("a member lies before the one that precedes it")
        for _ in self.chunks(position - self._position):
            pass

    def chunks(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes, at most 1 MiB at a time."""
        while size > 0:
            data = self._take(min(size, MIB))
            size -= len(data)
            yield data

    def finish(self) -> None:
        """Check that the archive ended where `tarfile` stopped, and that nothing follows.

        Raises:
            HubError: a header was damaged, or other bytes than padding follow.
        """
        if any(self._header):
            raise self._damaged(f"no header of a member at byte {self._position - BLOCKSIZE:,}")
        for _ in range(PADDING_BYTES // BLOCKSIZE):
            block = self._raw(BLOCKSIZE)
            if any(block):
                raise self._damaged("other data follows the end of the archive")
            if not block:
                return
        raise self._damaged(f"more than {PADDING_BYTES:,} zeros follow the end of the archive")

    def _next_header(self, size: int) -> bytes:
        assert size == BLOCKSIZE
        self._header = self._take(BLOCKSIZE)
        kind = self._header[156:157]
        if kind == b"S":
            raise self._damaged("it holds a sparse file, which can claim any size")
        self._awaits_payload = kind in EXTENSIONS
        self._chain = self._chain + 1 if self._awaits_payload else 0
        if self._chain > CHAIN:
            raise self._damaged(f"more than {CHAIN} headers describe one member")
        return self._header

    def _payload(self, size: int) -> bytes:
        if not 0 < size <= PAYLOAD_BYTES:
            raise self._damaged(f"a header has {size:,} bytes, at most {PAYLOAD_BYTES:,} may be")
        payload = self._take(size)
        self._awaits_payload = False
        if self._header[156:157] in b"xgX":
            self._check_records(payload)
        return payload

    def _check_records(self, payload: bytes) -> None:
        """Of a pax header: `LENGTH KEY=VALUE` and a newline, one after the other, then zeros."""
        records, position = payload.rstrip(b"\0"), 0
        if LONG_NUMBER.search(records):
            raise self._damaged("a header holds a number of more than 63 digits")
        while position < len(records):
            match = RECORD.match(records, position)
            position += int(match[1]) if match else 0
            if match is None or position < match.end() or records[position - 1 : position] != b"\n":
                raise self._damaged("a header is not a list of keys and values")
            if match[2].startswith(b"GNU.sparse"):
                raise self._damaged("it holds a sparse file, which can claim any size")

    def _take(self, size: int) -> bytes:
        data = self._raw(size)
        if len(data) < size:
            raise self._damaged("it ends early: only a part of it is there")
        return data

    def _raw(self, size: int) -> bytes:
        if self._position + size > self._limit:
            raise HubError(
                f"{self._name} unpacks to more than {self._limit:,} bytes, which is more than its "
                "size allows or the disk has left; free some space, or do not trust this archive"
            )
        try:
            data = self._file.read(size)
        except CORRUPT as error:
            raise self._damaged(
                " ".join(str(error).split()) or "it cannot be decompressed"
            ) from None
        self._position += len(data)
        return data

    def _damaged(self, why: str) -> HubError:
        return damaged(self._name, why)


def damaged(name: str, why: str) -> HubError:
    """What to raise for an archive that is not whole or not honest."""
    return HubError(f"{name} is damaged: {why}; fetch it again")


@contextmanager
def open_stream(raw: BinaryIO, path: Path, limit: int) -> Iterator[TarStream]:
    """The stream of an archive that is open as `raw`: lz4 or gzip, by its first bytes.

    Raises:
        HubError: it is neither.
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
    """Whether a file that begins with `start` is HTML: what servers send instead of a file."""
    return start.lstrip().lower().startswith((b"<!doctype html", b"<html", b"<head"))
