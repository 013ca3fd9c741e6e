"""What may stay in memory: the values used last, and no more of them than a bound."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Resident(Generic[Key, Value]):
    """At most `limit` values, of which the one unused for longest makes room; for any threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """The value kept for `key`, which is now the one used last; None if there is none."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def put(self, key: Key, value: Value) -> None:
        """Keep a value, and let go of the one unused for longest if that makes too many."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)

    def __len__(self) -> int:
        """How many values are kept."""
        with self._lock:
            return len(self._values)
