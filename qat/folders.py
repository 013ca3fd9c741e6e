"""Parent folders that stay only where something came of them, and folders behind links."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path


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
