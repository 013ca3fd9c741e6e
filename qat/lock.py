"""Who works in a directory: one process at a time, as the operating system knows it."""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from qat.errors import ConfigError
from qat.folders import parents_of, real

logger = logging.getLogger(__name__)

UNKNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""What a file system answers that has no locks."""
SIGN = b"process "
"""How the content of a lock begins."""


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Make `out` this process's alone while the block runs; a process that dies lets go of it.

    The lock is a file beside `out`, which need not exist; where `out` is a symbolic link, beside
    the directory behind it, so that all names of a directory have one lock.

    Raises:
        ConfigError: another process has it, or it cannot be written.
    """
    path = real(out).parent / f".{real(out).name}.lock"
    with ExitStack() as stack:
        try:
            stack.enter_context(parents_of(path))
            if out.is_dir() and not os.access(out, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(out))
            descriptor = _locked(path, out)
        except OSError as error:
            raise ConfigError(
                f"out={out} cannot be written ({error.strerror}: {error.filename or path}), "
                "expected a directory of yours in a directory of yours; choose another --out or "
                "change who may write there"
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _locked(path: Path, out: Path) -> int:
    """A descriptor that holds the lock, with this process's name in the file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise ConfigError(
                f"out={out} is in use by {holder or 'another process'}; wait for it, stop it, or "
                "choose another --out"
            ) from None
        except OSError as error:
            if error.errno not in UNKNOWN:
                os.close(descriptor)
                raise
            logger.warning("%s: no locks here; let no two processes work in it at once", out)
        if _is_there(descriptor, path):
            _check_ours(descriptor, path)
            break
        os.close(descriptor)  # its holder removed it in between
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode())
    return descriptor


def _check_ours(descriptor: int, path: Path) -> None:
    """Refuse a file that only happens to be called as the lock is."""
    if os.read(descriptor, len(SIGN)) not in (b"", SIGN):
        os.close(descriptor)
        raise ConfigError(
            f"{path} is in the way, expected a place for qat's lock; move it or choose another "
            "--out"
        )
    os.lseek(descriptor, 0, os.SEEK_SET)


def _is_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
