"""Chosen logits and log-sum-exp of an output embedding, without the logits of all tokens and words.

A loss reads the logits of a few chosen words and the log-sum-exp over the other words. Both, and
their gradients, come from the hidden states and the head's weight alone. On a GPU cuBLAS computes
the matmuls and Triton everything else, and memory does not grow with V. Where the head learns, the
logits of a few thousand tokens are kept until its gradient has been made of them.

Shapes: T tokens, D model width, V vocabulary, N chosen words, K of them excluded from the others.
"""

from collections.abc import Callable, Iterator
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

KEPT_TOKENS, KEPT_WORDS = 4096, 16384
"""The most tokens whose logits are kept while a head learns (2.5 GB at V = 152,000), and the words
of a tile of these logits.

For 32,768 tokens loss and gradients took 63 ms so, 67 with tiles of 8,192 words, 64 with 2,048
tokens and 61 with 8,192; with logits computed twice 73 (one H200, Qwen3-0.6B's head).
"""

KEPT_PART, FEWEST_KEPT = 4, 1024
"""Logits of a quarter of a micro-batch are kept at a time, but of no fewer tokens than these."""

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
    take_gradient: Callable[[Tensor], None] | None = None
    """Takes the gradient of the weight, `(V, D)` float32, in place of autograd, and may keep it."""
    named: Tensor | None = None
    """`(V,)` bool: the words whose rows of the weight get a gradient; None if all do."""

    @property
    def learns(self) -> bool:
        """True if weight or bias require a gradient."""
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)

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
        """Return the head restricted to the words `start` to `stop`, or all if `stop` is beyond.

        A gradient that is taken has zeros for the other words.
        """
        taken, rest = self.take_gradient, len(self.weight) - stop
        if start == 0 and rest <= 0:
            return self
        take = taken and (lambda gradient: taken(F.pad(gradient, (0, 0, start, rest))))
        parts = self.bias, self.named
        bias, named = (part if part is None else part[start:stop] for part in parts)
        return Head(self.weight[start:stop], bias, self.softcap, take, named)


class Others(NamedTuple):
    """The words outside the excluded ones, as one outcome."""

    lse: Tensor | None
    """`(T,)`: log-sum-exp of their logits; -inf if there are none, None if not computed."""
    slope: Tensor | None
    """`(T, D)`: the gradient of `lse` with respect to the hidden state; 0 if there are none.

    Without a soft cap: the mean of `weight[v]` under the softmax over these words.
    """
    logits: tuple[Tensor, ...] | None = None
    """Logits `(T, words)` of neighbouring words for `add_gradients`; None if not kept."""


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


def other_words(
    hidden: Tensor, head: Head, excluded: Tensor, *, want_slope: bool = False, keep: bool = False
) -> Others:
    """Return the log-sum-exp of each token's logits outside its excluded words, and its gradient.

    `lse = without(head.logits(hidden), excluded, -inf).logsumexp(1)`. No large numbers are
    subtracted, so it is accurate however little mass the others have. The head runs once for `lse`
    and once more for `slope`.

    Args:
        hidden: `(T, D)`; at most `kept_tokens(T)` tokens if logits are kept.
        head: the output embedding.
        excluded: `(T, K)` int64; an id below 0 excludes nothing.
        want_slope: whether to compute `slope`.
        keep: whether to keep the logits, which makes a `slope` of no use.
    """
    if _by_kernel(hidden):
        return _others_by_kernel(hidden, head, excluded, want_slope, keep)
    blocks = zip(hidden.split(BLOCK_TOKENS), excluded.split(BLOCK_TOKENS), strict=True)
    parts = [_others_of_block(*block, head, want_slope, keep) for block in blocks]
    slope = torch.cat([part.slope for part in parts]) if want_slope else None
    logits = (torch.cat([part.logits[0] for part in parts]),) if keep else None
    return Others(torch.cat([part.lse for part in parts]), slope, logits)


def kept_tokens(hidden: Tensor) -> int:
    """Return how many of the tokens `(T, D)` are taken at a time while a head learns."""
    most = KEPT_TOKENS if _by_kernel(hidden) else BLOCK_TOKENS
    return min(most, max(FEWEST_KEPT, hidden.shape[0] // KEPT_PART))


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


class HeadSums:
    """The gradient of a head, summed over chunks of tokens in float32 (float64 stays)."""

    def __init__(self, head: Head) -> None:
        self.weight = wide(torch.zeros_like(head.weight))
        """`(V, D)`"""
        self.bias = None if head.bias is None else wide(torch.zeros_like(head.bias))
        """`(V,)`; None without a bias."""

    def add(self, dlogits: Tensor, hidden: Tensor, start: int = 0) -> None:
        """Add those of tokens `(T, D)`, for gradients `(T, words)` of logits from word `start`."""
        rows = slice(start, start + dlogits.shape[1])
        _add_product(self.weight[rows], dlogits.T, hidden)
        if self.bias is not None:
            self.bias[rows] += dlogits.sum(0, dtype=self.bias.dtype)


def add_gradients(
    hidden: Tensor,
    head: Head,
    g_logits: LogitGradients,
    others: Others,
    sums: HeadSums,
    *,
    out: Tensor | None = None,
) -> None:
    """Add the gradient of the head to `sums`, and write that of the hidden states to `out`.

    `dW += sum_t dlogits[t] hidden[t]^T`, and `dlogits @ W`, summed in float32 (float64 stays) and
    rounded once, to `out`, `(T, D)` of any float dtype. `others` has kept the logits, unless the
    loss reads none of them.
    """
    total = None if out is None else wide(torch.zeros_like(out))
    for start, dlogits in _logit_gradients(hidden, head, g_logits, others.logits):
        sums.add(dlogits, hidden, start)
        if total is not None:
            tile = head.weight[start : start + dlogits.shape[1]]
            _add_product(total, dlogits, tile.to(dlogits.dtype))
    if out is not None:
        out.copy_(total)


def gathered(head: Head, sums: HeadSums, factor: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return `factor` times the gradients of weight and bias, for autograd; `sums` is used up.

    There is none of a weight whose gradient is taken. Rows of words that are not `head.named` are
    zeros: there is next to nothing that AdamW would not blow up, and a word that no text contains
    should stay as it is.
    """
    scale = factor if head.named is None else factor * head.named[:, None]
    d_weight = sums.weight.mul_(scale)
    d_bias = None if sums.bias is None else (sums.bias * factor).to(head.bias.dtype)
    if head.take_gradient is None:
        return d_weight.to(head.weight.dtype), d_bias
    head.take_gradient(d_weight)
    return None, d_bias


def before_softcap(g: Tensor, logits: Tensor, softcap: float | None) -> Tensor:
    """Return the gradient before a soft cap from `g` after it; `logits` are the capped ones."""
    return g if softcap is None else g * (1 - (logits / softcap).square())


def without(values: Tensor, ids: Tensor, fill: float) -> Tensor:
    """Return `(T, V)` values with `fill` at each row's ids; ids outside 0..V-1 are ignored."""
    T, V = values.shape
    is_filled = torch.zeros(T, V + 1, dtype=torch.bool, device=values.device)
    is_filled.scatter_(1, _or_beyond(ids, V), True)
    return values.masked_fill(is_filled[:, :V], fill)


def named_words(ids: Tensor, V: int) -> Tensor:
    """Return 1 for each word among `ids`, of any shape, and 0 for all others, `(V,)` float32."""
    named = torch.zeros(V + 1, device=ids.device)
    return named.scatter_(0, _or_beyond(ids, V).flatten(), 1.0)[:V]


def _by_kernel(tensor: Tensor) -> bool:
    return use_triton(tensor, __name__) and tensor.dtype != torch.float64


def _others_of_block(
    hidden: Tensor, excluded: Tensor, head: Head, want_slope: bool, keep: bool
) -> Others:
    logits = wide(head.logits(hidden))
    others = without(logits, excluded, -torch.inf)
    lse = others.logsumexp(1)
    kept = (logits,) if keep else None
    if not want_slope:
        return Others(lse, None, kept)
    # if no word is left, lse = -inf is clamped so that the shares are exp(-inf) = 0 instead of NaN
    shares = (others - lse.clamp_min(torch.finfo(lse.dtype).min)[:, None]).exp()
    shares = before_softcap(shares, logits, head.softcap)
    tiles = zip(shares.split(BLOCK_WORDS, 1), head.weight.split(BLOCK_WORDS), strict=True)
    slope = sum(shares @ weight.to(shares.dtype) for shares, weight in tiles)
    return Others(lse, slope, kept)


def _logit_gradients(
    hidden: Tensor, head: Head, g_logits: LogitGradients, kept: tuple[Tensor, ...] | None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first word and the gradient `(T, words)` of each tile of uncapped logits.

    `others * exp(logit - lse)` of the words that are not excluded, plus what is `chosen`, in the
    dtype of `hidden`. A tile may be overwritten by the next.
    """
    if _by_kernel(hidden):
        yield from _logit_gradients_by_kernel(hidden, head, g_logits, kept)
        return
    (T, _), V = hidden.shape, head.weight.shape[0]
    ids = _or_beyond(g_logits.ids, V)
    gradient = g_logits.chosen.new_zeros(T, V + 1)  # the last column collects all other ids
    if kept is not None:
        (logits,) = kept
        shares = before_softcap((logits - g_logits.lse[:, None]).exp(), logits, head.softcap)
        shares = without(shares, ids[:, : g_logits.num_excluded], 0.0)
        gradient[:, :V] = g_logits.others[:, None] * shares
    gradient.scatter_add_(1, ids, g_logits.chosen)
    for start in range(0, V, BLOCK_WORDS):
        yield start, gradient[:, start : min(start + BLOCK_WORDS, V)].to(hidden.dtype)


def _logit_gradients_by_kernel(
    hidden: Tensor, head: Head, g_logits: LogitGradients, kept: tuple[Tensor, ...] | None
) -> Iterator[tuple[int, Tensor]]:
    ids, chosen = _merged(g_logits)
    others = None if g_logits.others is None else g_logits.others.contiguous()
    (T, N), V = ids.shape, head.weight.shape[0]
    width = _tile_width(V, KEPT_WORDS)
    room = hidden.new_empty(T * min(width, V))
    for number, start in enumerate(range(0, V, width)):
        tile = head.words(start, min(start + width, V))
        words = tile.weight.shape[0]
        dlogits = room[: T * words].view(T, words)
        with torch.cuda.device_of(hidden):
            _logit_gradient_kernel[(T,)](
                None if kept is None else kept[number], dlogits, tile.bias, ids, chosen,
                g_logits.lse, others, start, words, tile.softcap or 1.0,
                N=N, HAS_BIAS=tile.bias is not None, HAS_CAP=tile.softcap is not None,
                HAS_OTHERS=kept is not None, BLOCK_N=max(16, triton.next_power_of_2(N)),
                BLOCK_V=triton.next_power_of_2(words), num_warps=8,
            )  # fmt: skip
        yield start, dlogits


def _merged(g_logits: LogitGradients) -> tuple[Tensor, Tensor]:
    """Return ids and gradients `(T, N)`; all places of a repeated word hold its sum."""
    ids, chosen = g_logits.ids.contiguous(), g_logits.chosen.contiguous()
    summed = torch.empty_like(chosen, dtype=torch.float32)
    T, N = ids.shape
    with torch.cuda.device_of(ids):
        _merge_kernel[(T,)](
            ids, chosen, summed, N=N, BLOCK_N=max(16, triton.next_power_of_2(N)), num_warps=8
        )
    return ids, summed


def _tile_width(V: int, most: int) -> int:
    """Return the words of nearly equal tiles of at most `most`, in aligned multiples of 128."""
    return 128 * triton.cdiv(triton.cdiv(V, triton.cdiv(V, most)), 128)


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


def _others_by_kernel(
    hidden: Tensor, head: Head, excluded: Tensor, want_slope: bool, keep: bool
) -> Others:
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
    width, step = _tile_width(V, TILE_WORDS), TILE_TOKENS
    if keep:
        width, step = _tile_width(V, KEPT_WORDS), max(1, T)
    size = min(T, step) * min(V, width)
    # float32 sums even of half-precision matmuls: rounded logits would take 40.6 ms instead of
    # 44.2, but the exact loss would not be exact
    logits = hidden.new_empty(size, dtype=torch.float32)
    has_room = want_slope and hidden.dtype != torch.float32
    shares = hidden.new_empty(size) if has_room else logits
    kept = []
    with torch.cuda.device_of(hidden):
        for begin in range(0, T, step):
            rows = slice(begin, begin + step)
            for start in range(0, V, width):
                tile, of_rows = head.words(start, min(start + width, V)), online.of_rows(rows)
                if keep:
                    logits = torch.empty_like(logits) if kept else logits
                    kept.append(logits[: T * len(tile.weight)].view(T, -1))
                _add_tile(hidden[rows], tile, start, of_rows, logits, shares)
    if want_slope:
        online.slope.mul_(torch.where(online.total > 0, online.total.reciprocal(), 0.0)[:, None])
    return Others(peak + online.total.log(), online.slope, tuple(kept) if keep else None)


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
def _merge_kernel(ids_ptr, chosen_ptr, summed_ptr, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Give every place of a word the sum of a token's gradients of it."""
    first = tl.program_id(0).to(tl.int64) * N
    n = tl.arange(0, BLOCK_N)
    ids = tl.load(ids_ptr + first + n, mask=n < N, other=-1).to(tl.int32)
    chosen = tl.load(chosen_ptr + first + n, mask=n < N, other=0.0).to(tl.float32)
    is_same = ids[:, None] == ids[None, :]
    summed = tl.sum(tl.where(is_same, chosen[None, :], 0.0), 1)
    tl.store(summed_ptr + first + n, summed, mask=n < N)


@triton.jit
def _logit_gradient_kernel(
    logits_ptr, out_ptr, bias_ptr, ids_ptr, chosen_ptr, lse_ptr, others_ptr, start, words, softcap,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_OTHERS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a token's tile of logits: `others * exp(logit - lse)` + `chosen`.

    Logits of excluded words are -inf.
    """
    token = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK_V)
    out_ptr += token * words
    gradient = tl.zeros((BLOCK_V,), tl.float32)
    if HAS_OTHERS:
        logits_ptr += token * words
        logits = tl.load(logits_ptr + v, mask=v < words, other=-float("inf")).to(tl.float32)
        is_counted = logits > -float("inf")
        if HAS_BIAS:
            logits += tl.load(bias_ptr + v, mask=v < words, other=0.0).to(tl.float32)
        slope = 1.0
        if HAS_CAP:
            bounded = _tanh(logits / softcap)
            logits = softcap * bounded
            slope = 1.0 - bounded * bounded
        # -inf if no word is left: none is counted then
        lse = tl.maximum(tl.load(lse_ptr + token), -3.0e38)
        shares = tl.exp(tl.minimum(logits - lse, 0.0)) * slope  # no word has more than all
        gradient = tl.where(is_counted, tl.load(others_ptr + token) * shares, 0.0)
    tl.store(out_ptr + v, gradient.to(out_ptr.dtype.element_ty), mask=v < words)

    n = tl.arange(0, BLOCK_N)
    places = tl.load(ids_ptr + token * N + n, mask=n < N, other=-1) - start
    is_inside = (n < N) & (places >= 0) & (places < words)
    added = tl.load(chosen_ptr + token * N + n, mask=is_inside, other=0.0)
    tl.debug_barrier()  # other threads of this program wrote what is read here
    before = tl.load(out_ptr + places, mask=is_inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # nobody writes before all have read; all places of a word write the same
    tl.store(out_ptr + places, (before + added).to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def _tanh(x):
    """Return `tanh(x)` with the absolute error of float32 at 1; beyond 20 it is 1 anyway."""
    return 2.0 / (1.0 + tl.exp(-2.0 * tl.minimum(tl.maximum(x, -20.0), 20.0))) - 1.0
