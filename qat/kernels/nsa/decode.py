"""Native Sparse Attention of one new position over what is kept of the positions before it.

Shapes are static and nothing depends on the host, so that one recorded graph serves every step but
those that begin a tile, whose graph also chooses blocks. Rows begin at position 0 and may be of
different lengths.

Shapes: B rows, H query heads, K key-value heads, N positions that there is room for, D head width,
C pooled keys, T tiles, n blocks that a query selects, M keys that a branch may read.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from qat.kernels.dispatch import use_triton
from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.inputs import Inputs
from qat.kernels.nsa.reference import combine
from qat.kernels.nsa.select import (
    highest,
    importance,
    judged_keys,
    masked_softmax,
    pool,
    ranked,
    sees_compressed,
)

NONE = -1
"""Stands in a list of blocks where there is no further one."""
WIDEST = 256
"""Widest head of the kernels."""


class Kept(NamedTuple):
    """What one layer keeps of its past; all of it is written in place."""

    keys: Tensor
    """`(B, K, N, D)`, rotated."""
    values: Tensor
    """`(B, K, N, D)`."""
    pooled_keys: Tensor
    """`(B, K, C, D)`: one every `compress_stride` positions, once its whole block is there."""
    pooled_values: Tensor | None
    """`(B, K, C, D)`; None where branches are merged."""
    blocks: Tensor
    """`(B, K, T, n)` int32: what each tile selected, ascending, then `NONE`."""
    judged_keys: Tensor | None = None
    """`(B, K, C, 2 D)`: what blocks are judged by; None where it is `pooled_keys`."""

    @classmethod
    def empty(cls, like: Tensor, room: int, config: NSAConfig) -> Self:
        """Room for `room` positions of keys such as `like` `(B, K, ..., D)`."""
        B, K, D = like.shape[0], like.shape[1], like.shape[-1]
        C = config.num_compressed(room)
        blocks = like.new_full(
            (B, K, config.num_tiles(room), config.num_selected), NONE, dtype=torch.int32
        )
        return cls(
            like.new_zeros(B, K, room, D),
            like.new_zeros(B, K, room, D),
            like.new_zeros(B, K, C, D),
            None if config.mode == "merged" else like.new_zeros(B, K, C, D),
            blocks,
            like.new_zeros(B, K, C, 2 * D) if config.bound else None,
        )

    @property
    def room(self) -> int:
        """N."""
        return self.keys.shape[2]


@torch.no_grad()
def fill(kept: Kept, inputs: Inputs, selection: Tensor, config: NSAConfig) -> None:
    """Keep positions 0 ... S - 1 of `inputs` and what their tiles selected.

    Args:
        kept: with room for S positions.
        inputs: of whole rows.
        selection: `(B, K, tiles, blocks)` bool, from `qat.kernels.nsa.select.select`.
        config: the definition.
    """
    S, C = inputs.key.shape[2], inputs.pooled_key.shape[2]
    kept.keys[:, :, :S] = inputs.key
    kept.values[:, :, :S] = inputs.value
    kept.pooled_keys[:, :, :C] = inputs.pooled_key
    if kept.pooled_values is not None:
        kept.pooled_values[:, :, :C] = inputs.pooled_value
    if kept.judged_keys is not None:
        kept.judged_keys[:, :, :C] = judged_keys(inputs.key, inputs.pooled_key, config)
    kept.blocks[:, :, : selection.shape[2]] = listed(selection, kept.blocks.shape[-1])


@torch.no_grad()
def append(
    kept: Kept,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    *,
    config: NSAConfig,
    weights: tuple[Tensor, Tensor] | None = None,
    pooled_key: Tensor | None = None,
) -> None:
    """Keep one position more of each row, and the pooled key and value that it completes, if any.

    Args:
        kept: what is written into.
        key: `(B, K, D)`, rotated.
        value: `(B, K, D)`.
        position: `(B,)` int64, of the new key in its row.
        config: the definition.
        weights: `(K, compress_block)` each, of keys and of values; None: their mean.
        pooled_key: `(B, K, D)` of the last `compress_block` keys, for those rows where it is due;
            by default pooled from the keys that are kept.
    """
    start = position + 1 - config.compress_block
    is_due = (start >= 0) & (start % config.compress_stride == 0)
    place = (start // config.compress_stride).clamp(0, max(0, kept.pooled_keys.shape[2] - 1))
    if pooled_key is None and _fits(key, kept):
        from qat.kernels.nsa import decode_triton

        decode_triton._append_by_kernel(kept, key, value, position, config=config, weights=weights)
    else:
        _put(kept.keys, key, position)
        _put(kept.values, value, position)
        if kept.pooled_keys.shape[2]:
            of_keys, of_values = weights or (None, None)
            if pooled_key is None:
                pooled_key = pool(_block(kept.keys, start, config), config, of_keys)[:, :, 0]
            _put(kept.pooled_keys, pooled_key, place, is_due)
            if kept.pooled_values is not None:
                found = pool(_block(kept.values, start, config), config, of_values)[:, :, 0]
                _put(kept.pooled_values, found, place, is_due)
    if kept.judged_keys is not None and kept.pooled_keys.shape[2]:
        pooled = _rows(kept.pooled_keys, place[:, None, None].expand(-1, key.shape[1], 1))
        judged = judged_keys(_block(kept.keys, start, config), pooled, config)
        _put(kept.judged_keys, judged[:, :, 0], place, is_due)


@torch.no_grad()
def choose(query: Tensor, kept: Kept, position: Tensor, *, config: NSAConfig, scale: float) -> None:
    """Select blocks for those rows whose position begins a tile; the others' lists stay.

    Args:
        query: `(B, H, D)`, rotated.
        kept: what the position's own key was appended to.
        position: `(B,)` int64.
        config: the definition.
        scale: multiplies `query @ key`.
    """
    leaders, beginnings = position[:, None], torch.zeros_like(position)[:, None]
    keys = kept.pooled_keys if kept.judged_keys is None else kept.judged_keys
    is_seen = sees_compressed(leaders, beginnings, keys.shape[2], config)
    N = config.num_blocks(kept.room)
    scores = importance(query[:, :, None], keys, is_seen, config, num_blocks=N, scale=scale)
    selection = highest(ranked(scores, leaders, beginnings, config), config.num_selected)
    found = listed(selection, config.num_selected)[:, :, 0]
    is_leader = position % config.select_tile == 0
    _put(kept.blocks, found, position // config.select_tile, is_leader)


def attend(
    query: Tensor,
    kept: Kept,
    position: Tensor,
    *,
    gates: Tensor | None,
    config: NSAConfig,
    scale: float,
) -> Tensor:
    """`(B, H, D)`: what `qat.kernels.nsa.reference.attend` gives for the last query of each row.

    Args:
        query: `(B, H, D)`, rotated.
        kept: what the position's own key was appended to, and its tile's blocks chosen for.
        position: `(B,)` int64.
        gates: `(B, H, 3)`: of the compressed, the selected and the sliding branch; None: merged.
        config: the definition.
        scale: multiplies `query @ key`.
    """
    if _fits(query, kept):
        from qat.kernels.nsa import decode_triton

        return decode_triton._attend_by_kernel(
            query, kept, position, gates=gates, config=config, scale=scale
        )
    pair = (kept.keys, kept.values)
    selected = _branch(query, pair, selected_places(kept, position, config), scale)
    if gates is None:
        return selected
    window = _branch(query, pair, window_places(kept, position, config), scale)
    pooled = (kept.pooled_keys, kept.pooled_values)
    compressed = _branch(query, pooled, compressed_places(kept, position, config), scale)
    return combine(gates, compressed, selected, window)


def attend_densely(query: Tensor, kept: Kept, position: Tensor, *, scale: float) -> Tensor:
    """`(B, H, D)`: attention to all positions so far; arguments as for `attend`."""
    places = torch.arange(kept.room, device=position.device)
    places = torch.where(places <= position[:, None], places, NONE)
    places = places[:, None].expand(-1, kept.keys.shape[1], -1)
    return _branch(query, (kept.keys, kept.values), places, scale)


def selected_places(kept: Kept, position: Tensor, config: NSAConfig) -> Tensor:
    """`(B, K, M)`: places of the keys in the held blocks; `NONE` where a list has no more."""
    tile = (position // config.select_tile)[:, None, None, None]
    blocks = kept.blocks.gather(2, tile.expand(-1, *kept.blocks.shape[1:2], 1, config.num_selected))
    inside = torch.arange(config.select_block, device=position.device)
    places = (blocks.long()[:, :, 0, :, None] * config.select_block + inside).flatten(2)
    is_held = (blocks != NONE)[:, :, 0].repeat_interleave(config.select_block, 2)
    return places.masked_fill(~is_held | (places > position[:, None, None]), NONE)


def window_places(kept: Kept, position: Tensor, config: NSAConfig) -> Tensor:
    """`(B, K, M)`: the last `window` places, the position's own first."""
    back = torch.arange(config.window, device=position.device)
    places = (position[:, None] - back).clamp(min=NONE)
    return places[:, None].expand(-1, kept.keys.shape[1], -1)


def compressed_places(kept: Kept, position: Tensor, config: NSAConfig) -> Tensor:
    """`(B, K, M)`: places of the pooled keys whose block has passed."""
    C = kept.pooled_keys.shape[2]
    places = torch.arange(C, device=position.device)
    is_seen = sees_compressed(position, torch.zeros_like(position), C, config)
    return torch.where(is_seen, places, NONE)[:, None].expand(-1, kept.keys.shape[1], -1)


def listed(selection: Tensor, count: int) -> Tensor:
    """The true places of the last axis, ascending, then `NONE`: `(..., count)` int32."""
    order = selection.byte().argsort(dim=-1, descending=True, stable=True)[..., :count]
    found = torch.where(selection.gather(-1, order), order, NONE).int()
    return torch.nn.functional.pad(found, (0, count - found.shape[-1]), value=NONE)


def _branch(query: Tensor, pair: tuple[Tensor, Tensor], places: Tensor, scale: float) -> Tensor:
    """`(B, H, D)`: attention to the keys and values at `places`; zeros where there are none."""
    key, value = (_rows(tensor, places.clamp(min=0)) for tensor in pair)
    logits = scale * query.unflatten(1, (places.shape[1], -1)) @ key.mT
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shares = masked_softmax(wide, (places != NONE)[:, :, None]).to(value.dtype)
    return (shares @ value).flatten(1, 2)


def _block(kept: Tensor, start: Tensor, config: NSAConfig) -> Tensor:
    """`(B, K, L, D)`: L places of `kept` from `start` `(B,)` on; from 0 if that lies before."""
    inside = torch.arange(config.compress_block, device=start.device)
    places = (start.clamp(min=0)[:, None] + inside)[:, None].expand(-1, kept.shape[1], -1)
    return _rows(kept, places)


def _rows(tensor: Tensor, places: Tensor) -> Tensor:
    """`(B, K, M, D)`: what lies at `places` `(B, K, M)` of `(B, K, N, D)`."""
    B, K, N, D = tensor.shape
    first = torch.arange(B * K, device=places.device).view(B, K, 1) * N
    found = tensor.flatten(0, 2).index_select(0, (places + first).flatten())
    return found.view(*places.shape, D)


def _put(into: Tensor, found: Tensor, place: Tensor, is_due: Tensor | None = None) -> None:
    """Write `found` `(B, K, X)` at `place` `(B,)` of `into` `(B, K, places, X)`, where due."""
    index = place[:, None, None, None].expand(-1, found.shape[1], 1, found.shape[2])
    new = found[:, :, None].to(into.dtype)
    if is_due is not None:
        new = torch.where(is_due[:, None, None, None], new, into.gather(2, index))
    into.scatter_(2, index, new)


def _fits(tensor: Tensor, kept: Kept) -> bool:
    """Whether the kernels compute."""
    is_known = tensor.dtype == kept.keys.dtype != torch.float64 and tensor.shape[-1] <= WIDEST
    return is_known and use_triton(tensor)
