"""The number of keys that a decoding step reads in each branch."""

from typing import NamedTuple

from qat.extensions.nsa.kernels.config import NSAConfig


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
