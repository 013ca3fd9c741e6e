"""Buckets by length: of the sequences of a training step, and of the documents of a sweep.

Shapes: N sequences, S positions.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from qat.data.packing import Batch
from qat.data.reader import TeacherCache
from qat.errors import ConfigError

T = TypeVar("T")
WINDOW = 16
"""Steps whose sequences are grouped together: enough for each bucket to get its share."""
PARTS = (8, 4, 2, 1)
"""Divisors of a row's length that give the default lengths."""
SHORTEST = 2
AUTO = "auto"


def default_buckets(S: int) -> tuple[int, ...]:
    """Return those of an eighth, a quarter, a half and all of a row that are whole and not tiny."""
    return tuple(S // part for part in PARTS if S % part == 0 and S // part >= SHORTEST)


def bucket_of(lengths: Tensor, buckets: Sequence[int]) -> Tensor:
    """Return the place in `buckets`, ascending, of the first that holds each of the `lengths`."""
    return torch.searchsorted(torch.tensor(buckets, device=lengths.device), lengths)


def interleaved(ordered: Sequence[T]) -> list[T]:
    """Return items in an order in which neighbours differ, as shuffled buckets do."""
    return [item for first in range(3) for item in ordered[first::3]]


def used(mask: Tensor) -> Tensor:
    """Return the positions of sequences up to the last that counts, `(N,)`, of a mask `(N, S)`."""
    return (mask * torch.arange(1, mask.shape[1] + 1)).amax(1)


def open_buckets(cache: TeacherCache, lengths: str) -> "BucketedCache":
    """Return a cache whose steps hold sequences of similar length.

    Raises:
        ConfigError: `lengths` are not ascending numbers up to the cache's sequence length.
    """
    S, words = cache.sequence_length, [word.strip() for word in lengths.split(",")]
    are_numbers = all(word.isdecimal() for word in words)
    given = default_buckets(S) if lengths == AUTO else tuple(map(int, words * are_numbers))
    if not given or list(given) != sorted({*given}) or not given[0] or given[-1] != S:
        raise ConfigError(
            f"bucket_lengths={lengths} of a cache with sequences of {S} tokens, expected ascending "
            f"lengths that end with {S}; write {','.join(map(str, default_buckets(S)))} or {AUTO}"
        )
    return BucketedCache(cache, given)


class BucketedCache:
    """A teacher cache whose steps are cut to the shortest bucket that holds what counts in them.

    The sequences of `WINDOW` consecutive steps are sorted by bucket and dealt to these steps again,
    so an epoch still has every sequence once, and seed and step determine a step. With one bucket
    nothing is moved or cut.
    """

    def __init__(self, cache: TeacherCache, buckets: tuple[int, ...]) -> None:
        self._cache, self._buckets = cache, buckets
        self._window = lru_cache(maxsize=4)(self._grouped)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the cache has
        return getattr(self._cache, name)

    def indices(self, seed: int, step: int, count: int) -> np.ndarray:
        """Return the `(count,)` training sequences of a step."""
        window, place = divmod(step, WINDOW)
        return self._window(seed, window, count)[place]

    def micro_batches(self, parts: np.ndarray, targets: Collection[str]) -> list[Batch]:
        """Return the micro-batches of a step, all cut to one length."""
        batches = self._cache.micro_batches(parts, targets)
        longest = torch.stack([used(batch.mask).max() for batch in batches]).max()
        length = self._buckets[int(bucket_of(longest, self._buckets))]
        if length == self._buckets[-1]:
            return batches
        return [Batch(*(each[:, :length].contiguous() for each in batch)) for batch in batches]

    def _grouped(self, seed: int, window: int, count: int) -> np.ndarray:
        """Return the sequences of a window's steps, `(WINDOW, count)`."""
        steps = range(window * WINDOW, (window + 1) * WINDOW)
        drawn = np.stack([self._cache.indices(seed, step, count) for step in steps])
        if len(self._buckets) == 1:
            return drawn
        masks = (self._cache.batch(indices, targets=()).mask for indices in drawn)
        found = torch.cat([bucket_of(used(mask), self._buckets) for mask in masks])
        order = found.argsort(stable=True).numpy()
        return drawn.flatten()[order].reshape(drawn.shape)[interleaved(range(WINDOW))]
