"""Quantize a weight without its layer's inputs: levels and scales in turns.

Levels are shared by the whole tensor, so they are learned from a sample of its rows. Group scales
and indices belong to single rows, so they are then found for all rows, one cache-sized piece at a
time. Scales start from the weights and are refitted to given levels by least squares.

Shapes: O out_features, I in_features, G groups per row, W weights per group, C codebook entries, R
rank.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from qat.backend.base import undivided
from qat.quant.codebook import fixed_grid, nearest_level, weighted_kmeans
from qat.quant.spec import LutSpec, TableSpec, VectorSpec
from qat.quant.vectors import Nearest, nearest_vectors, start_codewords
from qat.quant.weight import (
    QuantizedWeight,
    Scales,
    above_zero,
    as_stored,
    chosen_levels,
    dequantize,
    expand_scales,
    joined,
    round_scales,
)

TINY = torch.finfo(torch.float32).tiny
RIDGE = 1e-6  # of the normal equations of low-rank scales, a fraction of their mean diagonal
ROUNDS = 10  # rounds of indices, levels and scales; the best one is kept
ROUNDS_OF_VECTORS = 4  # rounds for codewords, whose searches take longer
LLOYD_STEPS = 15  # of k-means for vectors before the scales move: there is no exact start as in 1D
VECTORS_EACH = 32  # the least number of vectors per codeword in the sample that k-means starts from
ROUNDS_OF_ALL_ROWS = 3  # of scales and indices, under levels learned from a sample
SAMPLE = 2**17  # weights that the levels are learned from
POWERS = 5  # the `scale_bits` of scales that are powers of two
PIECE_IN_CACHE, PIECE = 2**19, 2**24  # weights at a time, on a CPU and on other devices


def absmax_scales(weight: Tensor, group_size: int) -> Tensor:
    """Return the largest magnitude of each group, `(O, G)`, floored where a group is all zero."""
    O, I = weight.shape
    largest = weight.view(O, I // group_size, group_size).abs().amax(-1)
    return largest.clamp_min(torch.finfo(torch.float16).tiny)


def fit_group_scales(weight: Tensor, levels: Tensor, importance: Tensor, old: Tensor) -> Tensor:
    """Return the exact scales `(O, G)` that minimise `sum importance * (weight - S * levels)**2`.

    `s = sum(h w q) / sum(h q^2)` over each group; `levels` `(O, I)` are the chosen codebook values.
    A group without signal, or whose scale would turn negative, keeps its `old` scale.
    """
    O, G = old.shape
    weighted = importance * levels
    numerator = (weighted * weight).view(O, G, -1).sum(-1)
    denominator = (weighted * levels).view(O, G, -1).sum(-1)
    fitted = numerator / denominator
    return torch.where((denominator > 0) & (fitted > 0), fitted, old)


def low_rank_start(S: Tensor, rank: int) -> Scales:
    """Return the best rank-`rank` factors `A diag(g) B` of scales `(O, I)`: their truncated SVD."""
    U, g, Vh = torch.linalg.svd(S, full_matrices=False)
    return Scales(scale_out=U[:, :rank], rank_gain=g[:rank], scale_in=Vh[:rank])


def fit_low_rank(weight: Tensor, levels: Tensor, importance: Tensor, old: Scales) -> Scales:
    """Run one round of alternating least squares on `sum h * (w - q * (A diag(g) B))**2`.

    First every row of `A diag(g)` is solved given `B` (one R x R system each), then every column of
    `B`. At the end the factors are balanced: unit columns in `A`, unit rows in `B`, lengths in `g`.
    """
    curvature = importance * levels**2
    target = importance * levels * weight
    _, _, B = old.low_rank()
    gained = _solve_rows(curvature, target, B)
    B = _solve_rows(curvature.T, target.T, gained.T).T
    return balance(gained, B)._replace(bits=old.bits)


def balance(out_factor: Tensor, in_factor: Tensor) -> Scales:
    """Return the same product with unit columns, unit rows, and their lengths in the gain."""
    out_length = out_factor.norm(dim=0).clamp_min(TINY)
    in_length = in_factor.norm(dim=1).clamp_min(TINY)
    return Scales(
        scale_out=out_factor / out_length,
        rank_gain=out_length * in_length,
        scale_in=in_factor / in_length[:, None],
    )


def _solve_rows(curvature: Tensor, target: Tensor, basis: Tensor) -> Tensor:
    """Return for each row n the x that minimises `sum_m curvature[n, m] (t - x @ basis[:, m])**2`.

    The result is `(N, R)`.
    """
    R, M = basis.shape
    products = (basis[:, None] * basis[None]).view(R * R, M)
    normal = (curvature @ products.T).view(-1, R, R)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    ridge = RIDGE * diagonal.mean(1, keepdim=True) + TINY
    normal = normal + torch.diag_embed(ridge.expand_as(diagonal))
    right = target @ basis.T
    return torch.linalg.solve(normal, right[..., None])[..., 0]


def fit_weight(
    weight: Tensor,
    spec: LutSpec,
    importance: Tensor | None = None,
    *,
    nearest: Nearest = nearest_vectors,
    mass: Tensor | None = None,
) -> QuantizedWeight:
    """Find the levels, scales and indices that minimise `sum h * (weight - dequantized)**2`.

    Alternates nearest indices with least-squares refits of levels (learned codebooks only) and
    scales, starting from the levels of weighted k-means, and keeps the best round, judged after
    rounding to the stored dtypes. A weight with group scales and more than `SAMPLE` weights learns
    its levels from about that many, in whole rows drawn at random (always the same ones).

    Args:
        weight: `(O, I)` float.
        spec: the format.
        importance: the weight of an error, `(I,)` (the mean square of each input feature) or `(O,
            I)` (Fisher); 1 everywhere if None.
        nearest: the search for the nearest codewords of vectors.
        mass: `(O,)`, positive: how much each row counts for codewords; levels do not gain by it.
    """
    weight = weight.detach().float()
    h = weight.new_ones(()) if importance is None else importance.to(weight.device).float()
    h = h.expand_as(weight)
    if isinstance(spec, TableSpec):
        parts = zip(weight.split(spec.table_rows), h.split(spec.table_rows), strict=True)
        return joined([fit_weight(part, spec.of_one_table, own) for part, own in parts])
    if isinstance(spec, VectorSpec):
        with undivided():
            return _fit_codewords(weight, h, spec, nearest=nearest, mass=mass)
    rows = sample_rows(weight, SAMPLE)
    if spec.scale == "low_rank" or (len(rows) == len(weight) and spec.scale_bits != POWERS):
        return _alternate(weight, h, spec, rows)
    sample = _alternate(weight[rows], h[rows], spec, None)
    # start from absmax scales times the ratio of fitted to absmax scales in the sample
    groups = absmax_scales(weight, spec.group_size)
    groups = groups * (sample.scales.by_group() / groups[rows]).median()
    return _follow(weight, h, sample.codebook, sample.scales._replace(scales=groups))


def with_zero_groups(weight: Tensor, quantized: QuantizedWeight) -> QuantizedWeight:
    """Return `quantized` with a scale of zero for each group of `weight` `(O, I)` that is all zero.

    A fit gives such a group the smallest scale instead, and its values are tiny but not zero. In
    the row of a padding token that difference grows with each RMSNorm. Scales of a byte, which hold
    no zero, and scales of low rank stay as they are.
    """
    scales = quantized.scales
    if scales.scales is None or scales.bits <= 8:
        return quantized
    is_zero_OG = ~weight.reshape(*scales.scales.shape, -1).any(-1)
    kept = scales._replace(scales=scales.scales.masked_fill(is_zero_OG, 0.0))
    return quantized._replace(scales=kept)


def sample_rows(weight: Tensor, num_weights: int, mass: Tensor | None = None) -> Tensor:
    """Return ascending row numbers `(n,)` that hold about `num_weights` weights, or all rows.

    The same for every weight of one shape, if not drawn in proportion to their `mass` `(O,)`.
    """
    O, I = weight.shape
    count = -(-num_weights // I)
    if count >= O:
        return torch.arange(O, device=weight.device)
    luck = torch.Generator().manual_seed(0)
    if mass is None:
        drawn = torch.randperm(O, generator=luck)[:count]
    else:
        drawn = torch.multinomial(mass.cpu().double(), count, generator=luck)
    return drawn.sort().values.to(weight.device)


def weighted_error(weight: Tensor, quantized: QuantizedWeight, importance: Tensor) -> float:
    """Return `sum importance * (weight - dequantized)**2`."""
    return (importance * (weight - dequantize(quantized)) ** 2).sum().item()


def refit_scales(weight: Tensor, levels: Tensor, importance: Tensor, old: Scales) -> Scales:
    """Return the least-squares scales for codebook values `levels` `(O, I)`, in `old`'s form."""
    if old.scales is None:
        return fit_low_rank(weight, levels, importance, old)
    return old._replace(scales=fit_group_scales(weight, levels, importance, old.scales))


def refit_levels(
    weight: Tensor, S: Tensor, importance: Tensor, indices: Tensor, *, old: Tensor
) -> Tensor:
    """Return the least-squares levels `(C,)` for the given indices; unused levels stay `old`.

    `l_c = sum(h S w) / sum(h S^2)` over the places whose index is `c`. They ascend if the indices
    are the nearest ones.
    """
    place, weighted = indices.int(), importance * S
    if old.dim() > 1:  # each entry of a codeword is a level of its own
        d = old.shape[1]
        place = place[..., None] * d + torch.arange(d, dtype=torch.int32, device=old.device)
    sums = [
        torch.bincount(
            place.flatten(), (weighted * other).flatten().double(), minlength=old.numel()
        )
        for other in (weight, S)
    ]
    found = torch.where(sums[1] > 0, sums[0] / sums[1], old.flatten().double())
    return found.float().view(old.shape)


def settle(
    weight: Tensor,
    scales: Scales,
    levels: Tensor,
    spec: LutSpec,
    *,
    nearest: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> QuantizedWeight:
    """Return the weight as a checkpoint stores it: scales are rounded before indices are found."""
    if spec.codebook == "lut":
        scales, levels = normalize(scales, levels)
    stored = as_stored(QuantizedWeight(torch.empty(0), levels, above_zero(scales)))
    S = expand_scales(stored.scales, weight.shape[1])
    return stored._replace(indices=nearest(weight, S, stored.codebook))


def normalize(scales: Scales, levels: Tensor) -> tuple[Scales, Tensor]:
    """Return the same product with the largest level at magnitude 1 and its size in the scales."""
    size = levels.abs().max().clamp_min(TINY)
    name = "scales" if scales.scales is not None else "rank_gain"
    return scales._replace(**{name: getattr(scales, name) * size}), levels / size


def _alternate(weight: Tensor, h: Tensor, spec: LutSpec, rows: Tensor | None) -> QuantizedWeight:
    """Alternate indices, levels and scales; k-means uses only `rows` (None for all)."""
    scales = _start_scales(weight, spec)
    levels = fixed_grid(spec)
    if levels is None:
        S = expand_scales(scales, weight.shape[1])
        seen = slice(None) if rows is None else rows
        levels = _start_levels(weight[seen], S[seen], h[seen], spec.num_levels)
    levels = levels.to(weight.device)
    best, least = cast(QuantizedWeight, None), float("inf")  # always replaced in the first round
    for _ in range(ROUNDS):
        S = expand_scales(scales, weight.shape[1])
        indices = _nearest(weight, S, levels)
        if spec.codebook == "lut":
            levels = refit_levels(weight, S, h, indices, old=levels)
        scales = refit_scales(weight, levels[indices.int()], h, scales)
        candidate = settle(weight, scales, levels, spec, nearest=_nearest)
        error = weighted_error(weight, candidate, h)
        if error < least:
            best, least = candidate, error
    return best


def _fit_codewords(
    weight: Tensor, h: Tensor, spec: LutSpec, *, nearest: Nearest, mass: Tensor | None
) -> QuantizedWeight:
    """Do what `_alternate` does for codebooks of vectors.

    Codewords start from a sample; the rounds use all rows. A round ends with one search for the
    nearest codewords, which takes nearly all the time.
    """
    I, d = weight.shape[1], spec.vector_size

    def weighted(weight: Tensor, S: Tensor, codebook: Tensor) -> Tensor:
        return nearest(weight, S, codebook, h)

    scales = _start_scales(weight, spec)
    S = expand_scales(scales, I)
    codebook = fixed_grid(spec)
    if codebook is None:
        rows = sample_rows(weight, max(SAMPLE, VECTORS_EACH * d * spec.num_levels), mass)
        codebook = _start_codewords(weight[rows], S[rows], h[rows], spec=spec, nearest=nearest)
    codebook = codebook.to(weight.device)
    h = h if mass is None else h * mass.to(h.device)[:, None]
    best = now = settle(weight, scales, codebook, spec, nearest=weighted)
    least = weighted_error(weight, best, h)
    for _ in range(ROUNDS_OF_VECTORS):
        S = expand_scales(now.scales, I)
        if spec.codebook == "lut":
            codebook = refit_levels(weight, S, h, now.indices, old=now.codebook)
        chosen = chosen_levels(now._replace(codebook=codebook))
        scales = refit_scales(weight, chosen, h, now.scales)
        now = settle(weight, scales, codebook, spec, nearest=weighted)
        error = weighted_error(weight, now, h)
        if error < least:
            best, least = now, error
    return best


def _follow(weight: Tensor, h: Tensor, levels: Tensor, start: Scales) -> QuantizedWeight:
    """Find scales and indices of all rows under fixed levels, from the group scales `start`."""
    O, I = weight.shape
    start_OG = start.by_group()
    scales, indices = torch.empty_like(start_OG), torch.empty_like(weight, dtype=torch.uint8)
    size = max(1, (PIECE_IN_CACHE if weight.device.type == "cpu" else PIECE) // I)
    for piece in (slice(start, start + size) for start in range(0, O, size)):
        own = start._replace(scales=start_OG[piece])
        for _ in range(ROUNDS_OF_ALL_ROWS):
            chosen = _nearest(weight[piece], expand_scales(own, I), levels)
            own = refit_scales(weight[piece], levels[chosen.int()], h[piece], own)
        if start.bits == POWERS:
            own = _best_powers(weight[piece], h[piece], levels, own)
        own = round_scales(above_zero(own))
        scales[piece] = own.by_group()
        indices[piece] = _nearest(weight[piece], expand_scales(own, I), levels)
    return QuantizedWeight(indices, levels, start._replace(scales=scales))


def _best_powers(weight: Tensor, h: Tensor, levels: Tensor, near: Scales) -> Scales:
    """Return the power of two of least error for each group: the nearest one, its half or double.

    Under other scales weights have other levels, so the nearest one is often not the best.
    """
    nearest = round_scales(above_zero(near)).by_group()
    tried = torch.stack([nearest / 2, nearest, nearest * 2]).clamp_max(2.0**15)
    errors = []
    for each in tried:
        S = expand_scales(round_scales(near._replace(scales=each)), weight.shape[1])
        left = weight - levels[_nearest(weight, S, levels).int()] * S
        errors.append((h * left**2).view(*each.shape, -1).sum(-1))
    best = torch.stack(errors).argmin(0, keepdim=True)
    return near._replace(scales=tried.gather(0, best)[0])


def _nearest(weight: Tensor, S: Tensor, levels: Tensor) -> Tensor:
    return nearest_level(torch.where(S == 0, 0.0, weight / S), levels)


def _start_scales(weight: Tensor, spec: LutSpec) -> Scales:
    groups = absmax_scales(weight, spec.group_size)
    levels = fixed_grid(spec)
    if levels is not None and spec.codebook != "seq":  # the levels of seq lie within -1 ... 1
        groups = groups / levels.abs().max().item()
    if spec.scale == "group":
        return Scales(scales=groups, bits=spec.scale_bits)
    S = groups.repeat_interleave(spec.group_size, dim=1)
    return low_rank_start(S, spec.rank)._replace(bits=spec.scale_bits)


def _start_levels(weight: Tensor, S: Tensor, importance: Tensor, num_levels: int) -> Tensor:
    # an error of the scaled weight counts S^2 times as much in the weight itself
    values = torch.where(S == 0, 0.0, weight / S).flatten()
    mass = (importance * S**2).flatten()
    found = weighted_kmeans(values.cpu().double().numpy(), mass.cpu().double().numpy(), num_levels)
    return torch.from_numpy(found).float()


def _start_codewords(
    weight: Tensor, S: Tensor, importance: Tensor, *, spec: LutSpec, nearest: Nearest
) -> Tensor:
    """Return codewords `(C, d)` by k-means under fixed scales."""
    d = spec.vector_size
    values, mass = torch.where(S == 0, 0.0, weight / S), importance * S**2
    codebook = start_codewords(values.view(-1, d), mass.view(-1, d), spec.num_levels)
    for _ in range(LLOYD_STEPS):
        indices = nearest(weight, S, codebook, importance)
        codebook = refit_levels(weight, S, importance, indices, old=codebook)
    return codebook
