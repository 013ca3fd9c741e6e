"""Native Sparse Attention with a cache: layers that also hold pooled keys and selected blocks.

Shapes: B rows, H query heads, K key-value heads, S new positions, N positions including those in
the cache, D head width, L keys of a compressed block.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.llama.modeling_llama import rotate_half

from qat.errors import ConfigError
from qat.extensions.nsa.kernels import decode
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.decode import Past
from qat.extensions.nsa.kernels.select import Inputs, pool, select
from qat.extensions.nsa.rows import TokenRows

CAPACITY_STEP = 256
"""The capacity in positions is a multiple of this."""
GROWTH = 8
"""The capacity grows by at least an eighth, so that the cache is seldom copied."""
Angles = tuple[Tensor, Tensor]
"""Cosines and sines `(B, S, D)`."""


PoolWeights = tuple[Tensor, Tensor] | None
"""Weights that pool keys and values, `(K, L)` each; None: the mean."""


class Heads(NamedTuple):
    """The projected heads, `(B, H, S, D)` and `(B, K, S, D)`."""

    query: Tensor
    """Queries, rotated."""
    key: Tensor
    """Keys, rotated."""
    value: Tensor
    unrotated_key: Tensor


class Unrotated(NamedTuple):
    """The last L keys before rotation, by position modulo L, with their angles."""

    keys: Tensor
    """`(B, K, L, D)`."""
    cos: Tensor
    """`(B, 1, L, D)`."""
    sin: Tensor

    @classmethod
    def of(
        cls, keys: Tensor, angles: Angles, rows: TokenRows, *, position: Tensor, block: int
    ) -> Self:
        """Collect them from whole rows: `keys` `(B, K, S, D)` and their angles, in batch order."""
        L, last = block, position[:, None] - 1
        place = (last - (last - torch.arange(L, device=keys.device)) % L).clamp(min=0)

        def latest(tensor: Tensor) -> Tensor:
            tensor = rows.to_front(tensor.expand(len(place), -1, -1, -1), 2)
            return tensor.take_along_dim(place[:, None, :, None], 2)

        cos, sin = (angle[:, None] for angle in angles)
        return cls(latest(keys.detach()), latest(cos), latest(sin))

    def pooled(
        self,
        key: Tensor,
        angles: Angles,
        position: Tensor,
        *,
        config: NSAConfig,
        weights: PoolWeights,
    ) -> Tensor:
        """Append `key` `(B, K, D)` and return the last L keys pooled and rotated, `(B, K, D)`."""
        L = self.keys.shape[2]
        slot = (position % L)[:, None, None, None]
        for stored, new in zip(self, (key, *(angle[:, None] for angle in angles)), strict=True):
            new = new[:, :, None].to(stored.dtype).expand(len(position), -1, -1, -1)
            stored.scatter_(2, slot.expand_as(new), new)
        order = (position[:, None] + 1 + torch.arange(L, device=position.device)) % L
        keys = self.keys.take_along_dim(order[:, None, :, None], 2)
        found = pool(keys, config, None if weights is None else weights[0])
        cos, sin = (a.take_along_dim(order[:, None, :1, None], 2) for a in (self.cos, self.sin))
        return (found * cos + rotate_half(found) * sin)[:, :, 0].to(key.dtype)


class NSALayer(DynamicLayer):
    """A layer of transformers' `DynamicCache` for one `NSAAttention`.

    Rows are stored without their padding, each from position 0 on. `keys` and `values` are as long
    as the rows with padding, since transformers takes the length from them.
    """

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        self.past: Past | None = None
        self.unrotated: Unrotated | None = None
        self.position: Tensor | None = None
        """`(B,)` int64: the position of each row's next token."""
        self.lengths: list[int] = []
        """The same positions on the host."""

    def begin(
        self, inputs: Inputs, rows: TokenRows, lengths: list[int], unrotated: tuple[Tensor, Angles]
    ) -> None:
        """Fill the empty cache with whole rows, whose tokens come before padding in `inputs`.

        `lengths` are the tokens of each row, `unrotated` the keys before rotation and their angles,
        in batch order.
        """
        like, config = inputs.key.detach(), self.config
        self.dtype, self.device, self.is_initialized = like.dtype, like.device, True
        self.lengths = lengths
        self.position = torch.tensor(lengths, device=like.device)
        self.past = Past.empty(like, _capacity(inputs.length), config)
        self._update_views(inputs.length)
        decode.fill(self.past, inputs, select(inputs, config), config)
        if config.cmp_rope == "pre":
            position, block = self.position, config.compress_block
            self.unrotated = Unrotated.of(*unrotated, rows, position=position, block=block)

    @torch.no_grad()
    def extend(
        self,
        heads: Heads,
        gates: Tensor | None,
        angles: Angles,
        *,
        weights: PoolWeights,
        scale: float,
    ) -> Tensor:
        """Append new positions one by one and return their attention, `(B, S, H, D)`.

        `gates` are `(B, S, H, 3)`, or None if branches are merged; `scale` is the factor of
        `query @ key`.
        """
        config, place, outputs = self.config, self.position, []
        sizes = {"config": config, "scale": scale}
        for at in range(heads.value.shape[2]):
            query, key, value, unrotated_key = (tensor[:, :, at] for tensor in heads)
            cos, sin = (tensor[:, at] for tensor in angles)
            length = self.get_seq_length() + 1
            if length > self.past.capacity:
                old = self.past
                self.past = Past.empty(old.keys, _capacity(length + length // GROWTH), config)
                for new, stored in zip(self.past, old, strict=True):
                    if stored is not None:
                        new[:, :, : stored.shape[2]] = stored
            more = {"config": config, "weights": weights}
            if self.unrotated is not None:
                pooled = self.unrotated.pooled(unrotated_key, (cos, sin), place, **more)
                more["pooled_key"] = pooled
            decode.append(self.past, key, value, place, **more)
            if any(row % config.select_tile == 0 for row in self.lengths):  # a tile begins
                decode.choose(query, self.past, place, **sizes)
            if length < config.min_len:
                out = decode.attend_densely(query, self.past, place, scale=scale)
            else:
                gate = None if gates is None else gates[:, at]
                out = decode.attend(query, self.past, place, gates=gate, **sizes)
            outputs.append(out)
            self._advance(1)
            self._update_views(length)
        return torch.stack(outputs, 1)

    def _advance(self, by: int) -> None:
        self.position += by
        self.lengths = [length + by for length in self.lengths]

    def _update_views(self, length: int) -> None:
        self.keys, self.values = self.past.keys[:, :, :length], self.past.values[:, :, :length]

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Raise an error: only the layer's own module can fill it."""
        raise ValueError("a cache that Native Sparse Attention filled takes no other layer's keys")

    def reset(self) -> None:
        """Clear the cache."""
        self.past = self.unrotated = self.position = self.keys = self.values = None
        self.lengths, self.is_initialized = [], False

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of every row: `-tokens_to_remove`, or down to a positive length.

        Raises:
            ConfigError: earlier unrotated keys are gone, so they cannot be pooled again.
        """
        length = self.get_seq_length()
        if tokens_to_remove == 0 or length == 0:
            return
        if self.unrotated is not None:
            raise ConfigError(
                "cmp_rope=pre, whose cache cannot go back; generate without an assistant, or use "
                "cmp_rope=post"
            )
        removed = -tokens_to_remove if tokens_to_remove < 0 else max(0, length - tokens_to_remove)
        self._advance(-removed)
        self._update_views(length - removed)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row `beam_idx[i]`."""
        self._each_row(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._each_row(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._each_row(lambda tensor: tensor[indices])

    def _each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        length = self.get_seq_length()
        if not length:
            return
        self.past = Past(*(None if tensor is None else change(tensor) for tensor in self.past))
        if self.unrotated is not None:
            self.unrotated = Unrotated(*(change(tensor) for tensor in self.unrotated))
        self.lengths = change(torch.tensor(self.lengths)).tolist()
        self.position = torch.tensor(self.lengths, device=self.position.device)
        self._update_views(length)


def layer_of(cache: Cache, place: int, config: NSAConfig) -> NSALayer:
    """Return layer `place` of `cache`, inserted on first use.

    Raises:
        ConfigError: this kind of cache cannot hold pooled keys.
    """
    while len(cache.layers) <= place and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[place] if len(cache.layers) > place else None
    if isinstance(layer, NSALayer) and not cache.offloading:
        return layer
    is_plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
    if not is_plain or cache.offloading or layer.get_seq_length():
        kind = "an offloaded cache" if cache.offloading else f"a cache of {type(layer).__name__}"
        raise ConfigError(
            f"{kind}, but Native Sparse Attention keeps pooled keys in a DynamicCache of its own; "
            "leave cache_implementation unset and begin with an empty cache"
        )
    cache.layers[place] = NSALayer(config)
    return cache.layers[place]


def _capacity(length: int) -> int:
    return -(-(length + 1) // CAPACITY_STEP) * CAPACITY_STEP  # above `length`: one more fits
