"""Chosen logits and log-sum-exp of an output embedding, without the logits of all tokens and words.

A loss reads the logits of a few chosen words and the log-sum-exp over the other words. Both, and
their gradients, come from the hidden states and the head's weight alone. On a GPU cuBLAS computes
the matmuls and Triton everything else, and memory does not grow with V.

Shapes: T tokens, D model width, V vocabulary, N chosen words, K of them excluded from the others.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.kernels.dispatch import tl, triton, use_triton
from qat.kernels.tuned import chosen

BLOCK_TOKENS = 1024
"""Rows of logits in memory at a time in plain PyTorch: 0.6 GB in float32 at V = 152,000."""

BLOCK_WORDS = 8192
"""Words whose weights are cast at a time."""

TILE_TOKENS = 8192
"""Tokens per tile of logits.

With it the exact loss of 32,768 tokens took 44.2 ms; tiles of 1,024 and 2,048 tokens, which stay in
the L2 cache, took 52.0 and 47.1 ms (one H200, Qwen3-0.6B's head).
"""

TILE_WORDS = 8192
"""Words per tile of logits: a power of two, since a program holds a token's tile in registers."""

PEAK_SLACK = tl.constexpr(8.0)
"""Nats by which a logit may exceed `peak` before the peak moves: `exp(8)` loses no precision in any
dtype, and the sums so far seldom have to be rescaled."""

ADDS_IN_FLOAT32 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
"""True if `addmm` can add products of half-precision matrices to a float32 matrix."""


class Gather(NamedTuple):
    """The piece of the chosen words' weights that a program holds in registers."""

    words: int = 16
    """Words per piece, a power of two, as are the features; tuned tables are 1.3 to 2.3 times
    faster."""
    features: int = 256
    warps: int = 4


class Head(NamedTuple):
    """An output embedding: `logits = hidden @ weight.T + bias`, optionally with a soft cap."""

    weight: Tensor
    """`(V, D)`, of any float dtype."""
    bias: Tensor | None = None
    """`(V,)`"""
    softcap: float | None = None
    """`logits = softcap * tanh(logits / softcap)`"""
    take_rows: Callable[[slice, Tensor], None] | None = None
    """Takes the gradient of some rows of the weight, `(words, D)`, in place of autograd."""
    skips_unnamed: bool = False
    """True if words that no token names get no gradient of the weight."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits, `(..., D)` to `(..., V)`, in the dtype of `hidden`."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return self.capped(F.linear(hidden, self.weight.to(hidden.dtype), bias))

    def capped(self, logits: Tensor) -> Tensor:
        """Apply the soft cap, if there is one, to logits of any shape."""
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    @torch.no_grad()
    def exact_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `(..., D)` to `(..., V)` of 16-bit factors, with unrounded sums.

        Rounded to bfloat16, a third of the neighbours among a token's most likely words would be
        tied. On CUDA one matmul writes float32; elsewhere the weight is cast in pieces.
        """
        rows = hidden.flatten(0, -2)
        if rows.is_cuda:
            logits = torch.mm(rows, self.weight.T, out_dtype=torch.float32)
        else:
            states, pieces = rows.float(), self.weight.split(BLOCK_WORDS)
            logits = torch.cat([states @ piece.float().T for piece in pieces], 1)
        if self.bias is not None:
            logits += self.bias
        return self.capped(logits).unflatten(0, hidden.shape[:-1])

    def words(self, start: int, stop: int) -> "Head":
        """Return the head restricted to the words `start` to `stop`."""
        bias = None if self.bias is None else self.bias[start:stop]
        return Head(self.weight[start:stop], bias, self.softcap)


class Others(NamedTuple):
    """The words outside the excluded ones, as one outcome."""

    lse: Tensor | None
    """`(T,)`: log-sum-exp of their logits; -inf if there are none, None if not computed."""
    slope: Tensor | None
    """`(T, D)`: the gradient of `lse` with respect to the hidden state; 0 if there are none.

    Without a soft cap: the mean of `weight[v]` under the softmax over these words.
    """


def wide(tensor: Tensor) -> Tensor:
    """Convert a tensor to the dtype of losses: float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def chosen_logits(hidden: Tensor, head: Head, ids: Tensor) -> Tensor:
    """Return `head.logits(hidden).gather(1, ids)`, `(T, N)` float32 (float64 stays).

    Sums are computed in float32 for all dtypes. An id below 0 is absent: its logit is 0.

    Args:
        hidden: `(T, D)`.
        head: the output embedding.
        ids: `(T, N)` int64.
    """
    if not _by_kernel(hidden):
        states, columns = wide(hidden), []
        for column in ids.clamp_min(0).unbind(1):  # word by word, so that (T, N, D) is never made
            dot = (states * head.weight[column]).sum(1)
            columns.append(dot if head.bias is None else dot + head.bias[column])
        logits = torch.stack(columns, 1) if columns else states.new_empty(ids.shape)
        return head.capped(logits).masked_fill(ids < 0, 0.0)
    hidden, ids = hidden.contiguous(), ids.contiguous()
    (T, D), N = hidden.shape, ids.shape[1]
    out = torch.empty(T, N, dtype=torch.float32, device=hidden.device)
    if out.numel() == 0:
        return out
    cut = chosen("gather_dot", (N, D), Gather(), hidden.device)
    with torch.cuda.device_of(hidden):
        _gather_dot_kernel[(T,)](
            hidden, head.weight, head.bias, ids, out, head.weight.stride(0), head.softcap or 1.0,
            N=N, D=D, HAS_BIAS=head.bias is not None, HAS_CAP=head.softcap is not None,
            BLOCK_N=cut.words, BLOCK_D=cut.features, num_warps=cut.warps,
        )  # fmt: skip
    return out


def other_words(hidden: Tensor, head: Head, excluded: Tensor, *, want_slope: bool) -> Others:
    """Return the log-sum-exp of each token's logits outside its excluded words, and its gradient.

    `lse = without(head.logits(hidden), excluded, -inf).logsumexp(1)`. No large numbers are
    subtracted, so it is accurate however little mass the others have. The head runs once for `lse`
    and once more for `slope`.

    Args:
        hidden: `(T, D)`.
        head: the output embedding.
        excluded: `(T, K)` int64; an id below 0 excludes nothing.
        want_slope: whether to compute `slope`.
    """
    if _by_kernel(hidden):
        return _others_by_kernel(hidden, head, excluded, want_slope)
    blocks = zip(hidden.split(BLOCK_TOKENS), excluded.split(BLOCK_TOKENS), strict=True)
    parts = [_others_of_block(*block, head, want_slope) for block in blocks]
    slope = torch.cat([part.slope for part in parts]) if want_slope else None
    return Others(torch.cat([part.lse for part in parts]), slope)


class LogitGradients(NamedTuple):
    """The gradient of a loss with respect to all logits of T tokens, in compact form."""

    ids: Tensor
    """`(T, N)` int64; below 0: absent."""
    chosen: Tensor
    """`(T, N)`: gradients of the logits of `ids`, before any soft cap."""
    num_excluded: int
    """The number of leading `ids` that are excluded from the others."""
    lse: Tensor | None = None
    """`Others.lse`; None if the loss does not read the others."""
    others: Tensor | None = None
    """`(T,)`: gradients of `lse`."""

    def of_rows(self, rows: slice) -> "LogitGradients":
        """Return the gradients of some tokens."""
        return LogitGradients(*(g[rows] if isinstance(g, Tensor) else g for g in self))


def hidden_gradient(
    g_logits: LogitGradients, slope: Tensor | None, weight: Tensor, *, out: Tensor
) -> None:
    """Write the gradient of the hidden states to `out`, `(T, D)` of any float dtype.

    `sum_n chosen[:, n] * weight[ids[:, n]] + others * slope`, summed in float32 (float64 stays) and
    rounded once. `slope` is `Others.slope`, None if the loss does not read the others.
    """
    if not _by_kernel(g_logits.chosen):
        ids, g_chosen = g_logits.ids, g_logits.chosen.masked_fill(g_logits.ids < 0, 0.0)
        total = torch.zeros_like(out, dtype=g_chosen.dtype)
        if slope is not None:
            total += g_logits.others[:, None] * slope
        for g, column in zip(g_chosen.unbind(1), ids.clamp_min(0).unbind(1), strict=True):
            total += g[:, None] * weight[column]
        out.copy_(total)
        return
    ids, g_chosen = g_logits.ids.contiguous(), g_logits.chosen.contiguous()
    # often a column of a wider gradient
    g_others = None if g_logits.others is None else g_logits.others.contiguous()
    (T, N), D = ids.shape, out.shape[1]
    if out.numel() == 0:
        return
    cut = chosen("gather_sum", (N, D), Gather(), out.device)
    with torch.cuda.device_of(out):
        _gather_sum_kernel[(T, triton.cdiv(D, cut.features))](
            g_chosen, ids, weight, g_others, slope, out, weight.stride(0), out.stride(0),
            N=N, D=D, HAS_OTHERS=slope is not None, BLOCK_N=cut.words, BLOCK_D=cut.features,
            num_warps=cut.warps,
        )  # fmt: skip


class HeadTile(NamedTuple):
    """The gradient of some neighbouring rows of a head."""

    start: int
    """The first word."""
    weight: Tensor
    """`(words, D)`, float32 (float64 stays)."""
    bias: Tensor | None
    """`(words,)` likewise; None without a bias."""
    is_named: Tensor | None
    """`(words,)` bool: whether `ids` of any token hold the word; None if they hold all."""


def head_gradient(
    head: Head, parts: Sequence[tuple[Tensor, LogitGradients]], into: Sequence[Tensor] = ()
) -> Iterator[HeadTile]:
    """Yield the gradient of the head's weight and bias, `BLOCK_WORDS` rows at a time.

    `dW = sum_t dlogits[t] hidden[t]^T`, in which each `parts` has hidden states `(T, D)` and the
    gradients of their logits. Logits are recomputed for a block of words at a time, so neither
    `(T, V)` nor `(V, D)` is ever made.

    `into` holds a `(T, D)` tensor for each part, if the gradient of its hidden states is wanted as
    well. `dlogits @ W` is written there when all rows have been taken, summed in float32 (float64
    stays) and rounded once.
    """
    V, D = head.weight.shape
    named = torch.zeros(V + 1, dtype=torch.bool, device=head.weight.device)
    for _, g_logits in parts:
        named.scatter_(0, _or_beyond(g_logits.ids, V).flatten(), True)
    merged = [_merged(hidden, g_logits) for hidden, g_logits in parts]
    totals = [wide(torch.zeros_like(out)) for out in into]
    for start in range(0, V, BLOCK_WORDS):
        tile = head.words(start, min(start + BLOCK_WORDS, V))
        words = tile.weight.shape[0]
        weight = wide(tile.weight.new_zeros(words, D))
        bias = None if head.bias is None else weight.new_zeros(words)
        for (hidden, _), g_logits, total in zip_longest(parts, merged, totals):
            # all tokens at once: a product of 32,768 takes 0.62 ms, four of 8,192 0.79 (one H200)
            dlogits = hidden.new_empty(hidden.shape[0], words)
            _write_logit_gradient(hidden, tile, g_logits, start, out=dlogits)
            _add_product(weight, dlogits.T, hidden)
            if total is not None:
                _add_product(total, dlogits, tile.weight.to(dlogits.dtype))
            if bias is not None:
                bias += dlogits.sum(0, dtype=bias.dtype)
        yield HeadTile(start, weight, bias, named[start : start + words])
    for out, total in zip(into, totals, strict=True):
        out.copy_(total)


def gathered(
    head: Head, tiles: Iterator[HeadTile], factor: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return `factor` times the gradients of weight and bias from their tiles, for autograd.

    There is none of a weight whose rows are taken. With `head.skips_unnamed`, rows of words that no
    token names are zeros: there is next to nothing that AdamW would not blow up, and a word that no
    text contains should stay as it is.
    """
    d_weight = None if head.take_rows else torch.empty_like(head.weight)
    d_bias = None if head.bias is None else torch.empty_like(head.bias)
    for tile in tiles:
        rows = slice(tile.start, tile.start + tile.weight.shape[0])
        if d_bias is not None and tile.bias is not None:
            d_bias[rows] = tile.bias * factor
        scale = factor
        if head.skips_unnamed and tile.is_named is not None:
            scale = factor * tile.is_named[:, None]
        weight = tile.weight.mul_(scale)
        if d_weight is not None:
            d_weight[rows] = weight
        elif head.take_rows is not None:
            head.take_rows(rows, weight)
    return d_weight, d_bias


def before_softcap(g: Tensor, logits: Tensor, softcap: float | None) -> Tensor:
    """Return the gradient before a soft cap from `g` after it; `logits` are the capped ones."""
    return g if softcap is None else g * (1 - (logits / softcap).square())


def without(values: Tensor, ids: Tensor, fill: float) -> Tensor:
    """Return `(T, V)` values with `fill` at each row's ids; ids outside 0..V-1 are ignored."""
    T, V = values.shape
    is_filled = torch.zeros(T, V + 1, dtype=torch.bool, device=values.device)
    is_filled.scatter_(1, _or_beyond(ids, V), True)
    return values.masked_fill(is_filled[:, :V], fill)


def _by_kernel(tensor: Tensor) -> bool:
    return use_triton(tensor, __name__) and tensor.dtype != torch.float64


def _others_of_block(hidden: Tensor, excluded: Tensor, head: Head, want_slope: bool) -> Others:
    logits = wide(head.logits(hidden))
    others = without(logits, excluded, -torch.inf)
    lse = others.logsumexp(1)
    if not want_slope:
        return Others(lse, None)
    # if no word is left, lse = -inf is clamped so that the shares are exp(-inf) = 0 instead of NaN
    shares = (others - lse.clamp_min(torch.finfo(lse.dtype).min)[:, None]).exp()
    shares = before_softcap(shares, logits, head.softcap)
    tiles = zip(shares.split(BLOCK_WORDS, 1), head.weight.split(BLOCK_WORDS), strict=True)
    return Others(lse, sum(shares @ weight.to(shares.dtype) for shares, weight in tiles))


class _Merged(NamedTuple):
    """`LogitGradients` in which all places of a word say the same, so that each may be written."""

    ids: Tensor
    """`(T, N)` int64; below 0: absent."""
    chosen: Tensor
    """`(T, N)` float32: the sum of the gradients of that word."""
    is_excluded: Tensor
    """`(T, N)` uint8: whether the word is excluded from the others."""
    lse: Tensor | None
    others: Tensor | None


def _merged(hidden: Tensor, g_logits: LogitGradients) -> "_Merged | LogitGradients":
    """Return what the kernel of each tile reads; plain PyTorch adds up by itself."""
    if not _by_kernel(hidden):
        return g_logits
    ids, chosen = g_logits.ids.contiguous(), g_logits.chosen.contiguous()
    summed = torch.empty_like(chosen, dtype=torch.float32)
    is_excluded = torch.empty_like(ids, dtype=torch.uint8)
    T, N = ids.shape
    with torch.cuda.device_of(hidden):
        _merge_kernel[(T,)](
            ids, chosen, summed, is_excluded, N=N, NUM_EXCLUDED=g_logits.num_excluded,
            BLOCK_N=max(16, triton.next_power_of_2(N)), num_warps=8,
        )  # fmt: skip
    others = None if g_logits.others is None else g_logits.others.contiguous()
    return _Merged(ids, summed, is_excluded, g_logits.lse, others)


def _write_logit_gradient(
    hidden: Tensor, tile: Head, g_logits: "_Merged | LogitGradients", start: int, *, out: Tensor
) -> None:
    """Write the gradient of uncapped logits of the words from `start` to `out`, `(T, words)`.

    `others * exp(logit - lse)` of the words that are not excluded, plus what is `chosen`.
    """
    if isinstance(g_logits, _Merged):
        _write_by_kernel(hidden, tile, g_logits, start, out)
        return
    for begin in range(0, hidden.shape[0], BLOCK_TOKENS):
        rows = slice(begin, begin + BLOCK_TOKENS)
        out[rows] = _logit_gradient(hidden[rows], tile, g_logits.of_rows(rows), start)


def _logit_gradient(hidden: Tensor, tile: Head, block: LogitGradients, start: int) -> Tensor:
    T, num_words = hidden.shape[0], tile.weight.shape[0]
    ids = _or_beyond(torch.where(block.ids < 0, -1, block.ids - start), num_words)
    gradient = block.chosen.new_zeros(T, num_words + 1)  # the last column collects all other ids
    if block.lse is not None and block.others is not None:
        logits = wide(tile.logits(hidden))
        shares = before_softcap((logits - block.lse[:, None]).exp(), logits, tile.softcap)
        shares = without(shares, ids[:, : block.num_excluded], 0.0)
        gradient[:, :num_words] = block.others[:, None] * shares
    return gradient.scatter_add_(1, ids, block.chosen)[:, :num_words]


def _write_by_kernel(hidden: Tensor, tile: Head, block: _Merged, start: int, out: Tensor) -> None:
    (rows, N), words = block.ids.shape, tile.weight.shape[0]
    # the gradient replaces the logits in place, rounded as those of eager PyTorch are
    if block.lse is not None:
        torch.mm(hidden, tile.weight.to(hidden.dtype).T, out=out)
    with torch.cuda.device_of(hidden):
        _logit_gradient_kernel[(rows,)](
            out, tile.bias, block.ids, block.chosen, block.is_excluded, block.lse, block.others,
            start, words, tile.softcap or 1.0,
            N=N, HAS_BIAS=tile.bias is not None, HAS_CAP=tile.softcap is not None,
            HAS_OTHERS=block.lse is not None, BLOCK_N=max(16, triton.next_power_of_2(N)),
            BLOCK_V=triton.next_power_of_2(words), num_warps=8,
        )  # fmt: skip


def _product(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write `hidden @ weight.T` to `out`, whose float32 holds sums of halves without rounding."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.T, out=out)
    else:
        torch.mm(hidden, weight.T, out_dtype=out.dtype, out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, which may be wider than they are."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif not left.is_cuda:
        total += left @ right
    elif ADDS_IN_FLOAT32:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)


def _or_beyond(ids: Tensor, size: int) -> Tensor:
    """Replace ids outside 0..size-1 by `size`."""
    return torch.where((ids < 0) | (ids >= size), size, ids)


def _others_by_kernel(hidden: Tensor, head: Head, excluded: Tensor, want_slope: bool) -> Others:
    """Compute `other_words` tile by tile, online as in flash attention; both results are float32.

    logits = hidden @ weight.T           matmul, (rows, words) of a tile
    P      = exp(logits - peak)          kernel; it updates peak and total, and rescales slope
    slope += P @ weight                  matmul
    """
    T, V = hidden.shape[0], head.weight.shape[0]
    peak = torch.full((T,), -torch.inf, dtype=torch.float32, device=hidden.device)
    online = _Online(
        peak=peak,
        total=torch.zeros_like(peak),
        slope=torch.zeros_like(hidden, dtype=torch.float32) if want_slope else None,
        excluded=excluded.contiguous(),
    )
    # nearly equal tiles, in multiples of 128 to keep them aligned
    width = 128 * triton.cdiv(triton.cdiv(V, triton.cdiv(V, TILE_WORDS)), 128)
    size = min(T, TILE_TOKENS) * min(V, width)
    # float32 sums even of half-precision matmuls: rounded logits would take 40.6 ms instead of
    # 44.2, but the exact loss would not be exact
    logits = hidden.new_empty(size, dtype=torch.float32)
    shares = logits if hidden.dtype == torch.float32 else hidden.new_empty(size)
    with torch.cuda.device_of(hidden):
        for begin in range(0, T, TILE_TOKENS):
            rows = slice(begin, begin + TILE_TOKENS)
            for start in range(0, V, width):
                tile, of_rows = head.words(start, start + width), online.of_rows(rows)
                _add_tile(hidden[rows], tile, start, of_rows, logits, shares)
    if want_slope:
        online.slope.mul_(torch.where(online.total > 0, online.total.reciprocal(), 0.0)[:, None])
    return Others(peak + online.total.log(), online.slope)


class _Online(NamedTuple):
    """The log-sum-exp and its slope over the words so far, relative to `exp(peak)`."""

    peak: Tensor
    """`(T,)` float32: no logit so far exceeds it by more than `PEAK_SLACK`; -inf at the start."""
    total: Tensor
    """`(T,)` float32: `sum_v exp(logit_v - peak)`."""
    slope: Tensor | None
    """`(T, D)` float32: `sum_v exp(logit_v - peak) d logit_v / d hidden`."""
    excluded: Tensor
    """`(T, K)` int64: the words that do not count."""

    def of_rows(self, rows: slice) -> "_Online":
        return _Online(*(None if part is None else part[rows] for part in self))


def _add_tile(
    hidden: Tensor, tile: Head, start: int, online: _Online, logits: Tensor, shares: Tensor
) -> None:
    """Add a tile of words, the first of which is `start`, to the online sums of some rows."""
    rows, words = hidden.shape[0], tile.weight.shape[0]
    weight = tile.weight.to(hidden.dtype)
    logits, shares = (room[: rows * words].view(rows, words) for room in (logits, shares))
    _product(hidden, weight, out=logits)
    _softmax_tile_kernel[(rows,)](
        logits, shares, tile.bias, online.excluded, online.peak, online.total, online.slope, start,
        words, tile.softcap or 1.0,
        K=online.excluded.shape[1], D=hidden.shape[1], HAS_BIAS=tile.bias is not None,
        HAS_CAP=tile.softcap is not None, WANT_SLOPE=online.slope is not None,
        BLOCK_K=max(16, triton.next_power_of_2(online.excluded.shape[1])),
        BLOCK_V=triton.next_power_of_2(words), BLOCK_D=1024, num_warps=8,
    )  # fmt: skip
    if online.slope is not None:
        _add_product(online.slope, shares, weight)


@triton.jit
def _gather_dot_kernel(
    hidden_ptr, weight_ptr, bias_ptr, ids_ptr, out_ptr, weight_stride, softcap,
    N: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute `out[n] = hidden . weight[ids[n]]` for one token; 0 where `ids[n] < 0`."""
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        ids = tl.load(ids_ptr + token * N + n, mask=n < N, other=-1)
        is_there = ids >= 0
        products = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for first_d in range(0, D, BLOCK_D):
            d = first_d + tl.arange(0, BLOCK_D)
            state = tl.load(hidden_ptr + token * D + d, mask=d < D, other=0.0).to(tl.float32)
            places = weight_ptr + ids[:, None] * weight_stride + d[None, :]
            is_inside = is_there[:, None] & (d < D)[None, :]
            weight = tl.load(places, mask=is_inside, other=0.0).to(tl.float32)
            products += weight * state[None, :]
        logits = tl.sum(products, 1)
        if HAS_BIAS:
            logits += tl.load(bias_ptr + ids, mask=is_there, other=0.0).to(tl.float32)
        if HAS_CAP:
            logits = softcap * _tanh(logits / softcap)
        tl.store(out_ptr + token * N + n, tl.where(is_there, logits, 0.0), mask=n < N)


@triton.jit
def _gather_sum_kernel(
    g_chosen_ptr, ids_ptr, weight_ptr, g_others_ptr, slope_ptr, out_ptr, weight_stride, out_stride,
    N: tl.constexpr, D: tl.constexpr, HAS_OTHERS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute `out = sum_n g_chosen[n] weight[ids[n]] + g_others * slope` for one token."""
    token = tl.program_id(0).to(tl.int64)
    # a program computes BLOCK_D features of the token
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    products = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        ids = tl.load(ids_ptr + token * N + n, mask=n < N, other=-1)
        g = tl.load(g_chosen_ptr + token * N + n, mask=n < N, other=0.0)
        is_inside = (ids >= 0)[:, None] & (d < D)[None, :]
        places = weight_ptr + ids[:, None] * weight_stride + d[None, :]
        products += g[:, None] * tl.load(places, mask=is_inside, other=0.0).to(tl.float32)
    total = tl.sum(products, 0)
    if HAS_OTHERS:
        slope = tl.load(slope_ptr + token * D + d, mask=d < D, other=0.0)
        total += tl.load(g_others_ptr + token) * slope
    tl.store(out_ptr + token * out_stride + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _softmax_tile_kernel(
    logits_ptr, shares_ptr, bias_ptr, excluded_ptr, peak_ptr, total_ptr, slope_ptr, start, words,
    softcap,
    K: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    WANT_SLOPE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add a tile of logits to `peak` and `total` of a token, and rescale `slope` if peak moves.

    Writes `P = exp(logits - peak)` (times the slope of the soft cap), 0 for excluded words.
    """
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * words
    if K > 0:
        k = tl.arange(0, BLOCK_K)
        ids = tl.load(excluded_ptr + token * K + k, mask=k < K, other=-1) - start
        minus_infinity = tl.full((BLOCK_K,), -float("inf"), tl.float32)
        is_inside = (ids >= 0) & (ids < words) & (k < K)
        tl.store(logits_ptr + ids, minus_infinity.to(logits_ptr.dtype.element_ty), mask=is_inside)
        tl.debug_barrier()  # other threads of this program read what was just written

    v = tl.arange(0, BLOCK_V)
    logits = tl.load(logits_ptr + v, mask=v < words, other=-float("inf")).to(tl.float32)
    is_counted = logits > -float("inf")
    if HAS_BIAS:
        logits += tl.load(bias_ptr + v, mask=v < words, other=0.0).to(tl.float32)
    if HAS_CAP:
        bounded = _tanh(logits / softcap)
        logits = tl.where(is_counted, softcap * bounded, -float("inf"))

    old_peak = tl.load(peak_ptr + token)
    highest = tl.max(logits, 0)
    has_moved = highest > old_peak + PEAK_SLACK
    peak = tl.where(has_moved, highest, old_peak)
    # exp(-inf) = 0 for words that do not count; the peak is -inf until a word counts
    shares = tl.exp(logits - tl.maximum(peak, -3.0e38))
    rescale = tl.where(has_moved, tl.exp(old_peak - tl.maximum(peak, -3.0e38)), 1.0)
    tl.store(total_ptr + token, tl.load(total_ptr + token) * rescale + tl.sum(shares, 0))
    tl.store(peak_ptr + token, peak)
    if WANT_SLOPE:
        if HAS_CAP:
            shares *= 1.0 - bounded * bounded
        places = shares_ptr + token * words + v
        tl.store(places, shares.to(shares_ptr.dtype.element_ty), mask=v < words)
        if has_moved & (old_peak > -float("inf")):
            for first in range(0, D, BLOCK_D):
                d = first + tl.arange(0, BLOCK_D)
                slope = tl.load(slope_ptr + token * D + d, mask=d < D)
                tl.store(slope_ptr + token * D + d, slope * rescale, mask=d < D)


@triton.jit
def _merge_kernel(
    ids_ptr, chosen_ptr, summed_ptr, is_excluded_ptr,
    N: tl.constexpr, NUM_EXCLUDED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Give every place of a word the sum of a token's gradients of it, and whether it counts."""
    first = tl.program_id(0).to(tl.int64) * N
    n = tl.arange(0, BLOCK_N)
    ids = tl.load(ids_ptr + first + n, mask=n < N, other=-1).to(tl.int32)
    chosen = tl.load(chosen_ptr + first + n, mask=n < N, other=0.0).to(tl.float32)
    is_same = ids[:, None] == ids[None, :]
    summed = tl.sum(tl.where(is_same, chosen[None, :], 0.0), 1)
    is_excluded = tl.max(tl.where(is_same & (n < NUM_EXCLUDED)[None, :], 1, 0), 1) > 0
    tl.store(summed_ptr + first + n, summed, mask=n < N)
    tl.store(is_excluded_ptr + first + n, is_excluded.to(tl.uint8), mask=n < N)


@triton.jit
def _logit_gradient_kernel(
    out_ptr, bias_ptr, ids_ptr, chosen_ptr, is_excluded_ptr, lse_ptr, others_ptr, start, words,
    softcap,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_OTHERS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Replace a token's tile of logits by its gradient: `others * exp(logit - lse)` + `chosen`."""
    token = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK_V)
    out_ptr += token * words
    gradient = tl.zeros((BLOCK_V,), tl.float32)
    if HAS_OTHERS:
        logits = tl.load(out_ptr + v, mask=v < words, other=0.0).to(tl.float32)
        if HAS_BIAS:
            logits += tl.load(bias_ptr + v, mask=v < words, other=0.0).to(tl.float32)
        slope = 1.0
        if HAS_CAP:
            bounded = _tanh(logits / softcap)
            logits = softcap * bounded
            slope = 1.0 - bounded * bounded
        # -inf if no word is left: all of them are excluded below
        lse = tl.maximum(tl.load(lse_ptr + token), -3.0e38)
        shares = tl.exp(tl.minimum(logits - lse, 0.0)) * slope  # no word has more than all
        gradient = tl.load(others_ptr + token) * shares
    tl.store(out_ptr + v, gradient.to(out_ptr.dtype.element_ty), mask=v < words)

    n = tl.arange(0, BLOCK_N)
    places = tl.load(ids_ptr + token * N + n, mask=n < N, other=-1) - start
    is_inside = (n < N) & (places >= 0) & (places < words)
    added = tl.load(chosen_ptr + token * N + n, mask=is_inside, other=0.0)
    is_excluded = tl.load(is_excluded_ptr + token * N + n, mask=is_inside, other=0) != 0
    tl.debug_barrier()  # other threads of this program wrote what is read here
    before = tl.load(out_ptr + places, mask=is_inside & ~is_excluded, other=0.0).to(tl.float32)
    tl.debug_barrier()  # nobody writes before all have read; all places of a word write the same
    tl.store(out_ptr + places, (before + added).to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def _tanh(x):
    """Return `tanh(x)` with the absolute error of float32 at 1; beyond 20 it is 1 anyway."""
    return 2.0 / (1.0 + tl.exp(-2.0 * tl.minimum(tl.maximum(x, -20.0), 20.0))) - 1.0
