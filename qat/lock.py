"""Who works in a directory: one process at a time, as the operating system knows it."""

import errno
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from qat.errors import ConfigError
from qat.files import parents_of, real

logger = logging.getLogger(__name__)

UNKNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""What a file system answers that has no locks."""
POLL_S = 0.02
"""Between attempts at a lock that another process has."""
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
            descriptor = stack.enter_context(locked(path, out))
        except TimeoutError:
            holder = path.read_text(errors="replace").strip() if path.is_file() else ""
            raise ConfigError(
                f"out={out} is in use by {holder or 'another process'}; wait for it, stop it, or "
                "choose another --out"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"out={out} cannot be written ({error.strerror}: {error.filename or path}), "
                "expected a directory of yours in a directory of yours; choose another --out or "
                "change who may write there"
            ) from None
        _check_ours(descriptor, path)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        who = f"process {os.getpid()} on {socket.gethostname()} since {now}\n"
        os.write(descriptor, who.encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, out: Path, *, wait_s: float = 0.0) -> Iterator[int]:
    """Hold the lock that is the file `path`, made if it is not there; the block gets it, open.

    Where a file system has no locks, there is none, and a warning that names `out`. A process that
    was given the descriptor holds the lock, too, also after this one was killed.

    Raises:
        TimeoutError: another process has it, and still had it after `wait_s`.
        OSError: the file cannot be written.
    """
    until = time.monotonic() + wait_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _is_taken(descriptor, out):
                if time.monotonic() >= until:
                    raise TimeoutError
                time.sleep(POLL_S)
            elif _is_there(descriptor, path):  # else its holder removed it in between
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_taken(descriptor: int, out: Path) -> bool:
    """Whether the lock of an open file is this process's now, or locks are not to be had."""
    from filelock import lock_descriptor  # takes a tenth of the time that help may take

    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise
        logger.warning("%s: no locks here; let no two processes work in it at once", out)
        return True


def _check_ours(descriptor: int, path: Path) -> None:
    """Refuse a file that only happens to be called as the lock is."""
    if os.read(descriptor, len(SIGN)) not in (b"", SIGN):
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
