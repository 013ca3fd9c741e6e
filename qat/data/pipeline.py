"""Background threads that prefetch the next items and process finished ones."""

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
    """Yield the items in order, up to `depth` of them prefetched on one thread.

    An exception from making an item is raised here in the item's place. Closing the iterator waits
    for the item in flight and makes no other.
    """
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


def computed_ahead(
    function: Callable[[Place], T], places: Iterable[Place], depth: int
) -> Generator[T]:
    """Yield `function(place)` in order, with up to `depth` calls in flight, each on its own thread.

    With `depth` 0 nothing is computed ahead. An exception from a call is raised here in its item's
    place; closing the iterator waits for the calls in flight and starts no other.
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


class BackgroundFold(Generic[State, T]):
    """Folds items into a state on a background thread, at most one item behind the caller.

    An item is folded only after the previous one, and never after one that failed.
    """

    def __init__(self, fold: Callable[[State, T], State], state: State) -> None:
        self._fold = fold
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[State] = Future()
        self._last.set_result(state)

    def push(self, item: T) -> None:
        """Wait for the previous item, then start folding this one; raise the previous's error."""
        self._last = self._thread.submit(self._fold, self._last.result(), item)

    def state(self) -> State:
        """Return the state with all items folded in; raise the last one's error."""
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
