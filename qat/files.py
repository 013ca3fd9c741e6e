"""Directories and small files that appear whole or not at all, and the hash of a file."""

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from qat.errors import ConfigError
from qat.folders import parents_of

logger = logging.getLogger(__name__)

MEND = "remove it or choose another --out"
LEAVING = re.compile(r"\..+\.(partial|old|part)-([a-z0-9_]{8})?")
"""What a directory or file is called until it is whole, and when it is no longer wanted."""


@contextmanager
def whole_directory(
    out: Path,
    *,
    place: Path | None = None,
    root: Callable[[Path], Path] = lambda partial: partial,
    written: Callable[[Path], Collection[str]] = lambda out: (),
) -> Iterator[Path]:
    """A directory to fill, which becomes `out` when the block ends and vanishes when it fails.

    The files are on the disk before the name is: a crash, a kill or a full disk leaves either no
    `out` or a whole one; an older `out` stays until the new one is complete. All in it may be read
    and written by whom the umask says, and nothing in it can be run. Files of an older `out` that
    are neither replaced nor `written` are somebody else's: they stay.

    Args:
        place: where it is filled, on the same disk as `out`; by default beside it.
        root: which directory of the filled one becomes `out`.
        written: names in an older `out`, relative to it, of what qat wrote there.
    """
    with parents_of(out):
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=place or out.parent))
        try:
            yield partial
            for path in [*partial.rglob("*"), partial]:
                # mkdtemp makes directories private, and safetensors files
                path.chmod(allowed(0o777 if path.is_dir() else 0o666))
                sync(path)
            _put_in_place(root(partial), out, written)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_free(out: Path, *, replace: bool = False, mend: str = MEND) -> None:
    """Refuse an output directory that holds something already; `mend` says what to do about it.

    Raises:
        ConfigError: `out` exists and is not empty (and `replace` is false), or is a file.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file, expected a directory; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not replace:
        raise ConfigError(f"out={out} is not empty, expected a new or empty directory; {mend}")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a small file in one step that a crash cannot split."""
    partial = partial_file(path)
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # of a full disk it names no file
        error.filename = str(path)
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def partial_file(path: Path) -> Path:
    """Where the bytes of `path` lie until they are whole."""
    return path.with_name(f".{path.name}.partial")


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


def _put_in_place(
    partial: Path, out: Path, written: Callable[[Path], Collection[str]] = lambda out: ()
) -> None:
    if out.is_dir() and any(out.iterdir()):
        _keep_foreign(out, partial, written(out))
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
        out.rename(old)
        partial.rename(out)
        shutil.rmtree(old)
    else:
        partial.rename(out)
    sync(out.parent)


def _keep_foreign(old: Path, new: Path, written: Collection[str]) -> None:
    """Have in `new`, too, every file of `old` that it does not replace and that is not `written`.

    A directory that holds no file is not kept.
    """
    names = [p.relative_to(old) for p in old.rglob("*") if p.is_symlink() or not p.is_dir()]
    foreign = [n for n in names if n.as_posix() not in written and not (new / n).exists()]
    for name in foreign:
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(old / name, new / name, follow_symlinks=False)
        except OSError:  # no links here
            shutil.copy2(old / name, new / name, follow_symlinks=False)
    if foreign:
        logger.info("%s: %d files that qat did not write stay (%s)", old, len(foreign), foreign[0])


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
