"""One sweep over the columns of a weight: each takes its nearest levels, knowing all the others.

Feedback (GPTQ, arXiv:2210.17323) and coordinate descent are the same sweep. Column i aims at
`w_i + sum_j A_ij r_j`, where `r = w - q` is the residual of the columns as they stand, rounds that
aim, and leaves a residual of its own. What differs is the coupling `A`, zero on its diagonal: the
unit triangular factor of `H`, or `H` over its diagonal.

Weights lie transposed, so that a column of all rows is contiguous. Columns go in blocks: one matmul
brings the residuals of all columns into a block's targets, inside it changes are passed on.

Shapes: I in_features, O rows of all weights that share the inputs, G scale rows, C codebook
entries, B columns of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qat.quant.weight import round_as_stored

OUTER = 256
INNER = 32


@dataclass
class Columns:
    """Weights in the middle of being quantized, transposed; a sweep changes all but `weight`."""

    weight: Tensor
    """`(I, O)` float32."""
    residual: Tensor
    """`(I, O)`: the weight less its quantized value."""
    chosen: Tensor
    """`(I, O)`: the codebook value that each weight takes."""
    scales: Tensor
    """`(G, O)`: G divides I, and the first I / G columns use the first row."""
    levels: Tensor
    """`(C, O)`, ascending: the codebook of each row."""
    scale_bits: int = 16
    """Bits that a checkpoint stores a group scale in."""

    @property
    def group_size(self) -> int:
        """Columns that share a row of `scales`."""
        return self.weight.shape[0] // self.scales.shape[0]


def settle_columns(columns: Columns, target: Tensor, coupling: Tensor) -> None:
    """Give each column of a block its nearest levels, one after the other.

    Column i takes the level whose product with the scale is nearest to `target[i]`, and the change
    of its residual moves the targets of the columns behind it by `coupling[:, i]`. Writes
    `columns.residual` and `columns.chosen`; `target` is used up.

    Args:
        columns: the B columns alone; `scales` has a row for each or one for all.
        target: `(B, O)`, what the columns aim at as they stand.
        coupling: `(B, B)`; only what lies below the diagonal is read.
    """
    scales = columns.scales.expand_as(target)
    inverse = torch.where(columns.scales == 0, 0.0, 1 / columns.scales).expand_as(target)
    lowest = columns.levels[0]
    middles = ((columns.levels[1:] + columns.levels[:-1]) / 2).unbind()
    steps = columns.levels.diff(dim=0).unbind()
    scaled, is_above, change = (torch.empty_like(lowest) for _ in range(3))
    rows = (target, columns.weight, columns.residual, columns.chosen, scales, inverse)
    for i, (t, w, r, z, s, per_s) in enumerate(zip(*(row.unbind() for row in rows), strict=True)):
        torch.mul(t, per_s, out=scaled)
        z.copy_(lowest)
        for middle, step in zip(middles, steps, strict=True):
            torch.gt(scaled, middle, out=is_above)
            z.addcmul_(is_above, step)
        torch.addcmul(w, z, s, value=-1, out=scaled)
        torch.sub(scaled, r, out=change)
        r.copy_(scaled)
        if i + 1 < len(target):
            target[i + 1 :].addr_(coupling[i + 1 :, i], change)


def refit_scale(columns: Columns, target: Tensor, coupling: Tensor, diagonal: Tensor) -> None:
    """The best scale of each row for the B columns of one group, all else as it stands.

    With `z` the chosen levels and `H r` the pull of all residuals on the group, the output error is
    least at `s + z^T (H r) / (z^T H z)`, rounded as a checkpoint stores it. A scale that would not
    be positive stays. Writes `columns.scales`, `columns.residual` and `target`.

    Args:
        columns: the group's columns; `scales` is `(1, O)`.
        target: `(B, O)`, with the coupling of coordinate descent.
        coupling: `(B, B)`, `H` of the group over its diagonal, zero on the diagonal.
        diagonal: `(B,)`, the diagonal of `H`.
    """
    z, old = columns.chosen, columns.scales
    weighted = z * diagonal[:, None]
    # a target less the value it has now is the pull on it, H r, over the diagonal
    pull = torch.addcmul(target, z, old, value=-1).mul_(weighted).sum(0, keepdim=True)
    curvature = torch.addmm(z, coupling, z).mul_(weighted).sum(0, keepdim=True)
    wished = round_as_stored("scales", old + pull / curvature, columns.scale_bits)
    is_better = (curvature > 0) & (wished > 0) & wished.isfinite()
    new = torch.where(is_better, wished, old)
    step = z * (old - new)
    columns.residual += step
    target.addmm_(coupling, step)
    columns.scales.copy_(new)


class ColumnOps(NamedTuple):
    """Who does the two steps inside a block: the functions above, or a device's kernels."""

    settle: Callable[[Columns, Tensor, Tensor], None] = settle_columns
    refit: Callable[[Columns, Tensor, Tensor, Tensor], None] = refit_scale


REFERENCE = ColumnOps()


def feedback_sweep(columns: Columns, coupling: Tensor, ops: ColumnOps) -> None:
    """Quantize the columns in order, each error paid back by those behind it.

    `coupling` `(I, I)` is strictly lower triangular; what was chosen before does not matter.
    """
    columns.residual.zero_()
    for start, end in _spans(len(coupling), OUTER):
        block = _part(columns, start, end)
        target = torch.addmm(block.weight, coupling[start:end, :start], columns.residual[:start])
        inside = coupling[start:end, start:end]
        for a, b in _spans(end - start, INNER):
            _settle_piece(block, target, inside, (a, b), ops=ops)


def descent_sweep(
    columns: Columns, coupling: Tensor, diagonal: Tensor, *, moves_scales: bool, ops: ColumnOps
) -> None:
    """Move each column, and each group's scale before its columns, to its best in turn.

    The output error `tr(R^T H R)` never rises (but for the rounding of the arithmetic).

    Args:
        columns: changed in place.
        coupling: `(I, I)`, `H` over its diagonal, zero on the diagonal.
        diagonal: `(I,)`, that of `H`.
        moves_scales: whether the scales are of groups and may move.
        ops: the steps inside a block.
    """
    size = columns.group_size if moves_scales else INNER
    for start, end in _spans(len(coupling), size * max(1, OUTER // size)):
        block = _part(columns, start, end)
        target = torch.addmm(block.weight, coupling[start:end], columns.residual)
        inside, inside_diagonal = coupling[start:end, start:end], diagonal[start:end]
        for a, b in _spans(end - start, size):
            before = block.residual[a:b].clone()
            own = inside[a:b, a:b]
            if moves_scales:
                ops.refit(_part(block, a, b), target[a:b], own, inside_diagonal[a:b])
            group = _part(block, a, b)
            for span in _spans(b - a, INNER):
                _settle_piece(group, target[a:b], own, span, ops=ops)
            if b < end - start:
                target[b:].addmm_(inside[b:, a:b], group.residual - before)


def _settle_piece(
    block: Columns, target: Tensor, coupling: Tensor, span: tuple[int, int], *, ops: ColumnOps
) -> None:
    """Settle the columns `span` of a block and tell those behind them."""
    a, b = span
    before = block.residual[a:b].clone() if b < len(target) else None
    piece = _part(block, a, b)
    ops.settle(piece, target[a:b], coupling[a:b, a:b])
    if before is not None:
        target[b:].addmm_(coupling[b:, a:b], piece.residual - before)


def _part(columns: Columns, start: int, end: int) -> Columns:
    """Columns `start` to `end` as views: of whole groups, of a part of one, or of single ones."""
    size = columns.group_size
    return Columns(
        columns.weight[start:end],
        columns.residual[start:end],
        columns.chosen[start:end],
        columns.scales[start // size : -(-end // size)],
        columns.levels,
        columns.scale_bits,
    )


def _spans(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]
