"""Atomic directories and files, checksums, locks, and checks of untrusted paths."""

import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from itertools import takewhile
from pathlib import Path, PurePosixPath
from secrets import token_hex
from shlex import quote
from typing import Any, BinaryIO

from qat.errors import ConfigError, QatError

logger = logging.getLogger(__name__)

MEND = "remove it or choose another --out"
"""The default remedy in errors about an output directory."""
DOTTED = re.compile(r"(?:[\w\"'-]+[ \t]*\.[ \t]*){64}")
"""A dotted TOML key of at least 64 nested tables."""
KINDS = {
    "config.json": "is a model",
    "manifest.json": "is a teacher cache",
    "metrics.jsonl": "is a run of 'qat train'",
    "student": "is a directory of 'qat run'",
    "recipe.toml": "is a directory of 'qat run'",
}
"""The kind of a directory, by a file in it; the first match counts."""
LEAVING = re.compile(r"\..+\.(partial|old|part)-([a-z0-9_]{8})?")
"""Names of temporary directories and files: incomplete ones, and old ones to be removed."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux's renameat2: the working directory, and the flag to exchange two names."""


@contextmanager
def whole_directory(
    out: Path,
    *,
    replace: bool = False,
    written: Callable[[Path], Collection[str]] = lambda out: (),
    overwrite: bool = True,
    place: Path | None = None,
    root: Callable[[Path], Path] = lambda partial: partial,
    mend: str = MEND,
    durable: bool = True,
) -> Iterator[Path]:
    """Yield a directory to fill; it becomes `out` when the block ends and is removed if it fails.

    The files are on disk before the name is: a crash, a kill or a full disk leaves either no `out`
    or a complete one. Permissions follow the umask, and no file is executable. If `out` is a
    symbolic link, it stays one, and its target is written.

    With `replace` an older `out` stays until the new one is complete. Then the two are exchanged,
    in one step where the system supports it (Linux, on most file systems). Elsewhere there are two
    steps: the first is undone if the second fails, and a kill in between leaves the older directory
    next to `out`, as `.NAME.old-...`.

    Args:
        replace: an `out` that is not empty, before the block or after it, may be replaced.
        written: names of the files in an older `out`, relative to it, that qat wrote. Files that
            are neither among them nor replaced belong to the user and are kept.
        overwrite: files that are not `written` may be replaced by new ones of the same name.
        place: the directory to fill it in, on the same disk as `out`; by default the parent of
            `out`.
        root: maps the filled directory to the one in it that becomes `out`.
        mend: what to do about an `out` that may not be replaced, for the message.
        durable: sync to disk. Without, a loss of power may leave damaged files under the name
            `out`, which suits callers that compare hashes before each use.

    Raises:
        ConfigError: `out` holds something that may not be replaced, or contains the working
            directory.
    """
    check_free(out, replace=replace, mend=mend)
    target = real(out)
    with parents_of(target):
        prefix = f".{target.name}.partial-"
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=place or target.parent))
        try:
            yield partial
            for path in [*partial.rglob("*"), partial]:
                # mkdtemp makes private directories, and safetensors private files
                path.chmod(allowed(0o777 if path.is_dir() else 0o666))
                if durable:
                    sync(path)
            new = root(partial)
            try:
                new.rename(target)  # works if `target` does not exist or is an empty directory
            except OSError:
                if not (target.is_dir() and any(target.iterdir())):
                    raise
                if not replace:
                    raise ConfigError(
                        f"out={out} was filled by somebody else meanwhile, expected it to stay "
                        f"new or empty; {mend}"
                    ) from None
                _replace(target, new, written, overwrite=overwrite)
            sync(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def explained(out: Path, raised: type[QatError], *causes: type[Exception]) -> Iterator[None]:
    """Explain in one line that a block which writes `out` atomically could not write it.

    Raises:
        raised: the block raised an OSError, or another of the `causes`.
    """
    try:
        yield
    except (OSError, *causes) as error:
        # a copy of a directory lists every file; one is enough to show the cause
        cause = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise raised(
            f"{out}: writing stopped ({cause}); nothing new was left there: free some space, or "
            "choose a place that you may write to"
        ) from error


@contextmanager
def parents_of(path: Path) -> Iterator[None]:
    """Create the parent folders of `path`; if the block fails, remove those that are empty."""
    missing = list(takewhile(lambda folder: not folder.exists(), path.absolute().parents))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in missing:
            try:
                folder.rmdir()
            except OSError:  # another process has put something there
                break
        raise


def real(path: Path) -> Path:
    """Return the path with all symbolic links resolved, whether it exists or not.

    All names of a directory have the same real path.
    """
    return Path(os.path.realpath(path))


def check_free(
    out: Path, *, replace: bool = False, mend: str = MEND, in_place: bool = False
) -> None:
    """Refuse an output directory that is not empty; `mend` is the remedy in the message.

    An output that is not written `in_place` replaces the directory: a process whose working
    directory is in it would continue in a deleted one.

    Raises:
        ConfigError: `out` exists and is not empty (and `replace` is false), or is a file, or is the
            working directory or above it.
    """
    if not in_place and real(out) in (here := _working_directory(), *here.parents):
        raise ConfigError(
            f"out={out} is the working directory or above it, which a new directory would take the "
            "place of, expected another one; go to a directory outside of it, or choose another "
            "--out"
        )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file, expected a directory; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not replace:
        raise ConfigError(f"out={out} is not empty, expected a new or empty directory; {mend}")


def _working_directory() -> Path:
    """Return the working directory; an empty path if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()


def inside(directory: Path, name: object, *, found_in: object, error: type[QatError]) -> Path:
    """Return the path below `directory` for `name`, which was read from the file `found_in`.

    Every path in a file from other people goes through here. Links in `directory` are followed: it
    is the user's own, or came from an archive, which may not contain any.

    Raises:
        error: the name is no string, or leads outside.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    leads_out = not parts or {"/", "//", ".."} & {*parts} or "\\" in name
    if leads_out or not name.isprintable():
        found = ascii(name)
        found = found if len(found) <= 80 else f"{found[:77]}..."
        raise error(
            f"{found_in} names {found}, expected a name inside {directory}; do not use what a "
            "stranger made of it: get it anew, or ask whoever made it"
        )
    return directory / name


def real_files(directory: Path, *, error: type[QatError]) -> list[Path]:
    """Return the regular files below `directory`, sorted by the parts of their names.

    Everything that is packed, uploaded, copied out of a run or pruned is listed here, because a
    symbolic link could lead to any file that the user can read. `directory` itself may be a link.

    Raises:
        error: `directory` holds something that is neither a regular file nor a directory.
    """
    found = []
    for path in sorted(directory.rglob("*"), key=lambda each: each.relative_to(directory).parts):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            found.append(path)
        elif not stat.S_ISDIR(mode):
            kind = "symbolic link" if stat.S_ISLNK(mode) else "pipe, socket or device"
            raise error(
                f"{path} is a {kind}, expected only files and directories, for a link could lead "
                "to any file of yours; remove it, or put a copy of the file in its place"
            )
    return found


def is_real(path: Path, directory: Path) -> bool:
    """Return whether no part of `path` below `directory` is a symbolic link."""
    below = path.relative_to(directory)
    return not any((directory / part).is_symlink() for part in (below, *below.parents[:-1]))


def lies_inside(path: Path, directory: Path) -> bool:
    """Return whether a model's file is in its directory, or in the blobs of its hub snapshot.

    A snapshot in the cache of the Hugging Face hub consists of links to `../../blobs`.
    """
    here, found = directory.resolve(), path.resolve()
    blobs = here.parent.parent / "blobs"
    is_blob = here.parent.name == "snapshots" and found.is_relative_to(blobs)
    return is_blob or found.is_relative_to(here)


def parse_json(text: str | bytes) -> Any:
    """Return the value of untrusted JSON text.

    Raises:
        ValueError: it is not JSON (a JSONDecodeError), is nested too deeply, or holds a number of
            thousands of digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests lists or objects too deeply") from None
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            raise
        most = sys.get_int_max_str_digits()
        raise ValueError(f"it has a number of more digits than Python reads ({most})") from None


def described(path: Path) -> str:
    """Return a description of `path` as the end of a sentence, judged by file names alone."""
    if not path.exists():
        return "is not there"
    if not path.is_dir():
        return "is a file"
    names = {each.name for each in path.iterdir()}
    kinds = (words for mark, words in KINDS.items() if mark in names)
    return next(kinds, "is a directory of something else" if names else "is an empty directory")


def parse_toml(text: str) -> dict[str, object]:
    """Return the tables of untrusted TOML text.

    A byte-order mark, which some editors write, is skipped.

    Raises:
        ValueError: it is not TOML, or is nested too deeply.
    """
    if DOTTED.search(text):  # tomllib would take minutes
        raise ValueError("it nests too deeply")
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it nests too deeply") from None


@contextmanager
def whole_file(path: Path, partial: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which becomes `path` when the block ends and is removed if it fails.

    Its bytes are on disk before the name is: a crash leaves the old file or the new one.

    Args:
        path: the final name.
        partial: the name until then, in the same directory.

    Raises:
        OSError: it cannot be written; the error names `path`, unlike the one of a full disk.
    """
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):  # the first error is more useful
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(partial)):
            error.filename = str(path)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a small file atomically."""
    with whole_file(path, partial_file(path)) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def partial_file(path: Path) -> Path:
    """Return the name of `path` while it is incomplete."""
    return path.with_name(f".{path.name}.partial")


def listed_files(path: Path, beside: Collection[str]) -> set[str]:
    """Return the file names that the JSON file `path` lists as ours, and those in `beside`.

    The set is empty if there is no valid list.
    """
    try:
        return {*beside, *parse_json(path.read_bytes())["files"]}
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def allowed(mode: int) -> int:
    """Return the bits of `mode` that this process's umask allows, as any new file gets."""
    umask = os.umask(0o077)
    os.umask(umask)
    return mode & ~umask


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_problem(path: Path, size: object, sha256: object, *, deep: bool = True) -> str | None:
    """Return how a file differs from its recorded size and, if `deep`, SHA-256; None if not."""
    if not path.is_file():
        return "missing"
    if path.stat().st_size != size:
        return f"{path.stat().st_size} bytes instead of {size}"
    return "SHA-256 differs" if deep and sha256_file(path) != sha256 else None


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(
    out: Path, new: Path, written: Callable[[Path], Collection[str]], *, overwrite: bool
) -> None:
    """Rename `new` to `out`, and keep the files of the older `out` that qat did not write."""
    _keep_foreign(out, new, written(out), overwrite=overwrite)
    old = new if _is_exchanged(new, out) else _renamed_in_turn(new, out)
    _keep_foreign(old, out, written(old), overwrite=True)  # files added in the meantime
    shutil.rmtree(old, ignore_errors=True)


def _is_exchanged(one: Path, other: Path) -> bool:
    """Exchange the names of two directories in one step; return whether the system supports it."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    return exchange is not None and not exchange(
        AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE
    )


def _renamed_in_turn(new: Path, out: Path) -> Path:
    """Rename `new` to `out` in two steps; return the new name of the older `out`."""
    old = out.with_name(f".{out.name}.old-{token_hex(4)}")
    try:
        out.rename(old)
        new.rename(out)
    except BaseException as error:
        if old.exists() and not out.exists():
            old.rename(out)
        if old.exists():
            raise ConfigError(
                f"out={out} changed while it was replaced ({error}); what it held before is in "
                f"{old}: move it to where it should be"
            ) from None
        raise
    return old


def _keep_foreign(old: Path, new: Path, written: Collection[str], *, overwrite: bool) -> None:
    """Link every file of `old` into `new` that `new` does not replace and that is not `written`.

    Directories without files are not kept.

    Raises:
        ConfigError: `new` replaces one that is not `written`, and `overwrite` is false.
    """
    names = [p.relative_to(old) for p in old.rglob("*") if p.is_symlink() or not p.is_dir()]
    foreign = [name for name in names if name.as_posix() not in written]
    kept = [name for name in foreign if not (new / name).exists()]
    if len(kept) < len(foreign) and not overwrite:
        taken = next(name for name in foreign if name not in kept)
        raise ConfigError(
            f"{old / taken} would be replaced and was not written by qat, expected only what qat "
            "wrote there; move it or choose another --out"
        )
    for name in kept:
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(old / name, new / name, follow_symlinks=False)
        except OSError:  # hard links are not supported here
            shutil.copy2(old / name, new / name, follow_symlinks=False)
    if kept:
        logger.info("%s: %d files that qat did not write stay (%s)", old, len(kept), kept[0])


def import_command(path: Path) -> str | None:
    """Return the command that imports files of the reference system at `path`, or None.

    No file is read: these are a `.pt` file, or a directory with `.pt` files and without
    `.safetensors` or `.bin` files.
    """
    directory = path.parent if path.is_file() else path
    files = [path] if path.is_file() else [*path.glob("*.pt")]
    if not any(file.suffix == ".pt" for file in files):
        return None
    if path.is_dir() and any((*path.glob("*.safetensors"), *path.glob("*.bin"))):
        return None
    if (directory / "meta.json").is_file():
        return f"qat cache import {quote(str(directory))} --teacher MODEL --out DIR"
    return f"qat convert {quote(str(path))} --from anemll --base MODEL --out DIR"


# Locks on directories: one process at a time, through the operating system.

UNKNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Error codes of file systems without locks."""
POLL_S = 0.02
"""Seconds between attempts to take a lock that another process holds."""
LOOK_S, PATIENCE_S = 0.2, 60.0
"""Seconds between two looks for what another process writes; seconds for which no process need hold
the lock, because one that is started again loads a model first."""
SIGN = b"process "
"""The beginning of a lock file's content."""


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Lock `out` for this process in the block; the lock is released if the process dies.

    The lock is a file next to `out`, which need not exist; if `out` is a symbolic link, next to its
    target, so that all names of a directory share one lock.

    Raises:
        ConfigError: another process holds it, or it cannot be written.
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


def is_held(out: Path) -> bool:
    """Return whether a process holds the lock of `out` (see `held`)."""
    path = real(out).parent / f".{real(out).name}.lock"
    if not path.is_file():
        return False
    try:
        with locked(path, out):
            path.unlink(missing_ok=True)  # left by a process that was killed
            return False
    except TimeoutError:
        return True


def awaiting(out: Path) -> Iterator[bool]:
    """Yield now and then whether what is missing in `out` may still come.

    It may not once nobody has held the lock of `out` for `PATIENCE_S`.
    """
    last = time.monotonic()
    while True:
        if is_held(out):
            last = time.monotonic()
        yield time.monotonic() - last < PATIENCE_S
        time.sleep(LOOK_S)


@contextmanager
def locked(path: Path, out: Path, *, wait_s: float = 0.0) -> Iterator[int]:
    """Hold the lock of the file `path`, created if missing; the block gets its open descriptor.

    On a file system without locks nothing is locked, with a warning that names `out`. A process
    that inherited the descriptor also holds the lock, even after this process was killed.

    Raises:
        TimeoutError: another process holds it, and still did after `wait_s`.
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
            elif _is_there(descriptor, path):  # otherwise its holder has just removed it
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_taken(descriptor: int, out: Path) -> bool:
    """Try to lock an open file; return whether it is locked now, or locks are not supported."""
    from filelock import lock_descriptor  # slow to import: a tenth of the limit for `--help`

    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise
        logger.warning("%s: no locks here; let no two processes work in it at once", out)
        return True


def _check_ours(descriptor: int, path: Path) -> None:
    """Refuse a file that has the name of the lock but not its content."""
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
