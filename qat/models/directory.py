"""Directories and small files that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from qat.errors import CheckpointError, ConfigError


@contextmanager
def atomic_directory(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """A directory to fill, which becomes `out` when the block ends and vanishes when it fails.

    The files are on the disk before the name is: a crash, a kill or a full disk leaves either no
    `out` or a whole one. With `replace`, an older `out` stays until the new one is complete.

    Raises:
        ConfigError: `out` exists and is not empty, and `replace` is false.
        CheckpointError: the disk is full, or `out` cannot be written for another reason.
    """
    check_free(out, replace=replace)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
        try:
            yield partial
            _sync(partial)
            _put_in_place(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{out}: writing stopped ({error}); nothing was left there: free some space or choose "
            "another --out"
        ) from error


def check_free(out: Path, *, replace: bool = False) -> None:
    """Refuse an output directory that holds something already.

    Raises:
        ConfigError: `out` exists and is not empty (and `replace` is false), or is a file.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file, expected a directory; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not replace:
        raise ConfigError(
            f"out={out} is not empty, expected a new or empty directory; remove it or choose "
            "another --out"
        )


def write_atomically(path: Path, text: str) -> None:
    """Replace a small text file in one step that a crash cannot split."""
    partial = partial_file(path)
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def partial_file(path: Path) -> Path:
    """Where the bytes of `path` lie until they are whole."""
    return path.with_name(f".{path.name}.partial")


def _sync(directory: Path) -> None:
    """Have every file below `directory`, and the names of them, reach the disk."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(partial: Path, out: Path) -> None:
    partial.chmod(0o755)  # mkdtemp makes it private
    if out.is_dir() and any(out.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
        out.rename(old)
        partial.rename(out)
        shutil.rmtree(old)
    else:
        partial.rename(out)
    _sync_name(out.parent)


def _sync_name(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
