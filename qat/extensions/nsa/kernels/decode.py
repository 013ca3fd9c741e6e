"""Native Sparse Attention of one new position per row over the cached positions before it.

Shapes are static and nothing depends on the host, so that one captured graph serves every step
except those that begin a tile, whose graph also selects blocks. Rows begin at position 0 and may
have different lengths.

The kernels are three launches per position. The first stores the new key and value and pools the
blocks that they complete. The second splits the lists of all branches over programs, each of which
reads `TILE` keys for the query heads of one key-value head; the third merges the partial softmaxes
of each branch and adds the branches.

Shapes: B rows, H query heads, K key-value heads, N positions of capacity, D head width, C pooled
keys, T tiles, n blocks that a query selects, M keys that a branch may read.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from qat.extensions.decode.kernels.decode_attention import LEAST, add_product
from qat.extensions.decode.kernels.launch import gdc_launch_dependents, gdc_wait, overlapping
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.reference import combine
from qat.extensions.nsa.kernels.select import (
    Inputs,
    highest,
    importance,
    masked_softmax,
    pool,
    ranked,
    scoring_keys,
    sees_compressed,
)
from qat.kernels.dispatch import tl, triton, use_triton

NONE = -1
"""The padding of block lists."""
WIDEST = 256
"""The largest head width that the kernels support."""
TILE = 64
"""Keys that a program reads at a time."""
MOST_PARTS = 64
"""The most programs that share one head's pooled keys; beyond that each reads several tiles, which
bounds the work of the merge."""
LOWEST = tl.constexpr(-1e30)
"""The softmax peak for no keys; finite, so that differences of peaks are not NaN."""


class Past(NamedTuple):
    """The cached past of one layer; all tensors are written in place."""

    keys: Tensor
    """`(B, K, N, D)`, rotated."""
    values: Tensor
    """`(B, K, N, D)`."""
    pooled_keys: Tensor
    """`(B, K, C, D)`: one per `compress_stride` positions, written once its block is complete."""
    pooled_values: Tensor | None
    """`(B, K, C, D)`; None if branches are merged."""
    blocks: Tensor
    """`(B, K, T, n)` int32: the blocks that each tile selected, ascending, then `NONE`."""
    scoring_keys: Tensor | None = None
    """`(B, K, C, 2 D)`: the bounds by which blocks are scored; None if `pooled_keys` are used."""

    @classmethod
    def empty(cls, like: Tensor, capacity: int, config: NSAConfig) -> Self:
        """Allocate `capacity` positions for keys like `like` `(B, K, ..., D)`."""
        B, K, D = like.shape[0], like.shape[1], like.shape[-1]
        C = config.num_compressed(capacity)
        blocks = like.new_full(
            (B, K, config.num_tiles(capacity), config.num_selected), NONE, dtype=torch.int32
        )
        return cls(
            like.new_zeros(B, K, capacity, D),
            like.new_zeros(B, K, capacity, D),
            like.new_zeros(B, K, C, D),
            None if config.mode == "merged" else like.new_zeros(B, K, C, D),
            blocks,
            like.new_zeros(B, K, C, 2 * D) if config.bound else None,
        )

    @property
    def capacity(self) -> int:
        """The capacity in positions, N."""
        return self.keys.shape[2]


@torch.no_grad()
def fill(past: Past, inputs: Inputs, selection: Tensor, config: NSAConfig) -> None:
    """Store positions 0 ... S - 1 of whole rows and the blocks that their tiles selected.

    `selection` is `(B, K, tiles, blocks)` bool, from `qat.extensions.nsa.kernels.select.select`.
    """
    S, C = inputs.key.shape[2], inputs.pooled_key.shape[2]
    past.keys[:, :, :S] = inputs.key
    past.values[:, :, :S] = inputs.value
    past.pooled_keys[:, :, :C] = inputs.pooled_key
    if past.pooled_values is not None:
        past.pooled_values[:, :, :C] = inputs.pooled_value
    if past.scoring_keys is not None:
        past.scoring_keys[:, :, :C] = scoring_keys(inputs.key, inputs.pooled_key, config)
    past.blocks[:, :, : selection.shape[2]] = listed(selection, past.blocks.shape[-1])


@torch.no_grad()
def append(
    past: Past,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    *,
    config: NSAConfig,
    weights: tuple[Tensor, Tensor] | None = None,
    pooled_key: Tensor | None = None,
) -> None:
    """Store one more position of each row, and the pooled key and value that it completes, if any.

    Args:
        past: the cache that is written to.
        key: `(B, K, D)`, rotated.
        value: `(B, K, D)`.
        position: `(B,)` int64, the place of the new key in its row.
        weights: `(K, compress_block)` each, for keys and for values; None: their mean.
        pooled_key: `(B, K, D)` of the last `compress_block` keys, for those rows where it is due;
            by default pooled from the cached keys.
    """
    start = position + 1 - config.compress_block
    is_due = (start >= 0) & (start % config.compress_stride == 0)  # `(B,)`: a block is complete
    place = (start // config.compress_stride).clamp(0, max(0, past.pooled_keys.shape[2] - 1))
    of_keys, of_values = weights or (None, None)
    if pooled_key is None and _fits(key, past):
        B, K, N, D = past.keys.shape
        _append_kernel[(B * K,)](
            past.keys, past.values, past.pooled_keys, past.pooled_values, key.contiguous(),
            value.contiguous(), position, of_keys, of_values, N, past.pooled_keys.shape[2],
            K=K, D=D, BLOCK=config.compress_block, STRIDE=config.compress_stride,
            ROWS=triton.next_power_of_2(config.compress_block), WIDTH=triton.next_power_of_2(D),
            num_warps=4, **overlapping(key.device),
        )  # fmt: skip
    else:
        _put(past.keys, key, position)
        _put(past.values, value, position)
        if past.pooled_keys.shape[2]:
            if pooled_key is None:
                pooled_key = pool(_block(past.keys, start, config), config, of_keys)[:, :, 0]
            _put(past.pooled_keys, pooled_key, place, is_due)
            if past.pooled_values is not None:
                found = pool(_block(past.values, start, config), config, of_values)[:, :, 0]
                _put(past.pooled_values, found, place, is_due)
    if past.scoring_keys is not None and past.pooled_keys.shape[2]:
        pooled = _rows(past.pooled_keys, place[:, None, None].expand(-1, key.shape[1], 1))
        scoring = scoring_keys(_block(past.keys, start, config), pooled, config)
        _put(past.scoring_keys, scoring[:, :, 0], place, is_due)


@torch.no_grad()
def choose(query: Tensor, past: Past, position: Tensor, *, config: NSAConfig, scale: float) -> None:
    """Select blocks for the rows whose position begins a tile; other rows keep their lists.

    Arguments as for `attend`.
    """
    leaders, document_starts = position[:, None], torch.zeros_like(position)[:, None]
    keys = past.pooled_keys if past.scoring_keys is None else past.scoring_keys
    is_seen = sees_compressed(leaders, document_starts, keys.shape[2], config)
    N = config.num_blocks(past.capacity)
    scores = importance(query[:, :, None], keys, is_seen, config, num_blocks=N, scale=scale)
    selection = highest(ranked(scores, leaders, document_starts, config), config.num_selected)
    found = listed(selection, config.num_selected)[:, :, 0]
    is_leader = position % config.select_tile == 0
    _put(past.blocks, found, position // config.select_tile, is_leader)


def attend(
    query: Tensor,
    past: Past,
    position: Tensor,
    *,
    gates: Tensor | None,
    config: NSAConfig,
    scale: float,
) -> Tensor:
    """Return `(B, H, D)`: the result of `reference.attend` for each last query.

    Args:
        query: `(B, H, D)`, rotated.
        past: the cache, which already holds the position's own key and its tile's blocks.
        position: `(B,)` int64.
        gates: `(B, H, 3)`: of the compressed, the selected and the sliding branch; None: merged.
        scale: factor of `query @ key`.
    """
    if _fits(query, past):
        return _attend_by_kernel(query, past, position, gates=gates, config=config, scale=scale)
    pair = (past.keys, past.values)
    selected = _branch(query, pair, selected_places(past, position, config), scale)
    if gates is None:  # branches are merged
        return selected
    window = _branch(query, pair, window_places(past, position, config), scale)
    pooled = (past.pooled_keys, past.pooled_values)
    compressed = _branch(query, pooled, compressed_places(past, position, config), scale)
    return combine(gates, compressed, selected, window)


def attend_densely(query: Tensor, past: Past, position: Tensor, *, scale: float) -> Tensor:
    """Return attention `(B, H, D)` to all positions so far; arguments as for `attend`."""
    places = torch.arange(past.capacity, device=position.device)
    places = torch.where(places <= position[:, None], places, NONE)
    places = places[:, None].expand(-1, past.keys.shape[1], -1)
    return _branch(query, (past.keys, past.values), places, scale)


def selected_places(past: Past, position: Tensor, config: NSAConfig) -> Tensor:
    """Return `(B, K, M)`: places of the keys in the selected blocks, padded with `NONE`."""
    tile = (position // config.select_tile)[:, None, None, None]
    blocks = past.blocks.gather(2, tile.expand(-1, *past.blocks.shape[1:2], 1, config.num_selected))
    inside = torch.arange(config.select_block, device=position.device)
    places = (blocks.long()[:, :, 0, :, None] * config.select_block + inside).flatten(2)
    is_held = (blocks != NONE)[:, :, 0].repeat_interleave(config.select_block, 2)
    return places.masked_fill(~is_held | (places > position[:, None, None]), NONE)


def window_places(past: Past, position: Tensor, config: NSAConfig) -> Tensor:
    """Return `(B, K, M)`: the last `window` places, starting with the position's own."""
    back = torch.arange(config.window, device=position.device)
    places = (position[:, None] - back).clamp(min=NONE)
    return places[:, None].expand(-1, past.keys.shape[1], -1)


def compressed_places(past: Past, position: Tensor, config: NSAConfig) -> Tensor:
    """Return `(B, K, M)`: places of the pooled keys whose block is complete."""
    C = past.pooled_keys.shape[2]
    places = torch.arange(C, device=position.device)
    is_seen = sees_compressed(position, torch.zeros_like(position), C, config)
    return torch.where(is_seen, places, NONE)[:, None].expand(-1, past.keys.shape[1], -1)


def listed(selection: Tensor, count: int) -> Tensor:
    """List the true places of the last axis, ascending, then `NONE`: `(..., count)` int32."""
    order = selection.byte().argsort(dim=-1, descending=True, stable=True)[..., :count]
    found = torch.where(selection.gather(-1, order), order, NONE).int()
    return pad(found, (0, count - found.shape[-1]), value=NONE)


def _branch(query: Tensor, pair: tuple[Tensor, Tensor], places: Tensor, scale: float) -> Tensor:
    """Return attention `(B, H, D)` to the keys and values at `places`; zeros if there are none."""
    key, value = (_rows(tensor, places.clamp(min=0)) for tensor in pair)
    logits = scale * query.unflatten(1, (places.shape[1], -1)) @ key.mT
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shares = masked_softmax(wide, (places != NONE)[:, :, None]).to(value.dtype)
    return (shares @ value).flatten(1, 2)


def _block(tensor: Tensor, start: Tensor, config: NSAConfig) -> Tensor:
    """Return L places of `tensor` from `start` `(B,)` on, clamped to 0: `(B, K, L, D)`."""
    inside = torch.arange(config.compress_block, device=start.device)
    places = (start.clamp(min=0)[:, None] + inside)[:, None].expand(-1, tensor.shape[1], -1)
    return _rows(tensor, places)


def _rows(tensor: Tensor, places: Tensor) -> Tensor:
    """Gather `places` `(B, K, M)` from `(B, K, N, D)`: `(B, K, M, D)`."""
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


def _fits(tensor: Tensor, past: Past) -> bool:
    is_known = tensor.dtype == past.keys.dtype != torch.float64 and tensor.shape[-1] <= WIDEST
    return is_known and use_triton(tensor, __name__)


def _attend_by_kernel(
    query: Tensor,
    past: Past,
    position: Tensor,
    *,
    gates: Tensor | None,
    config: NSAConfig,
    scale: float,
) -> Tensor:
    (B, H, D), (K, N) = query.shape, past.keys.shape[1:3]
    T, C = past.blocks.shape[2], past.pooled_keys.shape[2]
    selected, window, compressed = _programs(config, C)
    splits = selected + window + compressed
    new = {"dtype": torch.float32, "device": query.device}
    parts = torch.empty(B * H, splits, D, **new)
    peaks, sums = torch.empty(2, B * H, splits, **new)
    _split_kernel[(B * K, splits)](
        parts, peaks, sums, query.contiguous(), past.keys, past.values, past.pooled_keys,
        past.pooled_values, past.blocks, position, N, T, C, scale,
        H=H, K=K, D=D, ROWS=max(triton.next_power_of_2(H // K), LEAST),
        WIDTH=max(triton.next_power_of_2(D), LEAST), TILE=TILE, SELECTED=selected, WINDOW=window,
        SPLITS=splits, NUM_BLOCKS=config.num_selected, BLOCK=config.select_block,
        TILE_QUERIES=config.select_tile, SPAN=config.window, POOL_BLOCK=config.compress_block,
        POOL_STRIDE=config.compress_stride, num_warps=4, **overlapping(query.device),
    )  # fmt: skip
    out = torch.empty(B, H, D, dtype=query.dtype, device=query.device)
    _merge_kernel[(B * H,)](
        out, parts, peaks, sums, None if gates is None else gates.contiguous(),
        D=D, WIDTH=triton.next_power_of_2(D), SELECTED=selected, WINDOW=window,
        COMPRESSED=compressed, num_warps=4, **overlapping(query.device),
    )  # fmt: skip
    return out


def _programs(config: NSAConfig, num_compressed: int) -> tuple[int, int, int]:
    """Return how many programs share the lists of the selected, window and pooled branch."""
    selected = triton.cdiv(config.selected_keys, TILE)
    if config.mode == "merged":
        return selected, 0, 0
    # powers of two, since each number compiles another kernel
    compressed = triton.next_power_of_2(max(1, triton.cdiv(num_compressed, TILE)))
    return selected, triton.cdiv(config.window, TILE), min(compressed, MOST_PARTS)


# not specialized: N, T and C grow with the capacity, and Triton would compile again for 1 and for
# multiples of 16
@triton.jit(do_not_specialize=["N", "C"])
def _append_kernel(
    keys, values, pooled_keys, pooled_values, new_key, new_value, position, of_keys, of_values, N,
    C,
    K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store one row's new key and value in one key-value head, and pool them if due."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    at = tl.load(position + head // K).to(tl.int32)
    start = at + 1 - BLOCK
    place = start // STRIDE
    is_due = (start >= 0) & (start % STRIDE == 0) & (place < C)
    into = head.to(tl.int64) * N * D
    pooled = (head.to(tl.int64) * C + place) * D
    _keep(
        keys + into, new_key + head * D, at, start, pooled_keys + pooled, of_keys, head % K,
        is_due, D, BLOCK, ROWS, WIDTH,
    )  # fmt: skip
    if pooled_values is not None:
        _keep(
            values + into, new_value + head * D, at, start, pooled_values + pooled, of_values,
            head % K, is_due, D, BLOCK, ROWS, WIDTH,
        )  # fmt: skip
    else:
        column = tl.arange(0, WIDTH)
        value = tl.load(new_value + head * D + column, mask=column < D, other=0.0)
        tl.store(values + into + at * D + column, value, mask=column < D)


@triton.jit
def _keep(
    rows, new, at, start, pooled, weights, head, is_due,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the new row; if due, pool it with the rows before, the only ones read back."""
    column, row = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    is_column = column < D
    latest = tl.load(new + column, mask=is_column, other=0.0)
    tl.store(rows + at * D + column, latest, mask=is_column)
    if is_due:
        is_before = row < BLOCK - 1
        if weights is not None:
            share = tl.load(weights + head * BLOCK + row, mask=row < BLOCK, other=0.0)
            share = share.to(tl.float32)
        else:
            share = tl.where(row < BLOCK, 1.0 / BLOCK, 0.0)
        last = tl.sum(tl.where(row == BLOCK - 1, share, 0.0), axis=0)
        before = tl.load(
            rows + (start + row)[:, None] * D + column[None, :],
            mask=is_before[:, None] & is_column[None, :],
            other=0.0,
        ).to(tl.float32)
        total = tl.sum(before * share[:, None], axis=0) + latest.to(tl.float32) * last
        tl.store(pooled + column, total.to(latest.dtype), mask=is_column)


@triton.jit(do_not_specialize=["N", "T", "C"])
def _split_kernel(
    parts, peaks, sums, query, keys, values, pooled_keys, pooled_values, blocks, position, N, T, C,
    scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, SELECTED: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, TILE_QUERIES: tl.constexpr, SPAN: tl.constexpr,
    POOL_BLOCK: tl.constexpr, POOL_STRIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute one part of one branch's list for all query heads of a key-value head."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = H // K
    COMPRESSED: tl.constexpr = SPLITS - SELECTED - WINDOW
    AHEAD: tl.constexpr = COMPRESSED * TILE if COMPRESSED > 0 else TILE
    head, part = tl.program_id(0), tl.program_id(1)
    b, k = head // K, head % K
    at = tl.load(position + b).to(tl.int32)
    row, column, step = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    is_query, is_column = row < GROUP, column < D
    of_query = query + (b * H + k * GROUP + row)[:, None] * D + column[None, :]
    Q = tl.load(of_query, mask=is_query[:, None] & is_column[None, :], other=0.0)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    of_head = head.to(tl.int64) * N * D
    keys, values, seen, tiles = keys + of_head, values + of_head, 0, 1
    if part < SELECTED:
        ordinal = part * TILE + step
        slot = ordinal // BLOCK
        of_tile = (head * T + at // TILE_QUERIES).to(tl.int64) * NUM_BLOCKS
        block = tl.load(blocks + of_tile + slot, mask=slot < NUM_BLOCKS, other=-1)
        place = block * BLOCK + ordinal % BLOCK
        is_read = (block >= 0) & (place <= at)
    elif part < SELECTED + WINDOW:
        back = (part - SELECTED) * TILE + step
        place = at - back
        is_read = (back < SPAN) & (place >= 0)
    else:
        place = (part - SELECTED - WINDOW) * TILE + step
        seen = tl.maximum(at + 1 - POOL_BLOCK + POOL_STRIDE, 0) // POOL_STRIDE
        tiles = tl.cdiv(tl.maximum(seen - (part - SELECTED - WINDOW) * TILE, 0), AHEAD)
        is_read = place < seen
        if COMPRESSED > 0:
            of_head = head.to(tl.int64) * C * D
            keys, values = pooled_keys + of_head, pooled_values + of_head
    while tiles > 0:
        places = place[:, None] * D + column[None, :]
        is_there = is_read[:, None] & is_column[None, :]
        key = tl.load(keys + places, mask=is_there, other=0.0)
        value = tl.load(values + places, mask=is_there, other=0.0)
        score = tl.where(is_read[None, :], _scores(Q, key) * scale, float("-inf"))
        most = tl.maximum(peak, tl.max(score, axis=1))
        old, mass = tl.exp(peak - most), tl.exp(score - most[:, None])
        out = add_product(out * old[:, None], mass, value)
        total = total * old + tl.sum(mass, axis=1)
        peak = most
        place += AHEAD
        is_read = place < seen
        tiles -= 1
    place = (b * H + k * GROUP + row) * SPLITS + part
    tl.store(peaks + place, peak, mask=is_query)
    tl.store(sums + place, total, mask=is_query)
    places = place[:, None] * D + column[None, :]
    tl.store(parts + places, out, mask=is_query[:, None] & is_column[None, :])


@triton.jit
def _scores(Q, key):
    if key.dtype == tl.float32:
        return tl.dot(Q, tl.trans(key), input_precision="tf32x3")
    else:
        return tl.dot(Q, tl.trans(key))


@triton.jit
def _merge_kernel(
    out, parts, peaks, sums, gates,
    D: tl.constexpr, WIDTH: tl.constexpr, SELECTED: tl.constexpr, WINDOW: tl.constexpr,
    COMPRESSED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query head."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    SPLITS: tl.constexpr = SELECTED + WINDOW + COMPRESSED
    parts, peaks, sums = parts + head * SPLITS * D, peaks + head * SPLITS, sums + head * SPLITS
    y = _merged(parts, peaks, sums, 0, SELECTED, D, WIDTH)
    if gates is not None:
        y *= tl.load(gates + head * 3 + 1).to(tl.float32)
        window = _merged(parts, peaks, sums, SELECTED, WINDOW, D, WIDTH)
        y += window * tl.load(gates + head * 3 + 2).to(tl.float32)
        if COMPRESSED > 0:
            pooled = _merged(parts, peaks, sums, SELECTED + WINDOW, COMPRESSED, D, WIDTH)
            y += pooled * tl.load(gates + head * 3).to(tl.float32)
    column = tl.arange(0, WIDTH)
    tl.store(out + head * D + column, y.to(out.dtype.element_ty), mask=column < D)


@triton.jit
def _merged(parts, peaks, sums, first, COUNT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Merge one branch's parts into one softmax, `(WIDTH,)`; zeros if there are no keys."""
    part, column = first + tl.arange(0, triton.next_power_of_2(COUNT)), tl.arange(0, WIDTH)
    is_part = part < first + COUNT
    peak = tl.load(peaks + part, mask=is_part, other=LOWEST)
    weight = tl.exp(peak - tl.max(peak, axis=0))
    total = tl.sum(weight * tl.load(sums + part, mask=is_part, other=0.0), axis=0)
    is_there = is_part[:, None] & (column < D)[None, :]
    found = tl.load(parts + part[:, None] * D + column[None, :], mask=is_there, other=0.0)
    return tl.sum(found * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
