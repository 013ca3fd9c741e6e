"""Directories and files that appear whole or not at all, their hashes, locks and safe paths."""

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
DOTTED = re.compile(r"(?:[\w\"'-]+[ \t]*\.[ \t]*){64}")
"""A key of TOML that names a table in a table in a table ..."""
KINDS = {
    "config.json": "is a model",
    "manifest.json": "is a teacher cache",
    "metrics.jsonl": "is a run of 'qat train'",
    "student": "is a directory of 'qat run'",
    "recipe.toml": "is a directory of 'qat run'",
}
"""The kind of a directory that holds a file of that name; the first one counts."""
LEAVING = re.compile(r"\..+\.(partial|old|part)-([a-z0-9_]{8})?")
"""What a directory or file is called until it is whole, and when it is no longer wanted."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""What Linux calls the working directory, and the wish that two names be exchanged."""


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
    """Make a directory to fill; it becomes `out` when the block ends and vanishes if it fails.

    The files are on the disk before the name is: a crash, a kill or a full disk leaves either no
    `out` or a whole one. All in it may be read and written by whom the umask says, and nothing in
    it can be run. Where `out` is a symbolic link, it stays one, and the directory behind it is
    made.

    With `replace` an older `out` stays until the new one is complete. Then the two change names,
    in one step where the system knows how (Linux, on most file systems); elsewhere in two, of
    which the first is undone if the second fails, and between which a kill leaves the older one
    next to `out`, as `.NAME.old-...`.

    Args:
        replace: an `out` that holds something, before the block or after it, may be replaced.
        written: names in an older `out`, relative to it, of what qat wrote there. Files that are
            neither that nor replaced belong to the user: they stay.
        overwrite: files that are not `written` may be replaced by new ones of their names.
        place: where it is filled, on the same disk as `out`; by default next to it.
        root: which directory of the filled one becomes `out`.
        mend: what to do about an `out` that may not be replaced.
        durable: wait for the disk. Without, a loss of power may leave damage under the name `out`,
            for callers that compare hashes before each use.

    Raises:
        ConfigError: `out` holds something that may not be replaced, or holds the working directory.
    """
    check_free(out, replace=replace, mend=mend)
    target = real(out)
    with parents_of(target):
        prefix = f".{target.name}.partial-"
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=place or target.parent))
        try:
            yield partial
            for path in [*partial.rglob("*"), partial]:
                # mkdtemp makes directories private, and safetensors files
                path.chmod(allowed(0o777 if path.is_dir() else 0o666))
                if durable:
                    sync(path)
            new = root(partial)
            try:
                new.rename(target)  # where nothing is, or an empty directory
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
def parents_of(path: Path) -> Iterator[None]:
    """The folders that `path` is to lie in; if the block fails, those made for it go, if empty."""
    missing = list(takewhile(lambda folder: not folder.exists(), path.absolute().parents))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in missing:
            try:
                folder.rmdir()
            except OSError:  # somebody else has put something there
                break
        raise


def real(path: Path) -> Path:
    """The path behind all symbolic links, there or not: one directory has one such name."""
    return Path(os.path.realpath(path))


def check_free(
    out: Path, *, replace: bool = False, mend: str = MEND, in_place: bool = False
) -> None:
    """Refuse an output directory that holds something already; `mend` says what to do about it.

    Whatever is not written `in_place`, but as a whole, becomes another directory of the same name:
    who works in it, or below, would go on in one that is no more.

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
    """Where this process works; an empty path where somebody has removed that."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()


def inside(directory: Path, name: object, *, found_in: object, error: type[QatError]) -> Path:
    """The path below `directory` that `name` says, which was read from the file `found_in`.

    Every path that a file of somebody else names goes through here. Links in `directory` are
    followed: it is yours, or came from an archive, which may hold none.

    Raises:
        error: it is no text, or leads elsewhere.
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

    All that is packed, uploaded, copied out of a run or pruned is listed here, because a symbolic
    link inside could lead to any file that its user can read. `directory` itself may be a link.

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
    """Return whether `path` lies inside `directory`: no part of it below is a symbolic link."""
    below = path.relative_to(directory)
    return not any((directory / part).is_symlink() for part in (below, *below.parents[:-1]))


def lies_inside(path: Path, directory: Path) -> bool:
    """Return whether a model's file lies in its directory, or in the blobs of its hub snapshot.

    A snapshot in the cache of the Hugging Face hub consists of links to `../../blobs`.
    """
    here, found = directory.resolve(), path.resolve()
    blobs = here.parent.parent / "blobs"
    is_blob = here.parent.name == "snapshots" and found.is_relative_to(blobs)
    return is_blob or found.is_relative_to(here)


def parse_json(text: str | bytes) -> Any:
    """The value of a text in JSON, which may come from anybody.

    Raises:
        ValueError: it is none, nests deeper than any file does, or holds a number of thousands of
            digits; a JSONDecodeError in the first case.
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
    """Return what lies at `path` as the end of a sentence, by the names of files alone."""
    if not path.exists():
        return "is not there"
    if not path.is_dir():
        return "is a file"
    names = {each.name for each in path.iterdir()}
    kinds = (words for mark, words in KINDS.items() if mark in names)
    return next(kinds, "is a directory of something else" if names else "is an empty directory")


def parse_toml(text: str) -> dict[str, object]:
    """The tables of a text in TOML, which may come from anybody.

    A byte-order mark, which some editors put first, is skipped.

    Raises:
        ValueError: it is none, or nests deeper than any settings do.
    """
    if DOTTED.search(text):  # for which tomllib takes minutes
        raise ValueError("it nests too deeply")
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it nests too deeply") from None


@contextmanager
def whole_file(path: Path, partial: Path) -> Iterator[BinaryIO]:
    """A file to write, which becomes `path` when the block ends and vanishes when it fails.

    Its bytes are on the disk before the name is: a crash leaves the old file or the new one.

    Args:
        path: what it is called in the end.
        partial: what it is called until then, in the same directory.

    Raises:
        OSError: it cannot be written; the error names `path`, which that of a full disk does not.
    """
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):  # the first error tells more
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(partial)):
            error.filename = str(path)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a small file in one step that a crash cannot split."""
    with whole_file(path, partial_file(path)) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def partial_file(path: Path) -> Path:
    """Where the bytes of `path` lie until they are whole."""
    return path.with_name(f".{path.name}.partial")


def listed_files(path: Path, beside: Collection[str]) -> set[str]:
    """The names of files that the JSON file `path` lists as ours, and those `beside` them.

    None without a sound list.
    """
    try:
        return {*beside, *parse_json(path.read_bytes())["files"]}
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def allowed(mode: int) -> int:
    """The bits of `mode` that this process's umask leaves: what any new file or directory gets."""
    umask = os.umask(0o077)
    os.umask(umask)
    return mode & ~umask


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(
    out: Path, new: Path, written: Callable[[Path], Collection[str]], *, overwrite: bool
) -> None:
    """Let `new` be called `out`, with the files of the older one that are somebody else's."""
    _keep_foreign(out, new, written(out), overwrite=overwrite)
    old = new if _is_exchanged(new, out) else _renamed_in_turn(new, out)
    _keep_foreign(old, out, written(old), overwrite=True)  # what came in between
    shutil.rmtree(old, ignore_errors=True)


def _is_exchanged(one: Path, other: Path) -> bool:
    """Whether two directories were given each other's name in one step."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    return exchange is not None and not exchange(
        AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE
    )


def _renamed_in_turn(new: Path, out: Path) -> Path:
    """What the older `out` is called now that `new` has its name."""
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
    """Have in `new`, too, every file of `old` that it does not replace and that is not `written`.

    A directory that holds no file is not kept.

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
        except OSError:  # no links here
            shutil.copy2(old / name, new / name, follow_symlinks=False)
    if kept:
        logger.info("%s: %d files that qat did not write stay (%s)", old, len(kept), kept[0])


def import_command(path: Path) -> str | None:
    """The command that brings in what the reference system wrote at `path`; None if it is not its.

    Nothing is read: a `.pt` file, or a directory that holds such and no weights of another kind.
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


# Who works in a directory: one process at a time, as the operating system knows it.

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
