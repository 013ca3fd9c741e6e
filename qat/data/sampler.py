"""The order of the training sequences: a pure function of the seed and the step."""

from functools import lru_cache

import numpy as np

WINDOW = 2**22
"""Number of sequences that are shuffled together: 32 MiB of indices."""


def sequence_indices(seed: int, step: int, batch_size: int, num_sequences: int) -> np.ndarray:
    """Return the `(batch_size,)` int64 sequences of a step: shuffled epochs, concatenated.

    No state is kept between steps, so a resumed run sees the same sequences as an uninterrupted
    one. Every sequence comes once per epoch; a batch may span the end of one. With more than
    `WINDOW` sequences an epoch visits windows of consecutive sequences in shuffled order and
    shuffles within each: memory does not grow with the cache, and few shards are needed at a time.

    Raises:
        ValueError: `num_sequences` is below 1.
    """
    if num_sequences < 1:
        raise ValueError(f"num_sequences={num_sequences} must be at least 1")
    epochs, places = np.divmod(step * batch_size + np.arange(batch_size), num_sequences)
    indices = np.empty(batch_size, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = _shuffled(seed, int(epoch), places[here], num_sequences)
    return indices


def _shuffled(seed: int, epoch: int, places: np.ndarray, num_sequences: int) -> np.ndarray:
    """Return the sequences at the given places of an epoch."""
    if num_sequences <= WINDOW:
        return _permutation((seed, epoch), num_sequences)[places]
    order, ends = _windows(seed, epoch, num_sequences)
    numbers = np.searchsorted(ends, places, side="right")
    found = np.empty_like(places)
    for number in np.unique(numbers).tolist():
        here, window = numbers == number, int(order[number])
        first = window * WINDOW
        size = min(WINDOW, num_sequences - first)
        inside = places[here] - (ends[number] - size)
        found[here] = first + _permutation((seed, epoch, window), size)[inside]
    return found


@lru_cache(maxsize=4)
def _windows(seed: int, epoch: int, num_sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of an epoch's windows, and the place where each of them ends."""
    count = -(-num_sequences // WINDOW)
    order = np.random.Generator(np.random.PCG64([seed, epoch, count, 0])).permutation(count)
    return order, np.cumsum(np.minimum(WINDOW, num_sequences - order * WINDOW))


@lru_cache(maxsize=4)
def _permutation(entropy: tuple[int, ...], count: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(list(entropy))).permutation(count)
