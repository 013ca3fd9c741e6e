"""How many keys a decoding step reads, branch by branch: as its lists say, and as predicted.

Shapes as in `qat.kernels.nsa.decode`.
"""

from typing import NamedTuple

from torch import Tensor

from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.decode import (
    NONE,
    Past,
    compressed_places,
    selected_places,
    window_places,
)


class KeyReads(NamedTuple):
    """Keys that a query reads for each key-value head, with their values where not said else."""

    compressed: float
    selected: float
    window: float
    scored: float
    """Pooled keys, without values, read to select blocks: a tile's, spread over its queries."""
    pooled: float
    """Keys and values read to make pooled ones, spread over the positions of a stride."""

    @property
    def pairs(self) -> float:
        """All of them in pairs of a key and a value."""
        return self.compressed + self.selected + self.window + self.scored / 2 + self.pooled

    def num_bytes(self, heads: int, width: int, itemsize: int) -> float:
        """Bytes that one query reads over `heads` key-value heads."""
        return 2 * self.pairs * heads * width * itemsize


def measured(kept: Past, position: Tensor, config: NSAConfig) -> KeyReads:
    """Mean over rows and heads, counted from the lists of places that `attend` reads by.

    Args:
        kept: with the lists of the position's tile.
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
    """From the definition alone, for a query that has `position` keys before its own."""
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
    """What dense attention reads: every key, as if all were selected."""
    return KeyReads(0, position + 1, 0, 0, 0)


def _pooling(num_compressed: float, config: NSAConfig) -> float:
    """Keys read a position to pool them, where any is pooled; `merged` pools no values."""
    if num_compressed == 0:
        return 0.0
    per_position = config.compress_block / config.compress_stride
    return per_position / 2 if config.mode == "merged" else per_position


def _mean_count(places: Tensor) -> float:
    return (places != NONE).sum(-1).float().mean().item()
