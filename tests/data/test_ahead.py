"""Items made ahead: the same ones in order, errors included, and no thread left behind."""

import threading
import time
from collections.abc import Iterator

import pytest

from qat.data.ahead import ahead


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_gives_the_same_items_in_order(depth: int) -> None:
    assert list(ahead(range(20), depth)) == list(range(20))
    assert list(ahead([], depth)) == []


def test_works_ahead_and_no_further_than_told() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for item in range(10):
            made.append(item)
            yield item

    stream = ahead(items(), 2)
    assert next(stream) == 0
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made == [0, 1, 2, 3]  # one used, two waiting, one in the hands of the thread
    stream.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_where_its_item_would_have_come(depth: int) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    stream = ahead(items(), depth)
    assert next(stream) == 1
    with pytest.raises(KeyError, match="broken"):
        next(stream)


def test_closing_ends_the_thread() -> None:
    stream = ahead(iter(int, 1), 2)
    next(stream)
    stream.close()
    assert not [t for t in threading.enumerate() if t.name == "ahead"]
