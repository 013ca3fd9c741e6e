"""Quantize weights against their layer's inputs: later columns compensate for rounding errors.

With `H = mean(x x^T)` over the layer's inputs the layer's output error is `tr((W - W_q) H (W -
W_q)^T)`. Indices are chosen column by column in falling order of `diag(H)`, and each error is
compensated in the columns that follow (GPTQ, arXiv:2210.17323). After that the levels are solved
against `H`, and scales and indices are improved by coordinate descent, in turns (as in LNQ,
arXiv:2505.07004). Weights that share their inputs (q, k, v) are swept together, because rows are
independent.

Shapes: O rows of all weights together, I in_features, G groups per row, C codebook entries, B
columns of a block.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from qat.backend.base import side_by_side
from qat.backend.device import on
from qat.errors import ConfigError
from qat.quant.codebook import best_codewords, nearest_level
from qat.quant.fit import fit_weight, normalize, sample_rows
from qat.quant.spec import LutSpec, TableSpec
from qat.quant.vectors import (
    Nearest,
    descent_of_blocks,
    feedback_of_blocks,
    nearest_vectors,
    pulls_of_columns,
    pulls_of_groups,
    upper_factor,
)
from qat.quant.weight import (
    QuantizedWeight,
    Scales,
    above_zero,
    chosen_levels,
    dequantize,
    expand_scales,
    joined,
    round_as_stored,
    round_scales,
)

# Feedback (GPTQ) and coordinate descent are the same sweep over columns. The target of column i is
# `w_i + sum_j A_ij r_j`, where `r = w - q` is the current residual of the columns. The sweep rounds
# that target, which leaves a residual of its own. The two differ only in the coupling `A`, which is
# zero on its diagonal: the unit triangular factor of `H`, or `H` over its diagonal.
#
# Weights are transposed, so that a column of all rows is contiguous. One matmul adds the residuals
# of all columns to the targets of a block; inside it changes are propagated column by column.

OUTER = 256  # columns of a block
INNER = 32  # columns of a piece, whose changes reach the rest of the block in one matmul


@dataclass
class Columns:
    """Weights while they are quantized, transposed.

    A sweep changes `residual`, `chosen`, `indices`, and `scales` if they may move.
    """

    weight: Tensor  # the float weights, `(I, O)` float32
    residual: Tensor  # `(I, O)`: the weight minus its quantized value
    chosen: Tensor  # `(I, O)`: the codebook value that each weight takes
    scales: Tensor  # `(G, O)`: G divides I, and the first I / G columns use the first row
    levels: Tensor  # `(C, O)`: ascending, of each row; for vectors `(C, d)`, of all rows
    scale_bits: int = 16  # bits of a group scale in a checkpoint
    indices: Tensor | None = None  # `(I / d, O)`: of vectors; None for levels
    metric: Tensor | None = None
    """`(I, d)`, one square block below the other: the metric of each vector's error in a sweep;
    None for levels."""

    @property
    def group_size(self) -> int:
        """Columns that share a row of `scales`."""
        return self.weight.shape[0] // self.scales.shape[0]

    @property
    def vector_size(self) -> int:
        """Columns that one index covers."""
        return 1 if self.indices is None else self.levels.shape[1]


def settle_columns(columns: Columns, target: Tensor, coupling: Tensor) -> None:
    """Choose the nearest level for each column of a block, or a codeword for each d, in order.

    Column i takes the level whose product with the scale is nearest to `target[i]`, and the change
    of its residual moves the targets of the columns after it by `coupling[:, i]`. Writes
    `columns.residual` and `columns.chosen`; `target` is overwritten.

    Args:
        columns: the B columns alone; `scales` has one row for each or one for all.
        target: `(B, O)`, the current targets of the columns.
        coupling: `(B, B)`; only the part below the diagonal, or below its blocks, is read.
    """
    if columns.indices is not None:
        _settle_vectors(columns, target, coupling)
        return
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


def _settle_vectors(columns: Columns, target: Tensor, coupling: Tensor) -> None:
    """Do what `settle_columns` does for d columns at a time: choose each vector's best codeword."""
    codebook = columns.levels
    metric, indices = cast(Tensor, columns.metric), cast(Tensor, columns.indices)
    d = codebook.shape[1]
    scales = columns.scales.repeat_interleave(columns.group_size, dim=0)
    pulling = pulls_of_columns if columns.group_size < d else pulls_of_groups
    pulls, entries = pulling(codebook, metric.view(-1, d, d), scales)
    for start in range(0, len(target), d):
        end, block = start + d, start // d
        best = best_codewords(pulls(block, target[start:end]).T, entries[block])
        z = codebook.index_select(0, best.int()).T
        after = torch.addcmul(columns.weight[start:end], z, scales[start:end], value=-1)
        indices[block] = best
        columns.chosen[start:end] = z
        if end < len(target):
            change = after - columns.residual[start:end]
            target[end:].addmm_(coupling[end:, start:end], change)
        columns.residual[start:end] = after


def refit_scale(columns: Columns, target: Tensor, coupling: Tensor, metric: Tensor) -> None:
    """Find the best scale of each row for the B columns of one group, with all else fixed.

    With `z` the chosen levels and `H r` the pull of all residuals on the group, the output error is
    least at `s + z^T (H r) / (z^T H z)`, rounded as a checkpoint stores it. A scale that would not
    be positive is kept. Writes `columns.scales`, `columns.residual` and `target`.

    Args:
        columns: the group's columns; `scales` is `(1, O)`.
        target: `(B, O)`, with the coupling of coordinate descent.
        coupling: `(B, B)`, `H` of the group over its diagonal, zero on the diagonal; for vectors
            over its diagonal blocks.
        metric: `(B,)`, the diagonal of `H`; for vectors `(B, d)`, its blocks.
    """
    z, old = columns.chosen, columns.scales
    if metric.dim() == 1:
        weighted = z * metric[:, None]
    else:
        d, (B, O) = metric.shape[1], z.shape
        weighted = torch.bmm(metric.view(-1, d, d), z.view(-1, d, O)).view(B, O)
    # target minus current value is the pull, H r, over the diagonal
    pull = torch.addcmul(target, z, old, value=-1).mul_(weighted).sum(0, keepdim=True)
    curvature = torch.addmm(z, coupling, z).mul_(weighted).sum(0, keepdim=True)
    wished = round_as_stored("scales", old + pull / curvature, columns.scale_bits)
    is_better = (curvature > 0) & (wished > 0) & wished.isfinite()
    new = torch.where(is_better, wished, old)
    step = z * (old - new)
    columns.residual += step
    target.addmm_(coupling, step)
    columns.scales.copy_(new)


def run_sweeps(
    sweep: Callable[..., None], columns: Columns, *inputs: Tensor, times: int = 1, **settings: Any
) -> None:
    """Call `sweep(columns, *inputs, **settings)`, which changes `columns`, that many times."""
    for _ in range(times):
        sweep(columns, *inputs, **settings)


class ColumnOps(NamedTuple):
    """Inner operations of a sweep and of a fit: these functions, or kernels of a device."""

    settle: Callable[[Columns, Tensor, Tensor], None] = settle_columns
    refit: Callable[[Columns, Tensor, Tensor, Tensor], None] = refit_scale
    nearest: Nearest = nearest_vectors
    sweeps: Callable[..., None] = run_sweeps


REFERENCE = ColumnOps()


def feedback_sweep(columns: Columns, coupling: Tensor, ops: ColumnOps) -> None:
    """Quantize the columns in order; each error is compensated by the columns after it.

    `coupling` `(I, I)` is strictly lower triangular; values chosen before have no effect.
    """
    columns.residual.zero_()
    for start, end in _spans(len(coupling), OUTER):
        block = _part(columns, start, end)
        target = torch.addmm(block.weight, coupling[start:end, :start], columns.residual[:start])
        inside = coupling[start:end, start:end]
        for a, b in _spans(end - start, INNER):
            _settle_piece(block, target, inside, (a, b), ops=ops)


def descent_sweep(
    columns: Columns, coupling: Tensor, metric: Tensor, *, moves_scales: bool, ops: ColumnOps
) -> None:
    """Move each column, and each group's scale before its columns, to its best value in turn.

    The output error `tr(R^T H R)` never rises (but for rounding errors). `coupling` `(I, I)` is `H`
    over its diagonal, zero on the diagonal; `moves_scales` needs group scales. For `metric` see
    `refit_scale`.
    """
    size = columns.group_size if moves_scales else INNER
    for start, end in _spans(len(coupling), size * max(1, OUTER // size)):
        block = _part(columns, start, end)
        target = torch.addmm(block.weight, coupling[start:end], columns.residual)
        inside, inside_metric = coupling[start:end, start:end], metric[start:end]
        for a, b in _spans(end - start, size):
            before = block.residual[a:b].clone()
            own = inside[a:b, a:b]
            if moves_scales:
                ops.refit(_part(block, a, b), target[a:b], own, inside_metric[a:b])
            group = _part(block, a, b)
            for span in _spans(b - a, INNER):
                _settle_piece(group, target[a:b], own, span, ops=ops)
            if b < end - start:
                target[b:].addmm_(inside[b:, a:b], group.residual - before)


def _settle_piece(
    block: Columns, target: Tensor, coupling: Tensor, span: tuple[int, int], *, ops: ColumnOps
) -> None:
    """Settle the columns `span` of a block and update the targets of the columns after them."""
    a, b = span
    before = block.residual[a:b].clone() if b < len(target) else None
    piece = _part(block, a, b)
    ops.settle(piece, target[a:b], coupling[a:b, a:b])
    if before is not None:
        target[b:].addmm_(coupling[b:, a:b], piece.residual - before)


def _part(columns: Columns, start: int, end: int) -> Columns:
    """Return columns `start` to `end` as views: whole groups, a part of one, or single columns."""
    size = columns.group_size
    part = Columns(
        columns.weight[start:end],
        columns.residual[start:end],
        columns.chosen[start:end],
        columns.scales[start // size : -(-end // size)],
        columns.levels,
        columns.scale_bits,
    )
    if columns.indices is not None and columns.metric is not None:
        d = columns.vector_size
        part.indices = columns.indices[start // d : end // d]
        part.metric = columns.metric[start:end]
    return part


def _spans(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


DAMPING = 0.01  # of the mean diagonal, added to a Hessian (as in GPTQ, arXiv:2210.17323)
MOST_DAMPING = 10.0  # largest damping to try; a second moment summed in float32 needs at most 1
TINY = torch.finfo(torch.float32).tiny
SHRINK = 0.5
"""Fraction of the correction that is applied. All of it would fit the calibration tokens, not the
text: on a model of 15 M weights and 512 x 64 tokens one half was better than a quarter and than the
whole."""
SWEEPS = 4  # sweeps of coordinate descent after the feedback
LEVEL_SAMPLE = 2**18  # weights that the levels are solved from
STARTS_AT_ONCE = 8  # weights whose levels start from k-means side by side


FEWEST_INPUTS = 64  # the fewest inputs of an expert for which it is fitted to them


class InputFit(NamedTuple):
    """A quantized weight and its effect on the layer's output."""

    quantized: QuantizedWeight
    output_error: float  # `norm(x (W - W_q)^T) / norm(x W^T)`, x behind the damped Hessian
    damping: float = DAMPING  # of the mean diagonal, added to the Hessian; the most over experts
    energy: float = 0.0  # `norm(x W^T)^2`, mean over the inputs; 0 for experts


def fit_all_to_inputs(
    weights: Sequence[Tensor],
    spec: LutSpec,
    hessian: Tensor,
    ops: ColumnOps = REFERENCE,
    *,
    mass: Tensor | None = None,
) -> list[InputFit]:
    """Quantize `weights` `(O_n, I)`, each with the least output error on their inputs.

    The inputs are those behind `hessian` `(I, I)`. By that measure no result is worse than rounding
    every weight alone (`fit_weight`). `mass` `(O,)` says how much each row counts for codewords.
    """
    if isinstance(spec, TableSpec):  # rows with a codebook of their own are a weight of their own
        parts = [weight.split(spec.table_rows) for weight in weights]
        together = [*chain.from_iterable(parts)]
        fitted = iter(_fit_together(together, spec.of_one_table, hessian, ops, mass=None))
        return [_as_one([*islice(fitted, len(own))]) for own in parts]
    if not spec.rows_share_codebook:
        return _fit_together(weights, spec, hessian, ops, mass=mass)

    with side_by_side(on(hessian.device).workers()) as map_:
        fits = map_(lambda each: _fit_together([each], spec, hessian, ops, mass=mass), weights)
        return [*chain.from_iterable(fits)]


def _fit_together(
    weights: Sequence[Tensor],
    spec: LutSpec,
    hessian: Tensor,
    ops: ColumnOps,
    *,
    mass: Tensor | None,
) -> list[InputFit]:
    damping = needed_damping(hessian)
    exact = damped(hessian.double(), damping)
    H = exact.float()
    weights = [weight.detach().float() for weight in weights]
    importance = H.diagonal().contiguous()  # a view's stride would compile kernels once more

    def start(weight: Tensor) -> QuantizedWeight:
        return fit_weight(weight, spec, importance, nearest=ops.nearest, mass=mass)

    # the k-means of levels runs on the host, even where the weights are on a GPU
    with side_by_side(min(len(weights), STARTS_AT_ONCE)) as map_:
        starts = [*map_(start, weights)]
    columns = stack(weights, starts)
    sizes = [len(weight) for weight in weights]
    whole, before = _row_energy(columns.weight, H), _row_energy(columns.residual, H)
    feed_back(columns, exact, ops)
    if spec.codebook == "lut" and columns.indices is None:
        refit_levels(columns, H, sizes, spec)
    descend(columns, H, moves_scales=spec.scale == "group", ops=ops)
    after = _row_energy(columns.residual, H)
    ends = unstack(columns, sizes, starts)
    rows = torch.stack([whole, before, after]).split(sizes, dim=1)
    energies = torch.stack([own.sum(1) for own in rows]).tolist()  # the only device synchronization
    return [
        InputFit(
            quantized=end if after < before else start,
            output_error=(min(before, after) / max(whole, TINY)) ** 0.5,
            damping=damping,
            energy=whole,
        )
        for start, end, (whole, before, after) in zip(starts, ends, energies, strict=True)
    ]


def _as_one(parts: Sequence[InputFit]) -> InputFit:
    """Return the fit of the weight whose rows are those of `parts`."""
    whole = sum(part.energy for part in parts)
    lost = sum(part.output_error**2 * part.energy for part in parts)
    quantized = joined([part.quantized for part in parts])
    return InputFit(quantized, (lost / max(whole, TINY)) ** 0.5, parts[0].damping, whole)


def fit_stack_to_inputs(
    weight: Tensor,
    spec: LutSpec,
    hessians: Tensor,
    counts: Tensor,
    *,
    ops: ColumnOps = REFERENCE,
) -> InputFit:
    """Fit E weights that share a codebook, each with inputs of its own.

    The levels come from all of them, weighted by how often each was used. A weight that received
    fewer than `FEWEST_INPUTS` inputs is rounded without them: so few do not generalize.

    Args:
        weight: `(E * O, I)`, one below the other.
        spec: the format.
        hessians: `mean(x x^T)` over the inputs of each, `(E, I, I)`; 0 without inputs.
        counts: the number of those inputs, `(E,)`.
        ops: the inner operations of a sweep, for kernels.
    """
    E, I = len(hessians), weight.shape[1]
    weights = weight.detach().float().view(E, -1, I)
    is_fitted = (counts >= FEWEST_INPUTS).tolist()
    dampings = [needed_damping(each) for each in hessians]
    diagonals = hessians.float().diagonal(dim1=1, dim2=2) * counts[:, None]
    mean = diagonals.mean()
    diagonals = (diagonals + DAMPING * mean) if mean > 0 else torch.ones_like(diagonals)
    importance = diagonals[:, None].expand(weights.shape).reshape(-1, I)
    start = fit_weight(weight, spec, importance, nearest=ops.nearest)
    codebook, indices = start.codebook, start.indices.view(E, weights.shape[1], -1)
    held = start.scales.scales
    groups = expand_scales(start.scales, I) if held is None else held
    groups = groups.view(E, weights.shape[1], -1)

    def fit_expert(e: int) -> Tensor:
        exact = damped(hessians[e].double(), dampings[e])
        H = exact.float()
        part = QuantizedWeight(indices[e], codebook, Scales(groups[e], bits=spec.scale_bits))
        columns = stack([weights[e]], [part])
        whole, before = _row_energy(columns.weight, H), _row_energy(columns.residual, H)
        feed_back(columns, exact, ops)
        descend(columns, H, moves_scales=held is not None, ops=ops)
        after = _row_energy(columns.residual, H)
        is_better = after.sum() < before.sum()
        indices[e] = torch.where(is_better, _indices(columns, slice(0, None)), indices[e])
        groups[e] = torch.where(is_better, columns.scales.T, groups[e])
        return counts[e] * torch.stack([torch.minimum(before.sum(), after.sum()), whole.sum()])

    fitted = [e for e in range(E) if is_fitted[e]]
    energies = weight.new_zeros(2, dtype=torch.float32)
    own = (
        side_by_side(on(weight.device).workers()) if spec.rows_share_codebook else nullcontext(map)
    )
    with own as map_:
        for energy in map_(fit_expert, fitted):
            energies += energy
    scales = start.scales
    if held is not None:
        scales = scales._replace(scales=groups.reshape(held.shape))
    error, whole = energies.tolist()
    quantized = QuantizedWeight(indices.flatten(0, 1), codebook, scales)
    return InputFit(quantized, (error / max(whole, TINY)) ** 0.5, max(dampings))


def damped(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """Return `H + damping mean(diag H) I`, with 1 on the diagonal where that is 0."""
    H = hessian.clone()
    diagonal = H.diagonal()
    diagonal += damping * diagonal.mean()
    diagonal[diagonal == 0] = 1.0
    return H


def needed_damping(hessian: Tensor) -> float:
    """Return the least of `DAMPING`, 10 `DAMPING`, ... with which H has a Cholesky factor.

    More than `DAMPING` is needed only where rounding errors of the sums behind H are as large as
    that: a few channels of real models are 10^4 times as strong as the others.

    Raises:
        ConfigError: `hessian` is not the second moment of finite inputs.
    """
    H, damping = hessian.double(), DAMPING
    while damping <= MOST_DAMPING:
        factor, failed = torch.linalg.cholesky_ex(damped(H, damping))
        # a matrix with NaN or infinity may have a factor, which is not finite
        if (failed == 0) & factor.diagonal().isfinite().all():
            return damping
        damping *= 10
    raise ConfigError(
        f"the second moment of {len(H)} inputs has no Cholesky factor (its mean diagonal is "
        f"{H.diagonal().mean().item():.3g}), expected one of finite inputs; convert without "
        "--calibration, or check that the model gives no NaN or infinity on that text"
    )


def output_error(weight: Tensor, quantized: QuantizedWeight, H: Tensor) -> float:
    """Return `tr((W - W_q) H (W - W_q)^T)`, the mean squared error of the layer's output."""
    return _row_energy((weight - dequantize(quantized)).T, H).sum().item()


def feedback_coupling(H: Tensor) -> Tensor:
    """Return `A` `(I, I)`, strictly lower triangular: the share of a residual each column absorbs.

    With `H = M D M^T`, M unit upper triangular, `tr(R H R^T) = sum_k D_k |R M[:, k]|^2`, and column
    k, which comes after all j < k, makes its term small by aiming at `w_k + sum_j M_jk r_j`.
    """
    factor = upper_factor(H)
    return (factor / factor.diagonal()).T.float().tril(-1)


def feed_back(columns: Columns, H: Tensor, ops: ColumnOps) -> None:
    """Choose all levels again by GPTQ in falling order of `diag(H)`; the scales do not change."""
    d = columns.vector_size
    order = H.diagonal().view(-1, d).sum(1).argsort(descending=True)
    places = (order[:, None] * d + torch.arange(d, device=H.device)).flatten()
    metric, sorted_H = None, H[places][:, places]
    if columns.indices is None:
        coupling = feedback_coupling(sorted_H)
    else:
        coupling, metric = feedback_of_blocks(sorted_H, d)
    # one row of scales per vector, or per column if each column has its own
    rows = order * d // columns.group_size if columns.group_size >= d else places
    sorted_columns = Columns(
        columns.weight[places],
        columns.residual,
        columns.chosen,
        columns.scales[rows],
        columns.levels,
        columns.scale_bits,
        columns.indices,
        metric,
    )
    ops.sweeps(feedback_sweep, sorted_columns, coupling, ops=ops)
    back = places.argsort()
    columns.residual, columns.chosen = columns.residual[back], columns.chosen[back]
    if columns.indices is not None:
        columns.indices = columns.indices[order.argsort()]


def descend(columns: Columns, H: Tensor, *, moves_scales: bool, ops: ColumnOps) -> None:
    """Run `SWEEPS` sweeps of coordinate descent over indices, and group scales if they move."""
    metric = H.diagonal()
    if columns.indices is None:
        coupling = (H / metric[:, None]).fill_diagonal_(0.0)
    else:
        coupling, metric = descent_of_blocks(H, columns.vector_size)
        columns.metric = metric
    settings = {"times": SWEEPS, "moves_scales": moves_scales, "ops": ops}
    ops.sweeps(descent_sweep, columns, coupling, metric, **settings)


def stack(weights: Sequence[Tensor], quantized: Sequence[QuantizedWeight]) -> Columns:
    """Concatenate weights and their quantized forms, transposed; for vectors only one weight."""
    I, first = weights[0].shape[1], quantized[0]
    held = [
        expand_scales(q.scales, I) if q.scales.scales is None else q.scales.scales
        for q in quantized
    ]
    if first.codebook.dim() > 1:
        levels, indices = first.codebook, first.indices.T.contiguous()
    else:
        sized = zip(weights, quantized, strict=True)
        levels, indices = (
            torch.cat([q.codebook[:, None].expand(-1, len(w)) for w, q in sized], 1),
            None,
        )
    columns = Columns(
        weight=torch.cat(list(weights)).T.contiguous(),
        residual=torch.empty(0),
        chosen=torch.cat([chosen_levels(q) for q in quantized]).T.contiguous(),
        scales=torch.cat(held).T.contiguous(),
        levels=levels,
        scale_bits=first.scales.bits,
        indices=indices,
    )
    _renew_residual(columns)
    return columns


def unstack(
    columns: Columns, sizes: Sequence[int], old: Sequence[QuantizedWeight]
) -> list[QuantizedWeight]:
    """Return the quantized weights of `columns`; low-rank scales, which never move, are `old`."""
    fitted, end = [], 0
    for size, start in zip(sizes, old, strict=True):
        own, end = slice(end, end + size), end + size
        scales, codebook = start.scales, columns.levels
        if columns.indices is None:
            codebook = codebook[:, own.start].clone()
        if scales.scales is not None:
            scales = scales._replace(scales=columns.scales[:, own].T.contiguous())
        elif columns.indices is None:
            scales, codebook = normalize(scales, codebook)
        fitted.append(QuantizedWeight(_indices(columns, own), codebook, scales))
    return fitted


def _indices(columns: Columns, rows: slice) -> Tensor:
    """Return the indices of the chosen values of some rows, `(rows, I / d)`."""
    if columns.indices is not None:
        return columns.indices[:, rows].T.contiguous()
    return nearest_level(columns.chosen[:, rows].T, columns.levels[:, rows.start])


def solve_levels(weight: Tensor, scales: Tensor, indices: Tensor, *, H: Tensor, C: int) -> Tensor:
    """Return the exact levels `(C,)` of least output error for the given indices and scales.

    With `P_c = scales * (indices == c)`: `sum_c' <P_c, H P_c'> l_c' = <P_c, H W>`. All are
    transposed: `weight`, `scales` and `indices` are `(I, O)`.
    """
    parts = torch.stack([torch.where(indices == c, scales, 0.0) for c in range(C)])
    pulled = (H @ parts).view(C, -1).double()
    normal = pulled @ parts.view(C, -1).double().T
    right = pulled @ weight.reshape(-1).double()
    diagonal = normal.diagonal()
    # the ridge is so small that it only affects unused levels
    ridge = 1e-9 * diagonal.mean() + torch.finfo(torch.float64).tiny
    return torch.linalg.solve(normal + torch.diag(ridge.expand_as(diagonal)), right).float()


def refit_levels(columns: Columns, H: Tensor, sizes: Sequence[int], spec: LutSpec) -> None:
    """Solve the levels of each weight again; indices stay, scales follow the normalized levels."""
    end = 0
    for size in sizes:
        own, end = slice(end, end + size), end + size
        chosen, levels = columns.chosen[:, own], columns.levels[:, own]
        indices = nearest_level(chosen, levels[:, 0])
        rows = sample_rows(chosen.T, LEVEL_SAMPLE)
        S = columns.scales[:, own][:, rows].repeat_interleave(columns.group_size, dim=0)
        weight = columns.weight[:, own][:, rows]
        solved = solve_levels(weight, S, indices[:, rows], H=H, C=spec.num_levels)
        if spec.scale == "group":
            scales = Scales(scales=columns.scales[:, own], bits=columns.scale_bits)
            scales, solved = normalize(scales, solved)
            columns.scales[:, own] = round_scales(above_zero(scales)).by_group()
        columns.chosen[:, own] = solved[indices.int()]
        columns.levels[:, own] = solved.sort().values[:, None]
    _renew_residual(columns)


def _renew_residual(columns: Columns) -> None:
    S = columns.scales.repeat_interleave(columns.group_size, dim=0)
    columns.residual = torch.addcmul(columns.weight, columns.chosen, S, value=-1)


def _row_energy(columns: Tensor, H: Tensor) -> Tensor:
    """Return `x^T H x` of each column x of `(I, O)`, its share of the output's energy, `(O,)`."""
    return (columns * (H @ columns)).sum(0)


def aim_all(
    weights: Sequence[Tensor],
    hessian: Tensor,
    input_gap: Tensor,
    stream_gap: Tensor | None = None,
    *,
    shrink: float = SHRINK,
) -> list[Tensor]:
    """Return `W + shrink (W' - W)` for each of `weights` `(O_n, I)`, which share their inputs.

    Quantized layers pass wrong inputs on; W' corrects the part of their error that the inputs
    predict. Minimising the mean of `|W x_f + s_f - W' x - s|^2` over the tokens gives

        W' = W + (W mean((x_f - x) x^T) + mean((s_f - s) x^T)) H^-1,    H = mean(x x^T),

    where x and x_f are the inputs of the student's and the teacher's linear, and s and s_f the
    residual streams that the output is added to. The first term is that of QEP (arXiv:2504.09629)
    and GPTAQ (arXiv:2504.02692). `H` is damped as in the fit. A weight whose correction is not
    finite is returned unchanged.

    Args:
        hessian: `mean(x x^T)`, `(I, I)`.
        input_gap: `mean((x_f - x) x^T)`, `(I, I)`.
        stream_gap: `mean((s_f - s) x^T)`, `(O, I)`, the same for all weights.
    """
    weights = [weight.detach().float() for weight in weights]
    gaps = [weight @ input_gap for weight in weights]
    if stream_gap is not None:
        gaps = [gap + stream_gap for gap in gaps]
    H = damped(hessian.double(), needed_damping(hessian))
    factor = torch.linalg.cholesky(H)
    moves = torch.cholesky_solve(torch.cat(gaps).T.double(), factor).T.float()
    parts = moves.split([len(weight) for weight in weights])
    return [
        torch.where(part.isfinite().all(), weight + shrink * part, weight)
        for weight, part in zip(weights, parts, strict=True)
    ]
