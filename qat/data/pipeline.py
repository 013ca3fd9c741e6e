"""Threads beside the one that works: they make what comes next, and put away what is done."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")
Place = TypeVar("Place")
State = TypeVar("State")
END = object()


def prefetched(items: Iterable[T], depth: int) -> Iterator[T]:
    """The items in order, up to `depth` of them made ahead on a thread of their own; 0 for none.

    What making an item raises is raised here in its place. Closing the iterator waits for the item
    under way and makes no other.
    """
    if depth == 0:
        yield from items
        return
    iterator = iter(items)
    with ThreadPoolExecutor(1) as thread:
        ahead = deque(thread.submit(next, iterator, END) for _ in range(depth))
        try:
            while (item := ahead.popleft().result()) is not END:
                ahead.append(thread.submit(next, iterator, END))
                yield item
        finally:
            for future in ahead:
                future.cancel()


def waited(items: Iterable[T], waits: list[float]) -> Iterator[T]:
    """The items; the seconds until each of them was there, and until the end, go to `waits`."""
    iterator = iter(items)
    while True:
        began = time.perf_counter()
        item = next(iterator, END)
        waits.append(time.perf_counter() - began)
        if item is END:
            return
        yield item


def computed_ahead(
    function: Callable[[Place], T], places: Iterable[Place], depth: int
) -> Generator[T]:
    """`function` of each place in order, up to `depth` of them under way at once, a thread each.

    With `depth` 0 none is computed ahead. What a call raises is raised here in its item's place;
    closing the iterator waits for the calls under way and begins no other.
    """
    if depth == 0:
        yield from map(function, places)
        return
    with ThreadPoolExecutor(depth) as threads:
        ahead: deque[Future[T]] = deque()
        try:
            for place in places:
                ahead.append(threads.submit(function, place))
                if len(ahead) > depth:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


class Behind(Generic[State, T]):
    """Folds items into a state on a thread of its own, at most one item behind whoever pushes.

    An item is folded only after the one before it, and none after one that failed.
    """

    def __init__(self, fold: Callable[[State, T], State], state: State) -> None:
        self._fold = fold
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[State] = Future()
        self._last.set_result(state)

    def push(self, item: T) -> None:
        """Wait for the item before and begin with this one; raises what the one before raised."""
        self._last = self._thread.submit(self._fold, self._last.result(), item)

    def state(self) -> State:
        """The state with all items in it; raises what the last one raised."""
        return self._last.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown()
