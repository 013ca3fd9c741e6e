"""Which sequences a step trains on: a pure function of the seed and the step."""

from functools import lru_cache

import numpy as np


def sequence_indices(seed: int, step: int, batch_size: int, num_sequences: int) -> np.ndarray:
    """The `(batch_size,)` int64 sequences of a step: shuffled epochs laid end to end.

    Nothing is remembered between steps, so a resumed run sees what an unbroken one would. Every
    sequence comes once per epoch; a batch may reach across the end of one.

    Raises:
        ValueError: there is no sequence to choose from.
    """
    if num_sequences < 1:
        raise ValueError(f"num_sequences={num_sequences} must be at least 1")
    epochs, places = np.divmod(step * batch_size + np.arange(batch_size), num_sequences)
    indices = np.empty(batch_size, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = _permutation(seed, int(epoch), num_sequences)[places[here]]
    return indices


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_sequences: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_sequences)
