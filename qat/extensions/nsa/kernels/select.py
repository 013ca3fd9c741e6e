"""The inputs of all backends of Native Sparse Attention, and the selection of key blocks.

All shapes follow from the inputs' shapes, so that nothing here waits for a device or compiles
twice.

Shapes: B rows, H query heads, K key-value heads (K divides H, G = H/K), S positions, D head width,
C pooled keys, T tiles of queries, N selection blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.extensions.nsa.kernels.config import NSAConfig

FORCED = 2.0**20
"""The score of a forced block; probabilities of a group sum to at most the group size."""
UNSEEN = -1.0
"""The score of a block that is in the future or in another document."""


class Inputs(NamedTuple):
    """One layer's queries, keys and values; rows begin at position 0."""

    query: Tensor
    """`(B, H, S, D)`, rotated."""
    key: Tensor
    """`(B, K, S, D)`, rotated."""
    value: Tensor
    """`(B, K, S, D)`."""
    pooled_key: Tensor
    """`(B, K, C, D)`, see `pool`."""
    pooled_value: Tensor | None
    """`(B, K, C, D)`; None if branches are merged, which use pooled keys for scores only."""
    gates: Tensor | None
    """`(B, S, H, 3)`: of the compressed, the selected and the sliding branch; None: merged."""
    first: Tensor | None
    """`(B, S)`: the start of each token's document in the row; None: 0 for all."""
    scale: float
    """The factor of `query @ key.T`."""

    @property
    def length(self) -> int:
        """Positions, S."""
        return self.query.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share keys and values, G."""
        return self.query.shape[1] // self.key.shape[1]

    def document_starts(self) -> Tensor:
        """Return `first`, or zeros for one row if it is None."""
        if self.first is not None:
            return self.first
        return torch.zeros(1, self.length, dtype=torch.long, device=self.query.device)


def pool(keys: Tensor, config: NSAConfig, weights: Tensor | None = None) -> Tensor:
    """Pool every `compress_block` keys into one, `compress_stride` apart: `(B, K, C, D)`.

    `pooled[c] = sum_i weights[i] keys[c d + i]`, or their mean.

    `keys` are `(B, K, S, D)`, or values; `weights` `(K, compress_block)`.
    """
    l, d = config.compress_block, config.compress_stride
    C = config.num_compressed(keys.shape[2])
    if C == 0:
        return keys[:, :, :0]
    wide = torch.promote_types(keys.dtype, torch.float32)
    # sum by stride: blocks overlap, but every key is read once and its gradient written once
    strides = keys[:, :, : (C - 1) * d + l].unflatten(2, (-1, d)).to(wide)
    if weights is None:
        sums = strides.sum(3) / l
        parts = [sums[:, :, start : start + C] for start in range(l // d)]
    else:
        parts = [
            (strides[:, :, start : start + C] * weight[:, None, :, None].to(wide)).sum(3)
            for start, weight in enumerate(weights.unflatten(1, (-1, d)).unbind(1))
        ]
    return sum(parts).to(keys.dtype)


def scoring_keys(keys: Tensor, pooled: Tensor, config: NSAConfig) -> Tensor:
    """Return the keys that score blocks: `(B, K, C, D)` pooled, or with a bound `(B, K, C, 2 D)`.

    With g = `bound`, m a pooled key, u and l the maximum and the minimum of its keys in each
    channel, a query's logit is `max(q, 0) @ (m + g (u - m)) + min(q, 0) @ (m + g (l - m))`.

    `keys` `(B, K, S, D)` are rotated; `pooled` `(B, K, C, D)` are pooled from them.
    """
    if not config.bound:
        return pooled
    if not pooled.shape[2]:
        return pooled.repeat(1, 1, 1, 2)
    blocks = keys.detach().unfold(2, config.compress_block, config.compress_stride)
    wide = torch.promote_types(keys.dtype, torch.float32)
    ends = (blocks.amax(-1).to(wide), blocks.amin(-1).to(wide))
    pooled = pooled.detach().to(wide)
    return torch.cat([pooled.lerp(end, config.bound) for end in ends], -1).to(keys.dtype)


def scoring_query(query: Tensor, config: NSAConfig) -> Tensor:
    """Return queries as wide as `scoring_keys`: with a bound, positive and negative parts."""
    return torch.cat([query.clamp(min=0), query.clamp(max=0)], -1) if config.bound else query


def overlap(
    num_compressed: int, num_blocks: int, config: NSAConfig, device: torch.device | None = None
) -> Tensor:
    """Return `(C, N)` float32: the share of each pooled key's block in each selection block.

    With sizes 32, 16 and 64 these are the paper's weights (equation 9), halved.
    """
    starts = torch.arange(num_compressed, device=device)[:, None] * config.compress_stride
    blocks = torch.arange(num_blocks, device=device)[None] * config.select_block
    ends = torch.minimum(starts + config.compress_block, blocks + config.select_block)
    return (ends - torch.maximum(starts, blocks)).clamp(min=0) / config.compress_block


def sees_compressed(
    places: Tensor, document_starts: Tensor, num_compressed: int, config: NSAConfig
) -> Tensor:
    """Return `(..., C)` bool: true if a pooled key's block is in the query's past and document.

    `places` `(...)` are those of the queries in the row, `document_starts` `(...)` of their
    documents.
    """
    starts = torch.arange(num_compressed, device=places.device) * config.compress_stride
    is_past = starts + config.compress_block - 1 <= places[..., None]
    return is_past & (starts >= document_starts[..., None])


@torch.no_grad()
def select(inputs: Inputs, config: NSAConfig) -> Tensor:
    """Return `(B, K, T, N)` bool: the blocks, at most `num_selected`, that each tile reads.

    Only the tile's first query decides, so the selection does not depend on the future: softmax
    over the pooled keys that it sees (`scoring_keys`), in float32 (the paper's equation 8),
    distributed over selection blocks by `overlap` (9) and summed over the query heads of a group
    (10). The highest scores are taken after the forced blocks; ties: the lower block.
    """
    S, tile = inputs.length, config.select_tile
    leaders = torch.arange(0, S, tile, device=inputs.query.device)
    document_starts = inputs.document_starts()[:, leaders]
    is_seen = sees_compressed(leaders, document_starts, inputs.pooled_key.shape[2], config)
    keys = scoring_keys(inputs.key, inputs.pooled_key, config)
    query, N = inputs.query[:, :, ::tile], config.num_blocks(inputs.key.shape[2])
    scores = importance(query, keys, is_seen, config, num_blocks=N, scale=inputs.scale)
    scores = ranked(scores, leaders, document_starts, config)
    return highest(scores, config.num_selected)


def past_blocks(inputs: Inputs, config: NSAConfig) -> Tensor:
    """Return the number of blocks of its document so far that each tile may read, `(B, T)`.

    B is 1 without documents.
    """
    leaders = torch.arange(0, inputs.length, config.select_tile, device=inputs.query.device)
    first = inputs.document_starts()[:, leaders] // config.select_block
    return leaders // config.select_block + config.tile_blocks - first


def importance(
    query: Tensor,
    keys: Tensor,
    is_seen: Tensor,
    config: NSAConfig,
    *,
    num_blocks: int,
    scale: float,
) -> Tensor:
    """Return `(B, K, T, N)` float32: the share of attention to `keys` that falls on each block.

    Args:
        query: `(B, H, T, D)`, the queries that decide.
        keys: `(B, K, C, .)`, from `scoring_keys`.
        is_seen: `(B, T, C)` bool, the keys that they see.
        num_blocks: N.
        scale: the factor of `query @ key`.
    """
    B, T = query.shape[0], query.shape[2]
    K, C = keys.shape[1:3]
    if C == 0:
        return query.new_zeros(B, K, T, num_blocks, dtype=torch.float32)
    query = scoring_query(query, config).unflatten(1, (K, -1)).float()
    with torch.autocast(query.device.type, enabled=False):  # autocast would round scores into ties
        logits = scale * query @ keys[:, :, None].float().mT
        shares = masked_softmax(logits, is_seen[:, None, None]).sum(2)
        return shares @ overlap(C, num_blocks, config, query.device)


def ranked(scores: Tensor, leaders: Tensor, document_starts: Tensor, config: NSAConfig) -> Tensor:
    """Return the scores with forced blocks above all others and invisible blocks below.

    Args:
        scores: `(B, K, T, N)`.
        leaders: `(T,)` or `(B, T)`, places of the queries that decide.
        document_starts: `(B, T)`, the starts of their documents.
    """
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    own = leaders[..., None] // config.select_block
    first = document_starts[..., None] // config.select_block
    is_init = (blocks >= first) & (blocks < first + config.init_blocks)
    is_local = (blocks > own - config.local_blocks) & (blocks < own + config.tile_blocks)
    is_seen = (blocks >= first) & (blocks < own + config.tile_blocks)
    scores = torch.where((is_init | is_local)[:, None], FORCED, scores)
    return torch.where(is_seen[:, None], scores, UNSEEN)


def highest(scores: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` highest scores of the last axis that are not `UNSEEN`."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    chosen = order[..., :count]
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
    return is_chosen & (scores > UNSEEN)


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax over the last axis where `mask` is true; zeros in rows without any."""
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    return logits.softmax(-1) * mask
