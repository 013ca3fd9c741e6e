"""Codebooks: fixed grids, levels learned from the weights, and search for the nearest level.

`nearest_level` is for fits, which may synchronize with the device; `nearest_indices` and
`latent_indices` are for training steps, which may not.

Levels are learned by importance-weighted k-means in one dimension. Lloyd's algorithm alone ends up
to 20 % above the optimum at 16 levels, so it starts from an exact solution: the values go into a
histogram, a dynamic programme finds the best split of its bins, and Lloyd's steps polish the
centres on a finer histogram. The points of the histogram ascend, so prefix sums give the exact mean
of every run and a step costs C binary searches. Where a few values lie so far out that the rest
shares a few bins of the histogram, all values are sorted instead.

Shapes: O out_features, I in_features, N values, B bins, C levels.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qat.backend.device import on
from qat.quant.spec import LutSpec
from qat.quant.weight import index_dtype

SCORES_IN_CACHE, SCORES = 2**18, 2**26  # computed at a time, on a CPU and on other devices
FEW = 16  # up to this many levels, comparing with each is faster than searching
BINS = 2**13  # bins that the search for the midpoints between levels uses
START_BINS = 1536  # bins of the histogram that the exact start splits
POLISH_BINS = 65536  # bins of the finer histogram for Lloyd's steps
POLISH_STEPS = 300  # the most Lloyd's steps; they stop earlier when no level moves
CAPPED = 8  # rounds that cap gaps wider than one bin, which leaves more bins for the others
MOST_INSIDE = 1e-4  # share of the error within bins, where levels cannot separate values

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # the floats of this name from 0

Array = NDArray[Any]


def fixed_grid(spec: LutSpec) -> Tensor | None:
    """Return the ascending levels of a fixed grid, float32 `(C,)`; None for a learned LUT.

    Of vectors they are codewords `(32, 4)`: any three signs around one zero (Sherry's 3:4 sparsity,
    arXiv:2601.07892).

    seq: evenly spaced, symmetric, no zero (ParetoQ, arXiv:2502.02631): `(2c + 1 - C) / C`.
    int: `-2**(bits-1) ... 2**(bits-1) - 1`. ternary: `-1, 0, 1`. e2m1: floats of that name, with
    both signs and one zero.
    """
    C = spec.num_levels
    if spec.codebook == "lut":
        return None
    if spec.vector_size > 1:
        signs, zero = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3), torch.zeros(8, 1)
        return torch.cat([torch.cat([signs[:, :p], zero, signs[:, p:]], 1) for p in range(4)])
    if spec.codebook == "seq":
        return (2 * torch.arange(C) + 1 - C) / C
    if spec.codebook == "int":
        return torch.arange(-(C // 2), C // 2).float()
    if spec.codebook == "e2m1":
        return torch.cat([-E2M1[1:].flip(0), E2M1])
    return torch.tensor([-1.0, 0.0, 1.0])


def nearest_level(values: Tensor, levels: Tensor) -> Tensor:
    """Return the index, uint8, of the nearest of ascending `levels` `(C,)` for each value.

    Equals `torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)`, and on a CPU takes a fraction
    of its time. A GPU runs it as one kernel, where the others launch dozens.
    """
    middles = (levels[1:] + levels[:-1]) / 2
    if values.is_cuda:
        return torch.bucketize(values.contiguous(), middles, out_int32=True).to(torch.uint8)
    if len(levels) > FEW:
        return _search(values, middles)
    return _compared(values, middles)


def nearest_indices(weight: Tensor, S: Tensor, levels: Tensor) -> Tensor:
    """Return the index of the level that times `S` is nearest to each weight: `(O, I)` uint8.

    `levels` must ascend. Where `S` is zero the choice does not matter; it is the index for a zero
    weight. No gradient.
    """
    scaled = torch.where(S == 0, 0.0, weight / S)
    bounds = (levels[1:] + levels[:-1]) / 2
    if on(weight.device).is_traced:
        return _compared(scaled, bounds)
    return torch.bucketize(scaled, bounds).to(torch.uint8)


def latent_indices(weight: Tensor, S: Tensor, codebook: Tensor) -> Tensor:
    """Return what `nearest_indices` does, for levels in any order.

    Training may move one level past another. Levels are sorted for the search, and the indices are
    mapped back to the order of `codebook`. For a codebook of vectors see `nearest_codewords`. Each
    of several codebooks serves the rows that it has an equal share of.
    """
    if codebook.dim() == 3:
        return _indices_by_table(weight, S, codebook[..., 0])
    if codebook.dim() > 1:
        return nearest_codewords(weight, S, codebook)
    levels, order = codebook.sort(stable=True)
    return order.to(torch.uint8)[nearest_indices(weight, S, levels).int()]


def _indices_by_table(weight: Tensor, S: Tensor, codebooks: Tensor) -> Tensor:
    levels, order = codebooks.sort(stable=True)
    scaled = torch.where(S == 0, 0.0, weight / S).view(len(codebooks), -1)
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    if codebooks.shape[1] > FEW:
        indices = torch.searchsorted(middles, scaled)
    else:  # comparing with each is faster
        indices = torch.zeros_like(scaled, dtype=torch.int64)
        for middle in middles.split(1, dim=1):
            indices += scaled > middle
    return order.gather(1, indices).to(torch.uint8).view(weight.shape)


def nearest_codewords(weight: Tensor, S: Tensor, codebook: Tensor) -> Tensor:
    """Return the index of the codeword that times `S` is nearest to each vector: `(O, I / d)`.

    It minimises `sum_j (w_j - S_j c_j)^2`; ties go to the lowest index. Computed in float64, which
    holds the products of float16 codewords with stored scales and weights, so the result is the
    same on every device and for every piece of a weight. No gradient.

    Args:
        weight: `(O, I)`, float32 or bfloat16.
        S: `(O, I)` float32, as stored.
        codebook: `(C, d)`, float16 values in float32.
    """
    O, I = weight.shape
    d = codebook.shape[1]
    w, s, c = weight.double().reshape(-1, d), S.double().reshape(-1, d), codebook.double()
    # |w - s c|^2 is least where (w s) . c - s^2 . c^2 / 2 is largest
    pulls, entries = torch.cat([w * s, s * s * -0.5], 1), torch.cat([c, c * c], 1).T
    return best_codewords(pulls, entries).view(O, I // d)


def best_codewords(pulls: Tensor, entries: Tensor) -> Tensor:
    """Return `(pulls @ entries).argmax(1)`, `(N,)`, without all `(N, C)` scores in memory."""
    C, dtype = entries.shape[1], index_dtype(entries.shape[1])
    if pulls.device.type == "cpu":
        # numpy's argmax takes a tenth of the time of torch's
        pieces = pulls.split(max(1, SCORES_IN_CACHE // C))
        found = [torch.from_numpy((piece @ entries).numpy().argmax(1)) for piece in pieces]
    else:
        # float64, so that no device uses TF32
        entries = entries.double()
        pieces = pulls.split(max(1, SCORES // C))
        found = [(piece.double() @ entries).argmax(1) for piece in pieces]
    return (found[0] if len(found) == 1 else torch.cat(found)).to(dtype)


def _compared(values: Tensor, middles: Tensor) -> Tensor:
    """Count the ascending `middles` below each value, uint8, by comparing with each."""
    indices = torch.zeros_like(values, dtype=torch.uint8)
    for middle in middles.unbind():
        indices += values > middle
    return indices


def _search(values: Tensor, middles: Tensor) -> Tensor:
    """Count the ascending `middles` below each value, uint8, exactly.

    The range of the middles is divided into bins of equal width. The bin of a value gives the
    number of middles in lower bins; middles in the same bin, seldom more than one, are compared.
    """
    low, width = middles[0], (middles[-1] - middles[0]).clamp_min(torch.finfo(torch.float32).tiny)

    def bins(of: Tensor) -> Tensor:
        place = ((of.flatten() - low) * (BINS / width)).clamp_(0, BINS - 1)
        return place.int().clamp_(0, BINS - 1)  # NaN goes to the first bin

    in_bin = torch.bincount(bins(middles), minlength=BINS)
    indices = (in_bin.cumsum(0) - in_bin).int().index_select(0, bins(values))
    padded = torch.cat([middles, middles.new_full((1,), torch.inf)])
    for _ in range(int(in_bin.max())):
        indices += values.flatten() > padded.index_select(0, indices)
    return indices.view(values.shape).to(torch.uint8)


def weighted_kmeans(values: Array, weights: Array, num_levels: int) -> Array:
    """Return ascending levels `(C,)` that minimise the weighted squared error of `values`.

    The error is `sum_n weights_n * min_c (values_n - levels_c)**2`, and the result is within 0.01 %
    of its optimum. `values` and `weights` are `(N,)`; weights are not negative. With fewer distinct
    values than levels, the spare levels repeat the largest value.
    """
    points, mass, inside = histogram(values, weights, POLISH_BINS)
    levels = _levels_of(points, mass, num_levels)
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, points)]
    if inside <= MOST_INSIDE * (inside + (mass * (points - nearest) ** 2).sum()):
        return levels
    points, mass, _ = histogram(values, weights, len(values))
    return _levels_of(points, mass, num_levels)


def _levels_of(points: Array, mass: Array, num_levels: int) -> Array:
    """Return what `weighted_kmeans` does, for ascending points with mass."""
    if len(points) <= num_levels:
        return np.pad(points, (0, num_levels - len(points)), mode="edge")
    start_points, start_mass = coarser(points, mass, START_BINS)
    start = best_split(start_points, start_mass, min(num_levels, len(start_points)))
    start = np.pad(start, (0, num_levels - len(start)), mode="edge")
    return polish(points, mass, start, POLISH_STEPS)


def histogram(values: Array, weights: Array, num_bins: int) -> tuple[Array, Array, float]:
    """Return the weighted mean and the total weight of each bin that is not empty, ascending.

    Bins have equal width over the range of the values; up to `num_bins` values are kept as they
    are. If all weights are zero, all values count alike. The third result is the weighted squared
    error inside the bins.
    """
    if not weights.any():
        weights = np.ones_like(weights)
    keep = weights > 0
    values, weights = values[keep], weights[keep]
    if len(values) <= num_bins:
        points, place = np.unique(values, return_inverse=True)
        return points, np.bincount(place, weights), 0.0
    low, high = values.min(), values.max()
    width = (high - low) / num_bins or 1.0
    place = np.minimum(((values - low) / width).astype(np.int64), num_bins - 1)
    mass = np.bincount(place, weights, minlength=num_bins)
    total = np.bincount(place, weights * values, minlength=num_bins)
    full = mass > 0
    means = np.divide(total, mass, out=total, where=full)
    inside = (weights * (values - means[place]) ** 2).sum()
    return means[full], mass[full], inside


def coarser(points: Array, mass: Array, num_bins: int) -> tuple[Array, Array]:
    """Merge ascending points with mass into fewer: the means and masses of bins of equal share.

    The loss is least when the width of a bin falls with the cube root of the density (Panter and
    Dite 1951), so a gap counts by its width to the power 2/3 and the mass around it to the power
    1/3, but never for more than one bin: neither a long tail nor a dense middle is left with few
    bins.
    """
    if len(points) <= num_bins:
        return points, mass
    share = np.cbrt((mass[1:] + mass[:-1]) * np.diff(points) ** 2)
    for _ in range(CAPPED):
        share = np.minimum(share, share.sum() / num_bins)
    place = np.append(0.0, share.cumsum() * (num_bins / share.sum())).astype(np.int64)
    firsts = np.flatnonzero(np.diff(place, prepend=-1))
    total = np.add.reduceat(mass, firsts)
    return np.add.reduceat(mass * points, firsts) / total, total


def best_split(points: Array, mass: Array, num_levels: int) -> Array:
    """Split ascending `points` `(B,)` into `num_levels` runs in the best way; return their centres.

    With `cost(i, j)` the weighted squared error of `points[i:j]` around its mean, fills `best[m, j]
    = min_i best[m - 1, i] + cost(i, j)` row by row in O(C B log B). Exact.
    """
    centre = np.average(points, weights=mass)
    # centred, so that differences of squares do not cancel
    sums = _prefix_sums(points - centre, mass)
    B = len(points)
    best = np.concatenate([[np.inf], _cost(sums, np.zeros(B, int), np.arange(1, B + 1))])
    cuts = []
    for _ in range(num_levels - 1):
        best, cut = _add_run(best, sums)
        cuts.append(cut)
    ends = [B]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    edges = np.array([0, *reversed(ends)])
    W, S, _ = sums[:, edges[1:]] - sums[:, edges[:-1]]
    return centre + S / W


def _prefix_sums(points: Array, mass: Array) -> Array:
    """Return sums of mass, mass * x and mass * x^2 over the first 0 ... B points, `(3, B + 1)`."""
    terms = np.stack([mass, mass * points, mass * points**2])
    return np.pad(terms.cumsum(1), ((0, 0), (1, 0)))


def _cost(sums: Array, start: NDArray[np.int64], end: NDArray[np.int64]) -> Array:
    W, S, Q = sums.take(end, 1) - sums.take(start, 1)
    return Q - S**2 / W


def _add_run(best: Array, sums: Array) -> tuple[Array, NDArray[np.int64]]:
    """Extend the least cost of each prefix by one run; also return where that run starts.

    The best start moves right as the prefix grows, so every second prefix is bounded by its solved
    neighbours: strides 2^d ... 2, 1 search about B starts each.
    """
    B = len(best) - 1
    fresh, cut = np.full(B + 1, np.inf), np.zeros(B + 1, np.int64)
    stride = 1 << (B.bit_length() - 1)
    while stride:
        ends = np.arange(stride, B + 1, 2 * stride)
        low, after = cut[ends - stride], ends + stride
        high = np.minimum(np.where(after <= B, cut[np.minimum(after, B)], B), ends - 1)
        counts = high - low + 1
        firsts = counts.cumsum() - counts
        starts = np.arange(counts.sum()) + (low - firsts).repeat(counts)
        through = best[starts] + _cost(sums, starts, ends.repeat(counts))
        fresh[ends] = np.minimum.reduceat(through, firsts)
        hits = np.flatnonzero(through == fresh[ends].repeat(counts))
        cut[ends] = starts[hits[np.searchsorted(hits, firsts)]]
        stride //= 2
    return fresh, cut


def polish(points: Array, mass: Array, levels: Array, max_steps: int) -> Array:
    """Run Lloyd's steps on ascending weighted points from ascending `levels` until nothing moves.

    A level that is nearest to no point stays where it is.
    """
    centre = np.average(points, weights=mass)
    W, S, _ = _prefix_sums(points - centre, mass)
    levels = levels - centre
    for _ in range(max_steps):
        inner = np.searchsorted(points - centre, (levels[1:] + levels[:-1]) / 2)
        edges = np.concatenate([[0], inner, [len(points)]])
        runs, sums = np.diff(W[edges]), np.diff(S[edges])
        moved = np.divide(sums, runs, out=levels.copy(), where=runs > 0)
        if np.array_equal(moved, levels):
            break
        levels = moved
    return levels + centre
