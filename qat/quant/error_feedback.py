"""Quantize a weight against its layer's inputs: rounding errors are paid back by later columns.

With `H = mean(x x^T)` over the layer's inputs the layer's output error is
`tr((W - W_q) H (W - W_q)^T)`. Indices are chosen column by column in falling order of `diag(H)`,
each error compensated in the columns to come (GPTQ, arXiv:2210.17323); then, by turns, scales and
levels are solved exactly against `H` and the indices improved by coordinate descent (as in LNQ,
arXiv:2505.07004).

Shapes: O out_features, I in_features, G groups per row, C codebook entries.
"""

import torch
from torch import Tensor

from qat.quant.fit import fit_weight, normalize
from qat.quant.spec import LutSpec
from qat.quant.weight import (
    QuantizedWeight,
    Scales,
    as_stored,
    dequantize,
    expand_scales,
    nearest_indices,
)

BLOCK = 128
DAMPING = 0.01
ROUNDS = 4
SWEEPS = 2


def fit_to_inputs(weight: Tensor, spec: LutSpec, hessian: Tensor) -> QuantizedWeight:
    """The quantized weight whose layer output errs least on the inputs behind `hessian` `(I, I)`.

    Never worse, by that measure, than rounding every weight alone (`fit_weight`).
    """
    weight = weight.detach().float()
    H = damped(hessian.float())
    best = fit_weight(weight, spec, H.diagonal())
    least = output_error(weight, best, H)
    S = expand_scales(best.scales, weight.shape[1])
    current = best._replace(indices=error_feedback(weight, S, best.codebook, H))
    for _ in range(ROUNDS):
        current = _refit(weight, current, H, spec)
        error = output_error(weight, current, H)
        if error < least:
            best, least = current, error
    return best


def damped(hessian: Tensor) -> Tensor:
    """`hessian` with a little of its mean diagonal added, and 1 where a feature never fires."""
    H = hessian.clone()
    diagonal = H.diagonal()
    mean = diagonal.mean()
    diagonal += DAMPING * mean
    diagonal[diagonal == 0] = 1.0
    return H


def output_error(weight: Tensor, quantized: QuantizedWeight, H: Tensor) -> float:
    """`tr((W - W_q) H (W - W_q)^T)`: the mean squared error of the layer's output."""
    error = weight - dequantize(quantized)
    return ((error @ H) * error).sum().item()


def error_feedback(weight: Tensor, S: Tensor, levels: Tensor, H: Tensor) -> Tensor:
    """Indices `(O, I)` by GPTQ in falling order of `diag(H)`, under fixed scales and levels."""
    order = H.diagonal().argsort(descending=True)
    W, S = weight[:, order].clone(), S[:, order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(H[order][:, order].double()))
    U = torch.linalg.cholesky(inverse, upper=True).float()
    indices = torch.empty_like(W, dtype=torch.uint8)
    for start in range(0, W.shape[1], BLOCK):
        end = min(start + BLOCK, W.shape[1])
        errors = torch.empty_like(W[:, start:end])
        for i in range(start, end):
            column = nearest_indices(W[:, i], S[:, i], levels)
            error = (W[:, i] - levels[column.int()] * S[:, i]) / U[i, i]
            W[:, i + 1 : end] -= error[:, None] * U[i, i + 1 : end]
            indices[:, i], errors[:, i - start] = column, error
        W[:, end:] -= errors @ U[start:end, end:]
    return indices[:, order.argsort()]


def coordinate_descent(weight: Tensor, quantized: QuantizedWeight, H: Tensor) -> Tensor:
    """Indices `(O, I)` after one sweep in which each moves to its best level given all others.

    For column i the best value is `w_i + sum_{j != i} (w_j - q_j) H_ji / H_ii`; the output error
    never rises.
    """
    S = expand_scales(quantized.scales, weight.shape[1])
    levels, indices = quantized.codebook, quantized.indices.clone()
    residual = weight - dequantize(quantized)
    pull = residual @ H
    for start in range(0, weight.shape[1], BLOCK):
        end = min(start + BLOCK, weight.shape[1])
        before = residual[:, start:end].clone()
        block_H = H[start:end, start:end].contiguous()
        block_pull = pull[:, start:end].clone()
        for i in range(start, end):
            k = i - start
            target = weight[:, i] - residual[:, i] + block_pull[:, k] / H[i, i]
            column = nearest_indices(target, S[:, i], levels)
            new = weight[:, i] - levels[column.int()] * S[:, i]
            block_pull += (new - residual[:, i])[:, None] * block_H[k]
            residual[:, i], indices[:, i] = new, column
        pull += (residual[:, start:end] - before) @ H[start:end]
    return indices


def fit_group_scales_to_inputs(weight: Tensor, quantized: QuantizedWeight, H: Tensor) -> Tensor:
    """The scales `(O, G)` that minimise the output error for the given indices, exactly.

    With `D_o` the `(I, G)` matrix of row o's levels in their groups, `(D_o^T H D_o) s_o = D_o^T H
    w_o`: a G x G system for each row. A scale that would turn negative keeps its old value.
    """
    old = quantized.scales.scales
    O, G = old.shape
    Q = quantized.codebook[quantized.indices.int()]
    normal = torch.empty(O, G, G, dtype=torch.float64, device=Q.device)
    size = Q.shape[1] // G
    for g in range(G):
        part = slice(g * size, (g + 1) * size)
        normal[:, g] = ((Q[:, part] @ H[part]) * Q).view(O, G, size).sum(-1)
    right = ((weight @ H) * Q).view(O, G, size).sum(-1).double()
    fitted = _solve(normal, right).float()
    return torch.where(fitted > 0, fitted, old)


def fit_levels_to_inputs(weight: Tensor, quantized: QuantizedWeight, H: Tensor) -> Tensor:
    """The levels `(C,)` that minimise the output error for the given indices and scales, exactly.

    With `P_c = S * (indices == c)`: `sum_c' <P_c H, P_c'> l_c' = <P_c H, W>`.
    """
    S = expand_scales(quantized.scales, weight.shape[1])
    C = quantized.codebook.numel()
    parts = [torch.where(quantized.indices == c, S, 0.0) for c in range(C)]
    normal = torch.empty(C, C, dtype=torch.float64, device=S.device)
    right = torch.empty(C, dtype=torch.float64, device=S.device)
    for c, part in enumerate(parts):
        pulled = part @ H
        normal[c] = torch.stack([(pulled * other).sum(dtype=torch.float64) for other in parts])
        right[c] = (pulled * weight).sum(dtype=torch.float64)
    return _solve(normal[None], right[None])[0].float()


def _refit(weight: Tensor, current: QuantizedWeight, H: Tensor, spec: LutSpec) -> QuantizedWeight:
    """One turn: scales, levels, then indices; every part exact given the others."""
    scales, levels = current.scales, current.codebook
    if scales.scales is not None:
        scales = Scales(scales=fit_group_scales_to_inputs(weight, current, H))
    if spec.codebook == "lut":
        levels = fit_levels_to_inputs(weight, current._replace(scales=scales), H)
        order = levels.argsort()
        levels, rank = levels[order], order.argsort().to(torch.uint8)
        current = current._replace(indices=rank[current.indices.int()])
        scales, levels = normalize(scales, levels)
    turned = as_stored(QuantizedWeight(current.indices, levels, scales))
    for _ in range(SWEEPS):
        turned = turned._replace(indices=coordinate_descent(weight, turned, H))
    return turned


def _solve(normal: Tensor, right: Tensor) -> Tensor:
    """Batched symmetric solve with a ridge that only an unused unknown can feel."""
    diagonal = normal.diagonal(dim1=-2, dim2=-1)
    ridge = 1e-9 * diagonal.mean(-1, keepdim=True) + torch.finfo(torch.float64).tiny
    regular = normal + torch.diag_embed(ridge.expand_as(diagonal))
    return torch.linalg.solve(regular, right[..., None])[..., 0]
