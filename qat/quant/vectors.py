"""Fit a weight to a codebook of vectors: an index names d neighbouring weights of a row.

The rounds and sweeps are those of scalar levels (`fit`, `error_feedback`). This module has what
differs: the initial codewords, the best codeword of a vector, and the blocks of a sweep.

The error of a vector counts by a symmetric `(d, d)` metric G. With w the vector's target and S its
scales, the best codeword c minimises `(w - S c)^T G (w - S c)`, so it maximises `(S G w) . c - (S
c)^T G (S c) / 2`: one matmul of all vectors with all codewords and the products of their entries.
Where a weight is fitted alone, G is the importance of each feature. Against `H = mean(x x^T)` it is
what H leaves of the vector's columns (GPTVQ, arXiv:2402.15319).

Shapes: O rows, I in_features, N vectors, d weights of a vector, C codewords, B columns of a block.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from qat.quant.codebook import best_codewords

PIECE = 2**17  # weights whose nearest codewords are found at a time
SEED_POOL = 4096  # the least vectors that seeds are drawn from; twice the codewords if that is more
SEED_SHARE = 32
"""A round draws one new seed for every so many existing ones. On real weights the fit then errs as
much as with seeds drawn one by one with 7 trials each, as scikit-learn does."""
SEED_TRIALS = 3  # candidates drawn for each seed that is kept


def start_codewords(vectors: Tensor, mass: Tensor, num_codewords: int) -> Tensor:
    """Return initial codewords `(C, d)`: vectors far from each other, drawn by k-means++.

    The result is deterministic for the same vectors on the same device: scikit-learn draws the
    seeds one by one on a CPU, `seeds_in_rounds` draws them elsewhere. `vectors` and `mass`, the
    weight of an error, are `(N, d)`. With fewer vectors than codewords the spare codewords repeat a
    vector.
    """
    count = min(len(vectors), max(SEED_POOL, 2 * num_codewords))
    drawn = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))[:count]
    drawn = drawn.to(vectors.device)
    pool, weights = vectors[drawn].double(), mass[drawn].double().mean(1)
    weights = torch.where(weights.sum() > 0, weights, 1.0)
    num_seeds = min(num_codewords, count)
    if vectors.device.type == "cpu":
        from sklearn.cluster import kmeans_plusplus

        drawing = {"sample_weight": weights.numpy(), "random_state": 0}
        found = torch.from_numpy(kmeans_plusplus(pool.numpy(), num_seeds, **drawing)[0])
    else:
        found = seeds_in_rounds(pool, weights, num_seeds)
    return torch.cat([found, found[-1:].expand(num_codewords - num_seeds, -1)]).float()


def seeds_in_rounds(pool: Tensor, weights: Tensor, num_seeds: int) -> Tensor:
    """Run k-means++ in growing rounds: the more seeds there are, the more a round adds.

    It never synchronizes with the device. A vector is drawn by its weighted squared distance from
    the seeds so far; of the candidates of a round, those are kept that leave the least of it.

    Args:
        pool: `(N, d)` float64.
        weights: `(N,)`, weights of the errors, not all zero.
        num_seeds: at most N.
    """
    sizes: list[int] = []
    while (drawn := sum(sizes)) < num_seeds:
        sizes.append(min(max(1, drawn // SEED_SHARE), num_seeds - drawn))
    count = len(pool)
    squares = pool.square().sum(1, keepdim=True)
    one = torch.ones_like(squares)
    # a row of `here` times a row of `there` is the squared distance of two vectors
    here, there = torch.cat([pool, squares, one], 1), torch.cat([-2 * pool, one, squares], 1)
    left = (4 * squares.max()).expand_as(squares)  # an upper bound on every squared distance
    near, seeds = weights, []
    for size, lot in zip(sizes, _luck(len(sizes), count, pool.device), strict=True):
        # sampling without replacement: the top-k of weights over exponential noise
        tried = (near / lot).topk(min(SEED_TRIALS * size, count)).indices
        left_by_each = torch.minimum(here @ there[tried].T, left)
        kept = (weights @ left_by_each).topk(size, largest=False).indices
        left = left_by_each[:, kept].amin(1, keepdim=True)
        near = weights * left[:, 0]
        seeds.append(tried[kept])
    return pool[torch.cat(seeds)]


@lru_cache(maxsize=8)
def _luck(rounds: int, count: int, device: torch.device) -> Tensor:
    """Return the noise of all rounds, `(rounds, N)`, drawn on the host once for a format."""
    noise = torch.empty(rounds, count, dtype=torch.float64)
    return noise.exponential_(generator=torch.Generator().manual_seed(0)).to(device)


Nearest = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # `nearest_vectors`, or a kernel


def nearest_vectors(weight: Tensor, S: Tensor, codebook: Tensor, importance: Tensor) -> Tensor:
    """Return the codeword of least `sum_j h_j (w_j - S_j c_j)^2` for each vector, `(O, I / d)`.

    This is for fits: where two codewords differ only by rounding, either may be returned.
    """
    (O, I), d = weight.shape, codebook.shape[1]
    entries = torch.cat([codebook, codebook**2], dim=1).T
    size = max(1, PIECE // I)
    found = []
    for w, s, h in zip(weight.split(size), S.split(size), importance.split(size), strict=True):
        weighted = h * s
        parts = (weighted * w, (weighted * s).mul_(-0.5))
        found.append(best_codewords(torch.cat([p.view(-1, d) for p in parts], dim=1), entries))
    return torch.cat(found).view(O, I // d)


# Sweeps over columns, as for levels but with blocks of d columns in place of columns: H over the
# blocks of its diagonal is the coupling, and those blocks are the metric.


def upper_factor(H: Tensor) -> Tensor:
    """Return the upper triangular F of `H = F F^T` in float64.

    H must be positive definite in float64, as `error_feedback.damped` makes it. Real inputs have a
    few channels 10^4 times as strong as the others; in float32 the others would be lost to
    rounding.
    """
    # the Cholesky factor of H with rows and columns reversed
    return torch.linalg.cholesky(H.double().flip(0, 1)).flip(0, 1)


def feedback_of_blocks(H: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Return coupling `(I, I)`, zero in and above the diagonal blocks, and metric `(I, d)`.

    With `H = M D M^T`, M unit upper and D block diagonal, `tr(R H R^T)` is the sum over the blocks
    k of the energy of `R M[:, k]` under `D_k`: see `error_feedback.feedback_coupling`.
    """
    factor = upper_factor(H)
    own = diagonal_blocks(factor, d)
    coupling = torch.linalg.solve_triangular(
        own.mT, factor.T.reshape(-1, d, len(H)), upper=False
    ).reshape(H.shape)
    return _without_blocks(coupling, d).float(), (own @ own.mT).float().flatten(0, 1)


def descent_of_blocks(H: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Return coupling `(I, I)`, zero in the diagonal blocks, and metric `(I, d)` for descent."""
    own = diagonal_blocks(H, d)
    coupling = torch.linalg.solve(own.double(), H.double().reshape(-1, d, len(H)))
    return _without_blocks(coupling.float().reshape(H.shape), d), own.flatten(0, 1)


def diagonal_blocks(matrix: Tensor, d: int) -> Tensor:
    """Return the `(I / d, d, d)` blocks on the diagonal."""
    n = len(matrix) // d
    return matrix.view(n, d, n, d).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def _without_blocks(matrix: Tensor, d: int) -> Tensor:
    n = len(matrix) // d
    matrix.view(n, d, n, d).diagonal(dim1=0, dim2=2).zero_()
    return matrix


Pulls = Callable[[int, Tensor], Tensor]
"""Maps a block's number and its targets `(d, O)` to the pulls `(K, O)` on its codewords."""


def pulls_of_groups(codebook: Tensor, metric: Tensor, scales: Tensor) -> tuple[Pulls, Tensor]:
    """Return pulls and entries for vectors whose weights share a scale S.

    The score, divided by S, is `t^T G c - S c^T G c / 2`. `metric` is `(B / d, d, d)`, `scales`
    `(B, O)`. Entries are `(B / d, d + 1, C)`.
    """
    d = codebook.shape[1]
    turned = (codebook.double() @ metric.double()).float()
    halves = (turned * codebook).sum(-1, keepdim=True) / -2
    entries = torch.cat([turned, halves], dim=2).mT
    return lambda block, target: torch.cat([target, scales[block * d, None]]), entries


def pulls_of_columns(codebook: Tensor, metric: Tensor, scales: Tensor) -> tuple[Pulls, Tensor]:
    """Return pulls and entries `(B / d, K, C)` for vectors whose weights each have a scale."""
    d = codebook.shape[1]
    first, second = torch.triu_indices(d, d, device=codebook.device).unbind()
    entries = torch.cat([codebook, codebook[:, first] * codebook[:, second]], dim=1).T
    counts = torch.where(first == second, -0.5, -1.0)[:, None]  # an off-diagonal pair counts twice

    def pulls(block: int, target: Tensor) -> Tensor:
        G, s = metric[block], scales[block * d : (block + 1) * d]
        pull = (G[..., None] * target).sum(1) * s
        return torch.cat([pull, counts * G[first, second, None] * s[first] * s[second]])

    return pulls, entries.expand(len(metric), -1, -1)
