"""A crash in the middle of a run."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Stop(Exception):
    """A crash, in the tests' own words."""


@contextmanager
def stopped_at(owner: object, name: str, call: int) -> Iterator[None]:
    """Run a block that call number `call` (from 0) of `owner.name` ends."""
    real, count = getattr(owner, name), 0

    def counted(*arguments: object, **named: object) -> object:
        nonlocal count
        count += 1
        if count == call + 1:
            raise Stop
        return real(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(owner, name, counted)
        yield
