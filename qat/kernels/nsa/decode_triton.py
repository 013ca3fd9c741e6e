"""The Triton side of `qat.kernels.nsa.decode`: three launches a position.

The first keeps the new key and value and pools what they complete. The second splits the lists of
all branches over programs, each of which reads `TILE` keys for the query heads of one key-value
head; the third makes their softmaxes one for each branch and adds the branches up.
"""

import torch
from torch import Tensor

from qat.kernels.decode_attention import LEAST, add_product
from qat.kernels.dispatch import gdc_launch_dependents, gdc_wait, tl, triton
from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.decode import Kept
from qat.kernels.overlap import overlaps

TILE = 64
"""Keys that a program reads at a time."""
MOST_PARTS = 64
"""Programs at most that share one head's pooled keys; with more of these each reads several tiles,
so that there is not ever more to add up."""
LOWEST = tl.constexpr(-1e30)
"""Peak of a softmax over no keys: finite, so that differences are."""


def _append_by_kernel(
    kept: Kept,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    *,
    config: NSAConfig,
    weights: tuple[Tensor, Tensor] | None,
) -> None:
    """See `qat.kernels.nsa.decode.append`."""
    B, K, N, D = kept.keys.shape
    of_keys, of_values = weights or (None, None)
    _append_kernel[(B * K,)](
        kept.keys,
        kept.values,
        kept.pooled_keys,
        kept.pooled_values,
        key.contiguous(),
        value.contiguous(),
        position,
        of_keys,
        of_values,
        N,
        kept.pooled_keys.shape[2],
        K=K,
        D=D,
        BLOCK=config.compress_block,
        STRIDE=config.compress_stride,
        ROWS=triton.next_power_of_2(config.compress_block),
        WIDTH=triton.next_power_of_2(D),
        **_launch(key),
    )


def _attend_by_kernel(
    query: Tensor,
    kept: Kept,
    position: Tensor,
    *,
    gates: Tensor | None,
    config: NSAConfig,
    scale: float,
) -> Tensor:
    """See `qat.kernels.nsa.decode.attend`."""
    (B, H, D), (K, N) = query.shape, kept.keys.shape[1:3]
    T, C = kept.blocks.shape[2], kept.pooled_keys.shape[2]
    selected, window, compressed = _programs(config, C)
    splits = selected + window + compressed
    new = {"dtype": torch.float32, "device": query.device}
    parts = torch.empty(B * H, splits, D, **new)
    peaks, sums = torch.empty(2, B * H, splits, **new)
    _split_kernel[(B * K, splits)](
        parts,
        peaks,
        sums,
        query.contiguous(),
        kept.keys,
        kept.values,
        kept.pooled_keys,
        kept.pooled_values,
        kept.blocks,
        position,
        N,
        T,
        C,
        scale,
        H=H,
        K=K,
        D=D,
        ROWS=max(triton.next_power_of_2(H // K), LEAST),
        WIDTH=max(triton.next_power_of_2(D), LEAST),
        TILE=TILE,
        SELECTED=selected,
        WINDOW=window,
        SPLITS=splits,
        NUM_BLOCKS=config.num_selected,
        BLOCK=config.select_block,
        TILE_QUERIES=config.select_tile,
        SPAN=config.window,
        POOL_BLOCK=config.compress_block,
        POOL_STRIDE=config.compress_stride,
        **_launch(query),
    )
    gates = None if gates is None else gates.contiguous()
    return _added_up(query, (parts, peaks, sums), gates, (selected, window, compressed))


def _added_up(
    query: Tensor,
    found: tuple[Tensor, Tensor, Tensor],
    gates: Tensor | None,
    programs: tuple[int, int, int],
) -> Tensor:
    """One softmax a branch out of its programs' parts, peaks and sums; the branches added up."""
    B, H, D = query.shape
    out = torch.empty(B, H, D, dtype=query.dtype, device=query.device)
    selected, window, compressed = programs
    _merge_kernel[(B * H,)](
        out,
        *found,
        gates,
        D=D,
        WIDTH=triton.next_power_of_2(D),
        SELECTED=selected,
        WINDOW=window,
        COMPRESSED=compressed,
        **_launch(query),
    )
    return out


def _programs(config: NSAConfig, num_compressed: int) -> tuple[int, int, int]:
    """How many share the list of each branch: selected, window, compressed."""
    selected = triton.cdiv(config.selected_keys, TILE)
    if config.mode == "merged":
        return selected, 0, 0
    # powers of two: each other number is a kernel to compile
    compressed = triton.next_power_of_2(max(1, triton.cdiv(num_compressed, TILE)))
    return selected, triton.cdiv(config.window, TILE), min(compressed, MOST_PARTS)


def _launch(tensor: Tensor) -> dict[str, object]:
    overlap = overlaps(tensor.device)
    return {"OVERLAP": overlap, "num_warps": 4, **({"launch_pdl": True} if overlap else {})}


@triton.jit(do_not_specialize=["N", "C"])
def _append_kernel(
    keys,
    values,
    pooled_keys,
    pooled_values,
    new_key,
    new_value,
    position,
    of_keys,
    of_values,
    N,
    C,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row's key-value head."""
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
    rows,
    new,
    at,
    start,
    pooled,
    weights,
    head,
    is_due,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the new row; where due, pool it with those before it, which alone are read back."""
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
    parts,
    peaks,
    sums,
    query,
    keys,
    values,
    pooled_keys,
    pooled_values,
    blocks,
    position,
    N,
    T,
    C,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SELECTED: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    SPAN: tl.constexpr,
    POOL_BLOCK: tl.constexpr,
    POOL_STRIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One part of one branch's list, for all query heads of a key-value head."""
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
    out,
    parts,
    peaks,
    sums,
    gates,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SELECTED: tl.constexpr,
    WINDOW: tl.constexpr,
    COMPRESSED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One query head."""
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
    """`(WIDTH,)`: one branch's parts as one softmax; zeros of no keys."""
    part, column = first + tl.arange(0, triton.next_power_of_2(COUNT)), tl.arange(0, WIDTH)
    is_part = part < first + COUNT
    peak = tl.load(peaks + part, mask=is_part, other=LOWEST)
    weight = tl.exp(peak - tl.max(peak, axis=0))
    total = tl.sum(weight * tl.load(sums + part, mask=is_part, other=0.0), axis=0)
    is_there = is_part[:, None] & (column < D)[None, :]
    found = tl.load(parts + part[:, None] * D + column[None, :], mask=is_there, other=0.0)
    return tl.sum(found * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
