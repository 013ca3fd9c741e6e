"""Runs something that may run out of memory, so that failing leaves nothing behind."""

import traceback
from collections.abc import Callable
from typing import TypeVar

from qat.backend.base import Backend

T = TypeVar("T")
SLACK_GIB = 1 / 8
"""What a failed run may leave: workspaces of libraries, which are made once and stay."""


def unless_out_of_memory(run: Callable[[], T], backend: Backend) -> T | None:
    """What `run` returns, or None if memory ran out inside; every other error propagates.

    Memory that is free to give is given back before and after. `run` must drop what it makes when
    it fails (`try ... finally`); its stack frames are cleared here.

    Raises:
        AssertionError: a failed `run` left memory behind, which is our bug.
    """
    backend.free_memory()
    before = backend.held_memory_gib()
    result = _attempt(run, backend)
    backend.free_memory()
    if result is None and before is not None:
        left = backend.held_memory_gib() - before
        assert left <= SLACK_GIB, f"running out of memory left {left:.3f} GiB behind"
    return result


def _attempt(run: Callable[[], T], backend: Backend) -> T | None:
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not backend.is_out_of_memory(error):
            raise
        while error is not None:  # frames hold tensors, of the errors behind it as well
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        return None
