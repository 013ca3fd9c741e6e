"""The two steps inside a block of a column sweep, by whoever does them fastest.

A Triton program owns a tile of rows (contiguous, the weights lie transposed), holds all columns of
the block in registers and walks them there; the references in `quant.error_feedback` take some ten
operations a column. Row i of a tile in registers is read as a masked sum: exact, every other term
being zero.

Shapes: B columns of the block, O rows, C codebook entries, T rows of a tile.
"""

from torch import Tensor

from qat.kernels.dispatch import tl, triton, use_triton
from qat.kernels.lut_tiles import as_stored
from qat.quant import error_feedback as reference
from qat.quant.error_feedback import ColumnOps, Columns

MOST_COLUMNS = 128
"""Columns of a block that registers hold."""
MOST_LEVELS = 16
"""Levels that a kernel compares with one by one."""
TILE_WEIGHTS = 2048
"""Weights of a program, 16 a thread for each tensor that it keeps."""
WARPS = 4
LARGEST = tl.constexpr(65504.0)
"""The largest float16: half its last place further, and a scale rounds to infinity."""


def settle_columns(columns: Columns, target: Tensor, coupling: Tensor) -> None:
    """Quantize columns one after the other, as `quant.error_feedback.settle_columns` defines it."""
    is_small = len(target) <= MOST_COLUMNS and len(columns.levels) <= MOST_LEVELS
    if use_triton(target) and is_small:
        settle_columns_by_kernel(columns, target, coupling)
    else:
        reference.settle_columns(columns, target, coupling)


def refit_scale(columns: Columns, target: Tensor, coupling: Tensor, diagonal: Tensor) -> None:
    """Fit scales anew, as `quant.error_feedback.refit_scale` defines it."""
    if use_triton(target) and len(target) <= MOST_COLUMNS:
        refit_scale_by_kernel(columns, target, coupling, diagonal)
    else:
        reference.refit_scale(columns, target, coupling, diagonal)


COLUMN_OPS = ColumnOps(settle_columns, refit_scale)


def settle_columns_by_kernel(columns: Columns, target: Tensor, coupling: Tensor) -> None:
    """As `quant.error_feedback.settle_columns`; `target` is left as it is."""
    B, O = target.shape
    b, tile = _tile(B)
    scales = columns.scales.expand(B, O)
    _settle_kernel[(triton.cdiv(O, tile),)](
        target, columns.weight, columns.residual, columns.chosen, scales, columns.levels, coupling,
        O, target.stride(0), columns.weight.stride(0), columns.residual.stride(0),
        columns.chosen.stride(0), scales.stride(0), columns.levels.stride(0), coupling.stride(0),
        C=len(columns.levels), B=B, BLOCK=b, TILE=tile, num_warps=WARPS,
    )  # fmt: skip


def refit_scale_by_kernel(
    columns: Columns, target: Tensor, coupling: Tensor, diagonal: Tensor
) -> None:
    """Fit scales anew, as `quant.error_feedback.refit_scale` defines it."""
    B, O = target.shape
    b, tile = _tile(B)
    _refit_kernel[(triton.cdiv(O, tile),)](
        target, columns.residual, columns.chosen, columns.scales, coupling, diagonal, O,
        target.stride(0), columns.residual.stride(0), columns.chosen.stride(0), coupling.stride(0),
        diagonal.stride(0),
        SCALE_BITS=columns.scale_bits, B=B, BLOCK=b, TILE=tile, num_warps=WARPS,
    )  # fmt: skip


def _tile(num_columns: int) -> tuple[int, int]:
    """Columns and rows of a program's tile."""
    block = triton.next_power_of_2(num_columns)
    # a warp's 32 lanes at least lie side by side in memory
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
    for i in range(B):  # one after the other: what a column leaves over moves those behind it
        aim = tl.sum(tl.where(block[:, None] == i, target, 0.0), axis=0)
        weight = tl.load(weight_ptr + i * weight_stride + rows, mask=is_row, other=0.0)
        residual = tl.load(residual_ptr + i * residual_stride + rows, mask=is_row, other=0.0)
        scale = tl.load(scales_ptr + i * scales_stride + rows, mask=is_row, other=1.0)
        scaled = tl.where(scale == 0.0, 0.0, aim / tl.where(scale == 0.0, 1.0, scale))
        level = tl.load(levels_ptr + rows, mask=is_row, other=0.0)
        chosen = level
        # levels ascend, so the last middle that is passed decides; a tie stays with the lower level
        for c in tl.static_range(1, C):
            above = tl.load(levels_ptr + c * levels_stride + rows, mask=is_row, other=0.0)
            chosen = tl.where(scaled > (level + above) * 0.5, above, chosen)
            level = above
        new = weight - chosen * scale
        tl.store(residual_ptr + i * residual_stride + rows, new, mask=is_row)
        tl.store(chosen_ptr + i * chosen_stride + rows, chosen, mask=is_row)
        # columns up to i have been used: what is added to them does not matter
        passed_on = tl.load(coupling_ptr + block * coupling_stride + i, mask=block < B, other=0.0)
        target += passed_on[:, None] * (new - residual)[None, :]


@triton.jit
def _refit_kernel(
    target_ptr, residual_ptr, chosen_ptr, scales_ptr, coupling_ptr, diagonal_ptr, O, target_stride,
    residual_stride, chosen_stride, coupling_stride, diagonal_stride,
    SCALE_BITS: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
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
    diagonal = tl.load(diagonal_ptr + block * diagonal_stride, mask=block < B, other=0.0)
    coupled = tl.zeros((BLOCK, TILE), dtype=tl.float32)
    for i in range(B):
        row = tl.load(chosen_ptr + i * chosen_stride + rows, mask=is_row, other=0.0)
        column = tl.load(coupling_ptr + block * coupling_stride + i, mask=block < B, other=0.0)
        coupled += column[:, None] * row[None, :]
    weighted = chosen * diagonal[:, None]
    pull = tl.sum(weighted * (target - chosen * old[None, :]), axis=0)
    curvature = tl.sum(weighted * (chosen + coupled), axis=0)
    wished = old + pull / tl.where(curvature > 0, curvature, 1.0)
    # what would round to infinity stays; the clamp keeps the cast defined
    stored = as_stored(tl.minimum(tl.maximum(wished, 0.0), LARGEST), SCALE_BITS)
    is_better = (curvature > 0) & (stored > 0) & (wished < LARGEST + 16)
    new = tl.where(is_better, stored, old)
    step = old - new
    residual = tl.load(residual_at, mask=is_inside, other=0.0)
    tl.store(residual_at, residual + chosen * step[None, :], mask=is_inside)
    tl.store(target_at, target + coupled * step[None, :], mask=is_inside)
    tl.store(scales_ptr + rows, new, mask=is_row)
