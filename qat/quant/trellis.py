"""A trellis: an index is a window over the bits of its row, so that few bits select many levels.

Each weight adds k bits to its row, and its index is the last `bits` of these, the newest highest:

    indices[o, i] = indices[o, i - 1] >> k | own[o, i] << bits - k,    indices[o, -1] = 0

A row therefore stores k bits per weight but can use any of 2**bits levels. It is a path through as
many states, each of which has 2**k successors (QTIP, arXiv:2406.11235; Marcellin and Fischer 1990).
Viterbi's algorithm finds the path of least error. A codebook is `(C, 1)`: its order determines
which levels may follow each other. On a Gaussian, 256 states of 2 bits err by 0.0757 of its
variance, 256 codewords of four weights by 0.097, and four levels by 0.117.

Shapes: O out_features, I in_features, C states and levels, K successors of a state, U = C / K, N
rows that are processed at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LEAST_ROWS, HELD = 128, 2**24
"""The least number of rows processed at a time, and the number of costs held for these rows."""
STRIDE = 7
"""Distance between the ranks of levels whose states share their own bits. Of 5, 7, 9, 11 and 13 it
has the least error at 2 bits, 3 to 6 % less than 5 and 13."""

BLOCK, AHEAD = 32, 16
"""Columns of a path that are settled at a time, and the lookahead behind them in columns."""

Path = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""`best_path`, or a device's kernel for it."""


def start_levels(bits: int, trellis_bits: int) -> Tensor:
    """Return initial levels `(C, 1)` of a standard Gaussian, with equal mass each.

    They are ordered so that paths differ: the K successors of a state take levels from all K parts
    of the range, and so do its K predecessors. The state of zeros lies in the middle of its part,
    for the first weight of a row. On a Gaussian the levels err by 0.077 before they are refitted;
    levels in random order err by 0.089.
    """
    K, rest = 2**trellis_bits, 2 ** (bits - trellis_bits)
    state = torch.arange(2**bits)
    own, older = state // rest, state % rest
    rank = (own + older) % K * rest + (STRIDE * older + rest // 2) % rest
    return torch.special.ndtri((rank.double() + 0.5) / len(state)).float()[:, None]


def best_path(weight: Tensor, S: Tensor, codebook: Tensor, trellis_bits: int) -> Tensor:
    """Return each row's path of least `sum_i (w_i - S_i codebook[indices_i])^2`: `(O, I)` uint8.

    Where two paths into a state have equal error, the one with the lower previous state survives,
    so the result is the same on every device and for every piece of a weight. Computed in float32,
    each product and sum rounded on its own. To weight errors by an importance h, multiply both
    `weight` and `S` by its square root.

    Args:
        weight: `(O, I)`, float32 or bfloat16.
        S: `(O, I)` float32.
        codebook: `(C, 1)` float32.
        trellis_bits: k, where K = 2**k.
    """
    O, I = weight.shape
    K, U = 2**trellis_bits, len(codebook) // 2**trellis_bits
    levels = codebook.view(K, U, 1)
    found = torch.empty(I, O, dtype=torch.uint8, device=weight.device)
    size = min(O, max(LEAST_ROWS, HELD // (I * U)))
    # `[i, u]`: least cost before weight i over the K consecutive states with the same successors u
    room = torch.empty(I, U, size, device=weight.device)
    each = torch.arange(K, device=weight.device)[:, None]
    for start in range(0, O, size):
        rows = slice(start, start + size)
        w_IN, s_IN = weight[rows].float().T.contiguous(), S[rows].T.contiguous()
        N = w_IN.shape[1]
        least = room[..., :N]
        least[0] = torch.inf
        least[0, 0] = 0.0
        cost = torch.empty(K, U, N, device=weight.device)
        for w, s, now, after in zip(w_IN, s_IN, least, [*least[1:], None], strict=True):
            torch.mul(levels, s, out=cost)
            torch.sub(w, cost, out=cost).square_().add_(now)
            if after is not None:
                first, *others = cost.view(U, K, N).unbind(1)
                for other in others:  # several times faster than `amin`
                    first = torch.minimum(first, other, out=after)
        state = cost.view(K * U, N).argmin(0, keepdim=True)
        found[-1, rows] = state[0]
        for i in range(I - 2, -1, -1):  # recompute the costs of the K predecessors, bit-exact
            before = state % U * K + each
            cost = (w_IN[i] - s_IN[i] * codebook[before, 0]).square_()
            cost.add_(least[i].gather(0, before % U))
            state = before.gather(0, cost.argmin(0, keepdim=True))
            found[i, rows] = state[0]
    return found.T.contiguous()


def feedback_path(
    weight: Tensor,
    S: Tensor,
    codebook: Tensor,
    trellis_bits: int,
    *,
    coupling: Tensor,
    metric: Tensor,
) -> Tensor:
    """Return paths `(O, I)` on which later columns compensate for every error, as in GPTQ.

    The target of column i is `w_i + sum_j coupling_ij r_j`, where r are the residuals of the
    columns before, and its error counts by `metric_i`. Each surviving path has residuals of its own
    (per-survivor processing, Raheli, Polydoros and Tzou 1995). The best path is settled for `BLOCK`
    columns at a time, after a lookahead of `AHEAD` columns. On one weight of 256 x 256 and its
    inputs, blocks of 32 with 16 ahead left 0.0179 of the output's square, 64 with 16 ahead 0.0176,
    16 with 8 ahead 0.0194, and paths that only used the residuals of earlier blocks 0.0205
    (speedrun/LOG.md).

    Args:
        weight, S, codebook, trellis_bits: as in `best_path`; float32.
        coupling: `(I, I)`, strictly lower triangular.
        metric: `(I,)`, positive.
    """
    I, K = weight.shape[1], 2**trellis_bits
    U = len(codebook) // K
    levels, first = codebook.view(K, U, 1), torch.arange(U, device=weight.device)[:, None] * K
    pieces = []
    size = max(LEAST_ROWS, HELD // (BLOCK * I))
    for w_NI, s_NI in zip(weight.split(size), S.split(size), strict=True):
        w_IN, s_IN = w_NI.T.contiguous(), s_NI.T.contiguous()
        N = w_IN.shape[1]
        residual = torch.empty_like(w_IN)
        found = torch.empty(I, N, dtype=torch.uint8, device=weight.device)
        state = torch.zeros(1, N, dtype=torch.int64, device=weight.device)
        for start in range(0, I, BLOCK):
            settled, end = min(start + BLOCK, I), min(start + BLOCK + AHEAD, I)
            target = torch.addmm(w_IN[start:end], coupling[start:end, :start], residual[:start])
            least = torch.full((U, N), torch.inf, device=weight.device)
            least.scatter_(0, state // K, 0.0)
            states = torch.empty(end - start, U, N, dtype=torch.uint8, device=weight.device)
            # residuals of the best path to each of U, in the columns so far
            left = torch.empty(end - start, U, N, device=weight.device)
            for i, own in enumerate(states, start):
                past = left[: i - start]
                aim = (coupling[i, start:i] @ past.flatten(1)).view(U, N) + target[i - start]
                cost = (aim - levels * s_IN[i]).square_().mul_(metric[i]).add_(least)
                least, taken = cost.view(U, K, N).min(1)
                # the K predecessors of a state hold their histories in K consecutive rows;
                # selecting among them is several times faster than a gather
                pasts = past.view(len(past), 1, U // K, K, N).unbind(3)
                moved, which = pasts[0], taken.view(K, U // K, N)
                for one in range(1, K):
                    moved = torch.where(which == one, pasts[one], moved)
                past.view(len(past), K, U // K, N).copy_(moved)
                torch.add(first, taken, out=taken)
                own.copy_(taken)
                torch.sub(w_IN[i], s_IN[i] * codebook[taken, 0], out=left[i - start])
            state = states[-1].gather(0, least.argmin(0, keepdim=True)).long()
            for i in range(end - 1, start - 1, -1):
                found[i] = state[0]
                if i > start:
                    state = states[i - 1 - start].gather(0, state % U).long()
            state = found[settled - 1 : settled].long()
            chosen = codebook[found[start:settled].long(), 0]
            residual[start:settled] = w_IN[start:settled] - s_IN[start:settled] * chosen
        pieces.append(found.T)
    return torch.cat(pieces).contiguous()
