"""Attention of one token after another over full caches: NSA, and dense in every way there is.

All loops are the same: static caches, the token's key and value written into them, a stack of
layers so that no cache stays in a GPU's own, one recorded graph a token.

Shapes: H query heads, K key-value heads, G = H/K, N positions of the caches, D head width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qat.backend.base import Backend
from qat.kernels.cache import Angles, Cache, Scoring
from qat.kernels.decode_attention import decode_attention
from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.decode import NONE, Past, append, attend, choose
from qat.kernels.nsa.reads import KeyReads, measured
from qat.kernels.nsa.select import judged_keys, pool

SDPA = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Shape:
    """Sizes of one sequence's attention."""

    length: int = 2**16
    """Positions when the last token has been told."""
    heads: int = 16
    key_heads: int = 8
    width: int = 128
    layers: int = 8
    """Each with caches of its own."""
    dtype: torch.dtype = torch.bfloat16

    @property
    def dense_bytes(self) -> int:
        """Bytes of keys and values that a dense layer reads for the last token."""
        return 2 * self.length * self.key_heads * self.width * self.dtype.itemsize


class Bench:
    """Random caches, and the loops that read them."""

    def __init__(self, shape: Shape, backend: Backend) -> None:
        self.shape, self.backend = shape, backend
        sizes = (shape.layers, 1, shape.key_heads, shape.length, shape.width)
        self.caches = [
            Cache(*pair) for pair in zip(self.random(*sizes), self.random(*sizes), strict=True)
        ]
        self.query = self.random(1, shape.heads, shape.width)
        self.key, self.value = (self.random(1, shape.key_heads, shape.width) for _ in range(2))
        self.position = torch.zeros(1, dtype=torch.int64, device=backend.device)

    def random(self, *sizes: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(*sizes, dtype=self.shape.dtype, device=self.backend.device)

    @property
    def scale(self) -> float:
        """Factor that a head's scores are multiplied by."""
        return self.shape.width**-0.5

    def dense_layers(self) -> Iterator[tuple[str, Callable[[Cache], Tensor]]]:
        """Names and functions of dense attention `(1, H, D)`; some devices refuse some."""
        yield "own kernel", self._own()
        for name, kind in SDPA.items():
            yield f"{name}, grouped heads", self._sdpa(kind, is_rows=False)
            yield f"{name}, groups as rows", self._sdpa(kind, is_rows=True)

    def _own(self) -> Callable[[Cache], Tensor]:
        """The kernel that packed students generate by; it also rotates, here by nothing."""
        N, D = self.shape.length, self.shape.width
        device = self.backend.device
        angles = Angles(torch.ones(N, D, device=device), torch.zeros(N, D, device=device))
        heads = Scoring(self.scale)
        qkv = torch.cat([self.query, self.key, self.value], 1).float().flatten(1)

        def attend(cache: Cache) -> Tensor:
            said = decode_attention(qkv, cache, self.position, angles, heads)
            return said.view_as(self.query)

        return attend

    def _sdpa(self, kind: SDPBackend, *, is_rows: bool) -> Callable[[Cache], Tensor]:
        """torch's; the query heads of a group as rows of one head, or as heads."""
        query = self.query[:, :, None]
        if is_rows:
            query = self.query.unflatten(1, (self.shape.key_heads, -1))

        def attend(cache: Cache) -> Tensor:
            cache.keys.index_copy_(2, self.position, self.key[:, :, None])
            cache.values.index_copy_(2, self.position, self.value[:, :, None])
            with sdpa_kernel(kind):
                said = F.scaled_dot_product_attention(query, *cache, enable_gqa=not is_rows)
            return said.reshape(self.query.shape)

        return attend

    def dense_token(self, attend: Callable[[Cache], Tensor]) -> Callable[[], None]:
        """One token through all layers."""

        def token() -> None:
            for cache in self.caches:
                attend(cache)
            self.position += 1

        return self.recorded(token)

    def recorded(self, token: Callable[[], None]) -> Callable[[], None]:
        """`token`, run once and recorded where the device can."""
        self.position.fill_(self.shape.length - 1)
        with torch.no_grad():
            token()
            return self.backend.record(token)[0] if self.backend.records() else token


class NSABench:
    """Sparse attention over the caches of a `Bench`."""

    def __init__(self, bench: Bench, config: NSAConfig) -> None:
        self.bench, self.config = bench, config
        is_merged = config.mode == "merged"
        self.gates = None if is_merged else bench.random(1, bench.shape.heads, 3)
        self.kept = [self._kept(cache) for cache in bench.caches]

    def _kept(self, cache: Cache) -> Past:
        """The cache itself, its pooled keys, and what the last tile selects."""
        shape, config, bench = self.bench.shape, self.config, self.bench
        lists = (1, shape.key_heads, config.num_tiles(shape.length), config.num_selected)
        pooled = pool(cache.keys, config)
        kept = Past(
            *cache,
            pooled,
            None if self.gates is None else pool(cache.values, config),
            torch.full(lists, NONE, dtype=torch.int32, device=bench.position.device),
            judged_keys(cache.keys, pooled, config) if config.bound else None,
        )
        tile = config.select_tile
        bench.position.fill_((shape.length - 1) // tile * tile)
        choose(bench.query, kept, bench.position, config=config, scale=bench.scale)
        return kept

    def attend(self, kept: Past, *, is_leader: bool) -> Tensor:
        """`(1, H, D)`: one token's; the first of a tile also selects."""
        bench, config = self.bench, self.config
        append(kept, bench.key, bench.value, bench.position, config=config)
        if is_leader:
            choose(bench.query, kept, bench.position, config=config, scale=bench.scale)
        return self.read(bench.query, kept)

    def read(self, query: Tensor, kept: Past) -> Tensor:
        """`(1, H, D)`: attention alone."""
        sizes = {"config": self.config, "scale": self.bench.scale}
        return attend(query, kept, self.bench.position, gates=self.gates, **sizes)

    def token(self, *, is_leader: bool) -> Callable[[], None]:
        """One token through all layers."""

        def token() -> None:
            for kept in self.kept:
                self.attend(kept, is_leader=is_leader)
            self.bench.position += 1

        return self.bench.recorded(token)

    def reads(self) -> KeyReads:
        """Bytes that the last token reads, counted from the first layer's lists."""
        last = torch.full_like(self.bench.position, self.bench.shape.length - 1)
        return measured(self.kept[0], last, self.config)


def seconds_of_tile(
    bench: Bench, token: Callable[[], None], count: int, leader: Callable[[], None] | None = None
) -> float:
    """Device time of one layer's attention of a token: the mean of the last `count`.

    `leader` tells the first of them.
    """
    bench.position.fill_(bench.shape.length - count)
    first = bench.backend.mark()
    (leader or token)()
    for _ in range(count - 1):
        token()
    last = bench.backend.mark()
    return bench.backend.seconds_between(first, last) / count / bench.shape.layers
