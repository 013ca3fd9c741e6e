"""Decisions that all ranks take together, without waiting for their devices."""

from collections import deque
from collections.abc import Callable

from torch import Tensor

from qat.backend.base import Backend
from qat.ranks import Ranks


class Agreement:
    """A decision of all ranks, read some steps late, so that no host waits for its device."""

    def __init__(self, backend: Backend, ranks: Ranks) -> None:
        self._backend = backend
        self._lag = backend.decision_lag if ranks.size > 1 else 0
        self._under_way: deque[tuple[Tensor, Callable[[], None]]] = deque()

    def settle(self, wishes: Tensor) -> bool:
        """Return whether any rank requested it `decision_lag` steps ago; with one rank, now.

        Args:
            wishes: the number of ranks that request it in this step, on the device.
        """
        self._under_way.append((self._backend.to_host(wishes), self._backend.finished()))
        if len(self._under_way) <= self._lag:
            return False
        decided, wait = self._under_way.popleft()
        wait()
        return bool(decided)
