"""Make things before they are asked for."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterable[T], depth: int) -> Iterator[T]:
    """The items in order, made by a thread that is up to `depth` of them ahead; 0 makes no thread.

    What goes wrong in the thread is raised here, in place of the item. Closing the iterator stops
    the thread after the item it works on.
    """
    if depth == 0:
        yield from items
        return
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
    is_closed = threading.Event()

    def work() -> None:
        try:
            for item in items:
                if not _put(ready, (item, None), is_closed):
                    return
            _put(ready, (None, StopIteration()), is_closed)
        except BaseException as error:  # noqa: BLE001 - raised again where the items are used
            _put(ready, (None, error), is_closed)

    thread = threading.Thread(target=work, name="ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        is_closed.set()
        thread.join()


def _put(ready: queue.Queue, entry: tuple, is_closed: threading.Event) -> bool:
    """Wait for room; false if nobody wants the items any more."""
    while not is_closed.is_set():
        try:
            ready.put(entry, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False
