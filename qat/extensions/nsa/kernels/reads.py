"""The number of keys that a decoding step reads in each branch: measured and predicted.

Shapes as in `qat.extensions.nsa.kernels.decode`.
"""

from typing import NamedTuple

from torch import Tensor

from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.decode import (
    NONE,
    Past,
    compressed_places,
    selected_places,
    window_places,
)


class KeyReads(NamedTuple):
    """Keys that a query reads per key-value head, with their values unless stated otherwise."""

    compressed: float
    selected: float
    window: float
    scored: float
    """Pooled keys, without values, read to select blocks: a tile's, divided by its queries."""
    pooled: float
    """Keys and values read for pooling, divided by the positions of a stride."""

    @property
    def pairs(self) -> float:
        """All reads, in pairs of a key and a value."""
        return self.compressed + self.selected + self.window + self.scored / 2 + self.pooled

    def num_bytes(self, heads: int, width: int, itemsize: int) -> float:
        """Return the bytes that one query reads over `heads` key-value heads."""
        return 2 * self.pairs * heads * width * itemsize


def measured(kept: Past, position: Tensor, config: NSAConfig) -> KeyReads:
    """Return the mean over rows and heads, counted in the lists of places that `attend` reads.

    Args:
        kept: a cache with the lists of the position's tile.
        position: `(B,)` int64.
        config: the definition.
    """
    is_merged = config.mode == "merged"
    compressed = _mean_count(compressed_places(kept, position, config))
    leader = position // config.select_tile * config.select_tile
    return KeyReads(
        0.0 if is_merged else compressed,
        _mean_count(selected_places(kept, position, config)),
        0.0 if is_merged else _mean_count(window_places(kept, position, config)),
        _mean_count(compressed_places(kept, leader, config)) / config.select_tile,
        _pooling(compressed, config),
    )


def predicted(position: int, config: NSAConfig) -> KeyReads:
    """Predict the reads of a query after `position` keys from the definition alone."""
    length = position + 1
    is_merged = config.mode == "merged"
    leader = position // config.select_tile * config.select_tile
    compressed = config.num_compressed(length)
    return KeyReads(
        0 if is_merged else compressed,
        min(config.selected_keys, length),
        0 if is_merged else min(config.window, length),
        config.num_compressed(leader + 1) / config.select_tile,
        _pooling(compressed, config),
    )


def dense(position: int) -> KeyReads:
    """Return the reads of dense attention: every key counts as selected."""
    return KeyReads(0, position + 1, 0, 0, 0)


def _pooling(num_compressed: float, config: NSAConfig) -> float:
    """Return keys read per position for pooling, 0 if none is pooled; `merged` pools no values."""
    if num_compressed == 0:
        return 0.0
    per_position = config.compress_block / config.compress_stride
    return per_position / 2 if config.mode == "merged" else per_position


def _mean_count(places: Tensor) -> float:
    return (places != NONE).sum(-1).float().mean().item()
