"""Column sweep: settle columns, refit scales and find codewords, in Triton or by the reference.

A Triton program owns a tile of rows, `(B, T)` since the weights are transposed, holds all columns
of the block in registers and iterates over them there; the references in `quant.error_feedback`
take about ten operations per column. Compiled for Hopper, a vector of 4 with 256 codewords takes
1,500 instructions, half of them in the loop over codewords.

Shapes: B columns of the block, O rows, C codebook entries, T rows of a tile, d weights of a vector.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from qat.backend.base import GIB
from qat.backend.device import on
from qat.kernels.dispatch import tl, triton, use_triton
from qat.kernels.lut_tiles import as_stored
from qat.quant import error_feedback as reference
from qat.quant import vectors
from qat.quant.error_feedback import ColumnOps, Columns
from qat.quant.weight import index_dtype

MOST_COLUMNS = 128
"""The most columns per block; a program holds them in registers."""
MOST_LEVELS = 16
"""The most levels that a kernel supports; it compares with them one by one."""
TILE_WEIGHTS = 2048
"""Weights per program: 16 per thread for each tensor that it keeps."""
VECTOR_ROWS = 8
"""Rows per program (one warp) that settles vectors; each lane searches a share of the codewords for
all rows. With more warps, one could read a residual that another has already overwritten."""
VECTORS = 32
"""Vectors per program that only searches."""
CODEWORDS = 32
"""Codewords compared at a time, one per lane."""
WARPS = 4
HELD_SHARE = 0.1
"""The most of a device's memory that recorded sweeps keep for their tensors."""
LARGEST = tl.constexpr(65504.0)
"""The largest float16; a scale half a unit in the last place above it rounds to infinity."""


def settle_columns(columns: Columns, target: Tensor, coupling: Tensor) -> None:
    """Quantize columns one after another, as `quant.error_feedback.settle_columns` defines it.

    A kernel leaves `target` unchanged.
    """
    if not (use_triton(target, __name__) and _are_few(columns) and len(target) <= MOST_COLUMNS):
        reference.settle_columns(columns, target, coupling)
        return
    indices, (B, O) = columns.indices, target.shape
    if indices is None:
        b, tile = _tile(B)
        scales = columns.scales.expand(B, O)
        _settle_kernel[(triton.cdiv(O, tile),)](
            target, columns.weight, columns.residual, columns.chosen, scales, columns.levels,
            coupling, O, target.stride(0), columns.weight.stride(0), columns.residual.stride(0),
            columns.chosen.stride(0), scales.stride(0), columns.levels.stride(0),
            coupling.stride(0),
            C=len(columns.levels), B=B, BLOCK=b, TILE=tile, num_warps=WARPS,
        )  # fmt: skip
        return
    (C, d), metric = columns.levels.shape, cast(Tensor, columns.metric)
    _settle_vectors_kernel[(triton.cdiv(O, VECTOR_ROWS),)](
        target, columns.weight, columns.residual, columns.chosen, columns.scales, columns.levels,
        indices, metric, coupling, O, target.stride(0), columns.weight.stride(0),
        columns.residual.stride(0), columns.chosen.stride(0), columns.scales.stride(0),
        indices.stride(0), coupling.stride(0), columns.group_size,
        SHARED=columns.group_size >= d, C=C, E=d, CHUNK=min(C, CODEWORDS), B=B,
        BLOCK=triton.next_power_of_2(B), TILE=VECTOR_ROWS, num_warps=1,
    )  # fmt: skip


def refit_scale(columns: Columns, target: Tensor, coupling: Tensor, metric: Tensor) -> None:
    """Refit the scales, as `quant.error_feedback.refit_scale` defines it."""
    if not (use_triton(target, __name__) and len(target) <= MOST_COLUMNS):
        reference.refit_scale(columns, target, coupling, metric)
        return
    B, O = target.shape
    b, tile = _tile(B)
    _refit_kernel[(triton.cdiv(O, tile),)](
        target, columns.residual, columns.chosen, columns.scales, coupling, metric, O,
        target.stride(0), columns.residual.stride(0), columns.chosen.stride(0), coupling.stride(0),
        metric.stride(0),
        SCALE_BITS=columns.scale_bits, E=1 if metric.dim() == 1 else metric.shape[1], B=B,
        BLOCK=b, TILE=tile, num_warps=WARPS,
    )  # fmt: skip


def nearest_vectors(weight: Tensor, S: Tensor, codebook: Tensor, importance: Tensor) -> Tensor:
    """Return codewords of vectors, `(O, I / d)`; see `quant.vectors.nearest_vectors`."""
    if not use_triton(weight, __name__):
        return vectors.nearest_vectors(weight, S, codebook, importance)
    (O, I), (C, d) = weight.shape, codebook.shape
    indices = torch.empty(O, I // d, dtype=index_dtype(C), device=weight.device)
    _nearest_kernel[(triton.cdiv(indices.numel(), VECTORS),)](
        indices, weight.contiguous(), S.contiguous(), importance, codebook.contiguous(),
        indices.numel(), I, importance.stride(0), importance.stride(1),
        C=C, E=d, CHUNK=min(C, CODEWORDS), TILE=VECTORS, num_warps=WARPS,
    )  # fmt: skip
    return indices


class RecordedSweeps:
    """Runs sweeps; on a device that records work, as one graph for each shape of the weights.

    A sweep over a linear of 4,864 inputs launches some 2,000 kernels of a few microseconds each,
    which takes the host ten times as long as the device. A graph keeps its tensors, so that linears
    of one shape are copied into them; shapes beyond `HELD_SHARE` of the device's memory run without
    a graph.
    """

    def __init__(self) -> None:
        self._recorded: dict[object, tuple[list[Tensor], Callable[[], None]]] = {}
        self._bytes = 0

    def __call__(
        self,
        sweep: Callable[..., None],
        columns: Columns,
        *inputs: Tensor,
        times: int = 1,
        **settings: Hashable,
    ) -> None:
        """Do what `quant.error_feedback.run_sweeps` does."""
        backend = on(columns.weight.device)
        given = [*_tensors(columns).values(), *inputs]
        shapes = tuple((each.shape, each.dtype) for each in given)
        key = sweep, shapes, columns.scale_bits, tuple(settings.items())
        if key in self._recorded:
            held, replay = self._recorded[key]
            for own, new in zip(held, given, strict=True):
                own.copy_(new)
        else:
            needed = sum(each.numel() * each.itemsize for each in given)
            most = HELD_SHARE * GIB * (backend.memory_gib() or 0.0)
            # without a kernel a sweep is millions of operations: too many for a graph
            if not backend.records or not _are_few(columns) or self._bytes + needed > most:
                reference.run_sweeps(sweep, columns, *inputs, times=times, **settings)
                return
            copies = {name: each.clone() for name, each in _tensors(columns).items()}
            own, others = replace(columns, **copies), [each.clone() for each in inputs]
            run = partial(sweep, own, *others, **settings)
            # the first sweep compiles kernels for the strides of these tensors, which would break
            # off a capture
            run()
            times -= 1
            replay, _ = backend.record(run)
            held = [*_tensors(own).values(), *others]
            self._recorded[key], self._bytes = (held, replay), self._bytes + needed
        for _ in range(times):
            replay()
        for new, own in zip(_tensors(columns).values(), held, strict=False):
            new.copy_(own)


def _are_few(columns: Columns) -> bool:
    """Return whether a kernel settles the columns: vectors, or at most `MOST_LEVELS` levels."""
    return columns.indices is not None or len(columns.levels) <= MOST_LEVELS


def _tensors(columns: Columns) -> dict[str, Tensor]:
    return {name: each for name, each in vars(columns).items() if isinstance(each, Tensor)}


COLUMN_OPS = ColumnOps(settle_columns, refit_scale, nearest_vectors)


def _tile(num_columns: int) -> tuple[int, int]:
    """Return the columns and rows of a program's tile."""
    block = triton.next_power_of_2(num_columns)
    # at least a warp's 32 lanes are contiguous in memory
    return block, min(max(TILE_WEIGHTS // block, 32), 128)


@triton.jit
def _settle_kernel(
    target_ptr, weight_ptr, residual_ptr, chosen_ptr, scales_ptr, levels_ptr, coupling_ptr, O,
    target_stride, weight_stride, residual_stride, chosen_stride, scales_stride, levels_stride,
    coupling_stride,
    C: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_row = rows < O
    block = tl.arange(0, BLOCK)
    is_inside = (block < B)[:, None] & is_row[None, :]
    target = tl.load(
        target_ptr + block[:, None] * target_stride + rows[None, :], mask=is_inside, other=0.0
    )
    for i in range(B):  # in order: a column's residual moves later columns
        # row i of a tile in registers, `(T,)`: exact, since every other term is zero
        aim = tl.sum(tl.where(block[:, None] == i, target, 0.0), axis=0)
        weight = tl.load(weight_ptr + i * weight_stride + rows, mask=is_row, other=0.0)
        residual = tl.load(residual_ptr + i * residual_stride + rows, mask=is_row, other=0.0)
        scale = tl.load(scales_ptr + i * scales_stride + rows, mask=is_row, other=1.0)
        scaled = tl.where(scale == 0.0, 0.0, aim / tl.where(scale == 0.0, 1.0, scale))
        level = tl.load(levels_ptr + rows, mask=is_row, other=0.0)
        chosen = level
        # levels ascend, so the last midpoint below the value decides; ties keep the lower level
        for c in tl.static_range(1, C):
            above = tl.load(levels_ptr + c * levels_stride + rows, mask=is_row, other=0.0)
            chosen = tl.where(scaled > (level + above) * 0.5, above, chosen)
            level = above
        new = weight - chosen * scale
        # several warps may hold the same row: all must read its residual before one writes it
        tl.debug_barrier()
        tl.store(residual_ptr + i * residual_stride + rows, new, mask=is_row)
        tl.store(chosen_ptr + i * chosen_stride + rows, chosen, mask=is_row)
        # columns up to i are already settled: what is added to them has no effect
        passed_on = tl.load(coupling_ptr + block * coupling_stride + i, mask=block < B, other=0.0)
        target += passed_on[:, None] * (new - residual)[None, :]


# one kernel for both sweeps: in feedback each vector has a scale of its own, in descent a group
@triton.jit(do_not_specialize=["group"])
def _settle_vectors_kernel(
    target_ptr, weight_ptr, residual_ptr, chosen_ptr, scales_ptr, codebook_ptr, indices_ptr,
    metric_ptr, coupling_ptr, O, target_stride, weight_stride, residual_stride, chosen_stride,
    scales_stride, indices_stride, coupling_stride, group,
    SHARED: tl.constexpr, C: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, B: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_row = rows < O
    block = tl.arange(0, BLOCK)
    is_inside = (block < B)[:, None] & is_row[None, :]
    target = tl.load(
        target_ptr + block[:, None] * target_stride + rows[None, :], mask=is_inside, other=0.0
    )
    for first in range(0, B, E):
        metric = metric_ptr + first * E
        S, pulls = _pulls(
            target, block, metric, scales_ptr + rows, is_row, first, scales_stride, group, SHARED, E
        )
        index = _best_codewords(codebook_ptr, metric, S, pulls, SHARED, C, E, CHUNK, TILE)
        place = indices_ptr + first // E * indices_stride + rows
        tl.store(place, index.to(indices_ptr.dtype.element_ty), mask=is_row)
        for k in tl.static_range(E):
            i = first + k
            chosen = tl.load(codebook_ptr + index * E + k)
            weight = tl.load(weight_ptr + i * weight_stride + rows, mask=is_row, other=0.0)
            residual = tl.load(residual_ptr + i * residual_stride + rows, mask=is_row, other=0.0)
            new = weight - chosen * S[k]
            tl.store(residual_ptr + i * residual_stride + rows, new, mask=is_row)
            tl.store(chosen_ptr + i * chosen_stride + rows, chosen, mask=is_row)
            # columns up to i are already settled: what is added to them has no effect
            passed_on = tl.load(coupling_ptr + block * coupling_stride + i, mask=block < B, other=0)
            target += passed_on[:, None] * (new - residual)[None, :]


@triton.jit
def _pulls(
    target, block, metric_ptr, scales_ptr, is_row, first, scales_stride, group,
    SHARED: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Return scales of a vector's columns, and its target times its metric, tuples of d `(T,)`."""
    S, pulls = (), ()
    for k in tl.static_range(E):
        row = first // group if SHARED else (first + k) // group
        S = S + (tl.load(scales_ptr + row * scales_stride, mask=is_row, other=1.0),)
        # the metric is symmetric, so a row is read in place of a column
        is_own = (block >= first) & (block < first + E)
        own = tl.load(metric_ptr + k * E + block - first, mask=is_own, other=0.0)
        pulls = pulls + (tl.sum(own[:, None] * target, axis=0),)
    return S, pulls


@triton.jit
def _best_codewords(
    codebook_ptr, metric_ptr, S, pulls,
    SHARED: tl.constexpr, C: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the c of largest `(S G t) . c - (S c)^T G (S c) / 2`, `(T,)`; ties: the lowest.

    If the vector's columns share a scale, all is divided by S: `c^T G c` is then one number per
    codeword.
    """
    best = tl.full((TILE, CHUNK), -float("inf"), tl.float32)
    word = tl.zeros((TILE, CHUNK), tl.int32)
    for start in range(0, C, CHUNK):
        words = start + tl.arange(0, CHUNK)
        energy = tl.zeros((1, CHUNK) if SHARED else (TILE, CHUNK), tl.float32)
        scores = tl.zeros((TILE, CHUNK), tl.float32)
        scaled = ()
        for k in tl.static_range(E):
            code = tl.load(codebook_ptr + words * E + k)[None, :]
            scaled = scaled + (code if SHARED else code * S[k][:, None],)
            scores += pulls[k][:, None] * scaled[k]
        for k in tl.static_range(E):
            felt = scaled[k] * tl.load(metric_ptr + k * E + k)
            for j in tl.static_range(k):
                felt += scaled[j] * (2.0 * tl.load(metric_ptr + k * E + j))
            energy += scaled[k] * felt
        scores -= energy * (S[0][:, None] * 0.5 if SHARED else 0.5)
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        word = tl.where(is_better, words[None, :], word)
    return _lowest_best(best, word, C)


@triton.jit
def _lowest_best(best, word, C: tl.constexpr):
    """Return the lowest word with the best score of each row, `(T,)`."""
    top = tl.max(best, axis=1)
    return tl.min(tl.where(best == top[:, None], word, C), axis=1)


@triton.jit
def _nearest_kernel(
    indices_ptr, weight_ptr, S_ptr, importance_ptr, codebook_ptr, num_vectors, in_features,
    importance_row, importance_column,
    C: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the c of largest `(h S w) . c - (h S^2) . c^2 / 2` for each vector."""
    vector = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_vector = vector < num_vectors
    first = vector.to(tl.int64) * E
    in_row = in_features // E
    importance_at = importance_ptr + (vector // in_row).to(tl.int64) * importance_row
    column = vector % in_row * E
    pulls, halves = (), ()
    for k in tl.static_range(E):
        w = tl.load(weight_ptr + first + k, mask=is_vector, other=0.0)
        S = tl.load(S_ptr + first + k, mask=is_vector, other=0.0)
        h = tl.load(importance_at + (column + k) * importance_column, mask=is_vector, other=0.0)
        pulls, halves = pulls + (h * S * w,), halves + (h * S * S * 0.5,)
    best = tl.full((TILE, CHUNK), -float("inf"), tl.float32)
    word = tl.zeros((TILE, CHUNK), tl.int32)
    for start in range(0, C, CHUNK):
        words = start + tl.arange(0, CHUNK)
        scores = tl.zeros((TILE, CHUNK), tl.float32)
        for k in tl.static_range(E):
            code = tl.load(codebook_ptr + words * E + k)[None, :]
            scores += pulls[k][:, None] * code
            scores -= halves[k][:, None] * (code * code)
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        word = tl.where(is_better, words[None, :], word)
    index = _lowest_best(best, word, C)
    tl.store(indices_ptr + vector, index.to(indices_ptr.dtype.element_ty), mask=is_vector)


@triton.jit
def _refit_kernel(
    target_ptr, residual_ptr, chosen_ptr, scales_ptr, coupling_ptr, metric_ptr, O, target_stride,
    residual_stride, chosen_stride, coupling_stride, metric_stride,
    SCALE_BITS: tl.constexpr, E: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_row = rows < O
    block = tl.arange(0, BLOCK)
    is_inside = (block < B)[:, None] & is_row[None, :]
    target_at = target_ptr + block[:, None] * target_stride + rows[None, :]
    residual_at = residual_ptr + block[:, None] * residual_stride + rows[None, :]
    target = tl.load(target_at, mask=is_inside, other=0.0)
    chosen = tl.load(
        chosen_ptr + block[:, None] * chosen_stride + rows[None, :], mask=is_inside, other=0.0
    )
    old = tl.load(scales_ptr + rows, mask=is_row, other=1.0)
    coupled = tl.zeros((BLOCK, TILE), dtype=tl.float32)
    for i in range(B):
        row = tl.load(chosen_ptr + i * chosen_stride + rows, mask=is_row, other=0.0)
        column = tl.load(coupling_ptr + block * coupling_stride + i, mask=block < B, other=0.0)
        coupled += column[:, None] * row[None, :]
    weighted = tl.zeros((BLOCK, TILE), dtype=tl.float32)
    for k in tl.static_range(E):  # column k of each vector, times the vector's metric
        row_of = chosen_ptr + (block // E * E + k)[:, None] * chosen_stride + rows[None, :]
        metric = tl.load(metric_ptr + block * metric_stride + k, mask=block < B, other=0.0)
        weighted += metric[:, None] * tl.load(row_of, mask=is_inside, other=0.0)
    pull = tl.sum(weighted * (target - chosen * old[None, :]), axis=0)
    curvature = tl.sum(weighted * (chosen + coupled), axis=0)
    wished = old + pull / tl.where(curvature > 0, curvature, 1.0)
    # keep the old scale if the new one would round to infinity; the clamp keeps the cast defined
    stored = as_stored(tl.minimum(tl.maximum(wished, 0.0), LARGEST), SCALE_BITS)
    is_better = (curvature > 0) & (stored > 0) & (wished < LARGEST + 16)
    new = tl.where(is_better, stored, old)
    step = old - new
    residual = tl.load(residual_at, mask=is_inside, other=0.0)
    tl.store(residual_at, residual + chosen * step[None, :], mask=is_inside)
    tl.store(target_at, target + coupled * step[None, :], mask=is_inside)
    tl.store(scales_ptr + rows, new, mask=is_row)
