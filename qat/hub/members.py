"""Which members of an archive are let in: plain files and directories inside it, each once."""

import tarfile
from pathlib import PurePosixPath
from tarfile import TarInfo

from qat.errors import HubError
from qat.hub.files import RECEIPT
from qat.hub.limits import Limits

JUNK = (".DS_Store", "__MACOSX")
KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a pipe",
}


class Members:
    """The names met so far in one archive.

    No link is let in, not even one that stays inside: what is handed over here never needs one, and
    links are the usual way out of a directory.
    """

    def __init__(self, archive: str, limits: Limits, most: int) -> None:
        """At most `most` members are let in, and files and directories that come of them."""
        self.archive, self._limits, self._most = archive, limits, most
        self._files: set[PurePosixPath] = set()
        self._directories: set[PurePosixPath] = {PurePosixPath()}
        self._count = 0

    def admit(self, member: TarInfo) -> PurePosixPath | None:
        """The path of `member` inside the archive; None for one to pass over (a Mac's litter).

        Raises:
            HubError: it is no file or directory, lies outside, or was there before.
        """
        self._count += 1
        self._check_number(self._count)
        path = self._inside(member.name)
        if not (member.isdir() or member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)):
            kind = KINDS.get(member.type, f"a member of type {member.type!r}")
            raise self._refused(f"{kind} ({shown(member.name)})")
        if member.size < 0:
            raise self._refused(f"a file of {member.size} bytes ({shown(member.name)})")
        if RECEIPT in (part.casefold() for part in path.parts):  # Macs know no other case
            raise self._refused(
                f"{RECEIPT}, which 'qat hub' alone writes ('qat hub pack' omits it)"
            )
        if any(part in JUNK or part.startswith("._") for part in path.parts):
            return None
        self._claim(path, member)
        return path

    def _inside(self, name: str) -> PurePosixPath:
        path, limits = PurePosixPath(name), self._limits
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise self._refused(f"{shown(name)}, which lies outside of it")
        if not name or not name.isprintable():
            raise self._refused(f"the name {shown(name)}, which is not printable")
        long_part = any(len(part.encode()) > 255 for part in path.parts)
        if long_part or len(name.encode()) > limits.name_bytes or len(path.parts) > limits.depth:
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
    """A name for a message: quoted, and cut if it is long."""
    return ascii(name if len(name) <= 80 else name[:77] + "...")
