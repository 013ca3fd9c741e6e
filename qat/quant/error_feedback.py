"""Quantize weights against their layer's inputs: rounding errors are paid back by later columns.

With `H = mean(x x^T)` over the layer's inputs the layer's output error is
`tr((W - W_q) H (W - W_q)^T)`. Indices are chosen column by column in falling order of `diag(H)`,
each error compensated in the columns to come (GPTQ, arXiv:2210.17323); then, by turns, the levels
are solved against `H`, and scales and indices improved by coordinate descent (as in LNQ,
arXiv:2505.07004).

Weights that share their inputs (q, k, v) are swept together: their rows do not know each other.

Quantized layers hand wrong inputs on. A linear fitted to its own weight passes that error through;
one that is aimed first (`aim_all`) takes back what its inputs can tell of it. Minimising the mean
of `|W x_f + s_f - W' x - s|^2` over the tokens gives

    W' = W + (W mean((x_f - x) x^T) + mean((s_f - s) x^T)) H^-1,    H = mean(x x^T),

where x and x_f are what the student's and the teacher's linear read, and s and s_f the residual
streams that the output is added to (left out where it is not). The first term is that of QEP
(arXiv:2504.09629), whose aim GPTAQ shares (asymmetric calibration, arXiv:2504.02692); the second
carries it on to the sum that the next block reads.

Shapes: O rows of all weights together, I in_features, G groups per row, C codebook entries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qat.quant.codebook import nearest_level
from qat.quant.columns import REFERENCE, ColumnOps, Columns, descent_sweep, feedback_sweep
from qat.quant.fit import fit_weight, normalize, sample_rows
from qat.quant.spec import LutSpec
from qat.quant.weight import (
    QuantizedWeight,
    Scales,
    above_zero,
    dequantize,
    expand_scales,
    round_scales,
)

DAMPING = 0.01
TINY = torch.finfo(torch.float32).tiny
SHRINK = 0.5
"""How much of the correction is taken. All of it fits the calibration tokens, not the text: on a
model of 15 M weights and 512 x 64 tokens one half was better than a quarter and than the whole."""
SWEEPS = 4
LEVEL_SAMPLE = 2**18
"""Weights that the levels are solved from."""


class InputFit(NamedTuple):
    """A quantized weight and what it does to its layer's output."""

    quantized: QuantizedWeight
    output_error: float
    """`norm(x (W - W_q)^T) / norm(x W^T)` over the inputs behind the damped Hessian."""


def fit_to_inputs(weight: Tensor, spec: LutSpec, hessian: Tensor) -> QuantizedWeight:
    """The quantized weight whose layer output errs least on the inputs behind `hessian` `(I, I)`.

    Never worse, by that measure, than rounding every weight alone (`fit_weight`).
    """
    (fit,) = fit_all_to_inputs([weight], spec, hessian)
    return fit.quantized


def fit_all_to_inputs(
    weights: Sequence[Tensor], spec: LutSpec, hessian: Tensor, ops: ColumnOps = REFERENCE
) -> list[InputFit]:
    """`fit_to_inputs` of each of `weights` `(O_n, I)`, which share their inputs."""
    H = damped(hessian.float())
    weights = [weight.detach().float() for weight in weights]
    starts = [fit_weight(weight, spec, H.diagonal()) for weight in weights]
    columns = stack(weights, starts)
    sizes = [len(weight) for weight in weights]
    whole, before = _row_energy(columns.weight, H), _row_energy(columns.residual, H)
    feed_back(columns, H, ops)
    if spec.codebook == "lut":
        refit_levels(columns, H, sizes, spec)
    descend(columns, H, moves_scales=spec.scale == "group", ops=ops)
    after = _row_energy(columns.residual, H)
    ends = unstack(columns, sizes, starts)
    rows = torch.stack([whole, before, after]).split(sizes, dim=1)
    energies = torch.stack([own.sum(1) for own in rows]).tolist()  # the one wait for the device
    return [
        InputFit(end if after < before else start, (min(before, after) / max(whole, TINY)) ** 0.5)
        for start, end, (whole, before, after) in zip(starts, ends, energies, strict=True)
    ]


def damped(hessian: Tensor) -> Tensor:
    """`hessian` with a little of its mean diagonal added, and 1 where a feature never fires."""
    H = hessian.clone()
    diagonal = H.diagonal()
    diagonal += DAMPING * diagonal.mean()
    diagonal[diagonal == 0] = 1.0
    return H


def output_error(weight: Tensor, quantized: QuantizedWeight, H: Tensor) -> float:
    """`tr((W - W_q) H (W - W_q)^T)`: the mean squared error of the layer's output."""
    return _row_energy((weight - dequantize(quantized)).T, H).sum().item()


def feedback_coupling(H: Tensor) -> Tensor:
    """`A` `(I, I)`, strictly lower triangular: how much of each residual a later column pays back.

    With `H = M D M^T`, M unit upper triangular, `tr(R H R^T) = sum_k D_k |R M[:, k]|^2`, and column
    k, which comes after all j < k, makes its term small by aiming at `w_k + sum_j M_jk r_j`.
    """
    # the Cholesky factor of H with its order turned round is upper triangular
    turned = H.flip(0, 1)
    factor, failed = torch.linalg.cholesky_ex(turned)
    if failed:  # too close to singular for float32
        factor = torch.linalg.cholesky(turned.double())
    factor = factor.flip(0, 1)
    return (factor / factor.diagonal()).T.float().tril(-1)


def feed_back(columns: Columns, H: Tensor, ops: ColumnOps) -> None:
    """Choose all levels anew by GPTQ in falling order of `diag(H)`, under scales that stay."""
    order = H.diagonal().argsort(descending=True)
    sorted_columns = Columns(
        columns.weight[order],
        columns.residual,
        columns.chosen,
        columns.scales[order // columns.group_size],
        columns.levels,
        columns.scale_bits,
    )
    feedback_sweep(sorted_columns, feedback_coupling(H[order][:, order]), ops)
    back = order.argsort()
    columns.residual, columns.chosen = columns.residual[back], columns.chosen[back]


def descend(columns: Columns, H: Tensor, *, moves_scales: bool, ops: ColumnOps) -> None:
    """Sweeps of coordinate descent over indices, and group scales if they may move."""
    diagonal = H.diagonal()
    coupling = (H / diagonal[:, None]).fill_diagonal_(0.0)
    for _ in range(SWEEPS):
        descent_sweep(columns, coupling, diagonal, moves_scales=moves_scales, ops=ops)


def stack(weights: Sequence[Tensor], quantized: Sequence[QuantizedWeight]) -> Columns:
    """Weights and what they are quantized to, side by side and transposed."""
    I = weights[0].shape[1]
    groups, chosen, levels = [], [], []
    for weight, q in zip(weights, quantized, strict=True):
        held = q.scales.scales
        groups.append(expand_scales(q.scales, I) if held is None else held)
        chosen.append(q.codebook[q.indices.int()])
        levels.append(q.codebook[:, None].expand(-1, len(weight)))
    columns = Columns(
        weight=torch.cat(list(weights)).T.contiguous(),
        residual=torch.empty(0),
        chosen=torch.cat(chosen).T.contiguous(),
        scales=torch.cat(groups).T.contiguous(),
        levels=torch.cat(levels, dim=1),
        scale_bits=quantized[0].scales.bits,
    )
    _renew_residual(columns)
    return columns


def unstack(
    columns: Columns, sizes: Sequence[int], old: Sequence[QuantizedWeight]
) -> list[QuantizedWeight]:
    """The quantized weights of `columns`; low-rank scales, which no sweep moves, are the `old`."""
    parts = (t.split(sizes, dim=1) for t in (columns.chosen, columns.scales, columns.levels))
    fitted = []
    for start, chosen, groups, levels in zip(old, *parts, strict=True):
        indices, codebook = nearest_level(chosen.T, levels[:, 0]), levels[:, 0].clone()
        if start.scales.scales is not None:
            scales = start.scales._replace(scales=groups.T.contiguous())
        else:
            scales, codebook = normalize(start.scales, codebook)
        fitted.append(QuantizedWeight(indices, codebook, scales))
    return fitted


def solve_levels(weight: Tensor, scales: Tensor, indices: Tensor, *, H: Tensor, C: int) -> Tensor:
    """The levels `(C,)` that minimise the output error for the given indices and scales, exactly.

    With `P_c = scales * (indices == c)`: `sum_c' <P_c, H P_c'> l_c' = <P_c, H W>`. All transposed:
    `weight`, `scales` and `indices` are `(I, O)`.
    """
    parts = torch.stack([torch.where(indices == c, scales, 0.0) for c in range(C)])
    pulled = (H @ parts).view(C, -1).double()
    normal = pulled @ parts.view(C, -1).double().T
    right = pulled @ weight.reshape(-1).double()
    return _solve(normal, right).float()


def refit_levels(columns: Columns, H: Tensor, sizes: Sequence[int], spec: LutSpec) -> None:
    """Solve the levels of each weight anew; indices stay, scales follow the normalized levels."""
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
    """`x^T H x` of each column x of `(I, O)`: its share of the output's mean square, `(O,)`."""
    return (columns * (H @ columns)).sum(0)


def _solve(normal: Tensor, right: Tensor) -> Tensor:
    """Symmetric solve with a ridge that only an unused unknown can feel."""
    diagonal = normal.diagonal()
    ridge = 1e-9 * diagonal.mean() + torch.finfo(torch.float64).tiny
    return torch.linalg.solve(normal + torch.diag(ridge.expand_as(diagonal)), right)


def aim_all(
    weights: Sequence[Tensor],
    hessian: Tensor,
    input_gap: Tensor,
    stream_gap: Tensor | None = None,
    *,
    shrink: float = SHRINK,
) -> list[Tensor]:
    """`W + shrink (W' - W)` of each of `weights` `(O_n, I)`, which share their inputs.

    `H` is damped as for the fit, and solved in float64. A weight whose aim is not finite stays as
    it is. Nothing waits for the device.

    Args:
        hessian: `mean(x x^T)`, `(I, I)`.
        input_gap: `mean((x_f - x) x^T)`, `(I, I)`.
        stream_gap: `mean((s_f - s) x^T)`, `(O, I)`, the same for all weights.
    """
    weights = [weight.detach().float() for weight in weights]
    gaps = [weight @ input_gap for weight in weights]
    if stream_gap is not None:
        gaps = [gap + stream_gap for gap in gaps]
    factor, failed = torch.linalg.cholesky_ex(damped(hessian.float()).double())
    moves = torch.cholesky_solve(torch.cat(gaps).T.double(), factor).T.float()
    parts = moves.split([len(weight) for weight in weights])
    return [
        torch.where((failed == 0) & part.isfinite().all(), weight + shrink * part, weight)
        for weight, part in zip(weights, parts, strict=True)
    ]
