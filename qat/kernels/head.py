"""What losses need of the output embedding, without logits of all tokens over all words.

A loss reads the logits of a few chosen words and the log-sum-exp over the other words. Both, and
their gradients, come from the hidden states and the head's weight alone.

Shapes: T tokens, D model width, V vocabulary, N chosen words, K of them excluded from the others.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.kernels.dispatch import use_triton

BLOCK_TOKENS = 1024
"""Rows of logits that exist together in plain PyTorch: 0.6 GB in float32 at V = 152,000."""

BLOCK_WORDS = 8192
"""Words whose weights are cast together."""

HEAD_BLOCK_TOKENS = 8192
"""Rows of `BLOCK_WORDS` logits that exist together while the head's own gradient is computed."""


class Head(NamedTuple):
    """An output embedding: `logits = hidden @ weight.T + bias`, then perhaps a soft cap."""

    weight: Tensor
    """`(V, D)`, of any float dtype."""
    bias: Tensor | None = None
    """`(V,)`"""
    softcap: float | None = None
    """`logits = softcap * tanh(logits / softcap)`"""

    def logits(self, hidden: Tensor) -> Tensor:
        """`(..., D)` to `(..., V)`, in the dtype of `hidden`."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        logits = F.linear(hidden, self.weight.to(hidden.dtype), bias)
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    @torch.no_grad()
    def exact_logits(self, hidden: Tensor) -> Tensor:
        """`(..., D)` to `(..., V)` float32, of 16-bit factors; their sums are not rounded again.

        In bfloat16 a third of the neighbours among a token's most likely words would be tied. On
        CUDA one matmul writes float32; elsewhere the weight is cast in pieces.
        """
        rows = hidden.flatten(0, -2)
        if rows.is_cuda:
            logits = torch.mm(rows, self.weight.T, out_dtype=torch.float32)
        else:
            states, pieces = rows.float(), self.weight.split(BLOCK_WORDS)
            logits = torch.cat([states @ piece.float().T for piece in pieces], 1)
        if self.bias is not None:
            logits += self.bias
        if self.softcap is not None:
            logits = self.softcap * (logits / self.softcap).tanh()
        return logits.unflatten(0, hidden.shape[:-1])

    def words(self, start: int, stop: int) -> "Head":
        """The head of the words `start` to `stop` alone."""
        bias = None if self.bias is None else self.bias[start:stop]
        return Head(self.weight[start:stop], bias, self.softcap)


class Others(NamedTuple):
    """The words outside the excluded ones, seen as one outcome."""

    lse: Tensor | None
    """`(T,)`: log-sum-exp of their logits; -inf where there are none, None if not computed."""
    slope: Tensor | None
    """`(T, D)`: the gradient of `lse` with respect to the hidden state, 0 where there are none.

    Without a soft cap: the mean of `weight[v]` under the softmax over these words.
    """


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the dtype of losses: float32, or float64 if it is that."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def chosen_logits(hidden: Tensor, head: Head, ids: Tensor) -> Tensor:
    """`head.logits(hidden).gather(1, ids)`, `(T, N)` float32 (float64 stays).

    Sums run in float32 whatever the dtypes. An id below 0 is absent: its logit is 0.

    Args:
        hidden: `(T, D)`.
        head: the output embedding.
        ids: `(T, N)` int64.
    """
    if triton := _triton_for(hidden):
        return triton.chosen_logits_by_kernel(hidden, head, ids)
    states, columns = wide(hidden), []
    for column in ids.clamp_min(0).unbind(1):  # word by word: (T, N, D) never exists
        dot = (states * head.weight[column]).sum(1)
        columns.append(dot if head.bias is None else dot + head.bias[column])
    logits = torch.stack(columns, 1) if columns else states.new_empty(ids.shape)
    if head.softcap is not None:
        logits = head.softcap * (logits / head.softcap).tanh()
    return logits.masked_fill(ids < 0, 0.0)


def other_words(hidden: Tensor, head: Head, excluded: Tensor, *, want_slope: bool) -> Others:
    """Log-sum-exp of each token's logits outside its excluded words, and how it moves with hidden.

    `lse = without(head.logits(hidden), excluded, -inf).logsumexp(1)`: no difference of large
    numbers, so it is right however little mass the others have. The head runs once for `lse` and
    once more for `slope`.

    Args:
        hidden: `(T, D)`.
        head: the output embedding.
        excluded: `(T, K)` int64; an id below 0 excludes nothing.
        want_slope: whether to compute `slope`.
    """
    if triton := _triton_for(hidden):
        return triton.other_words_by_kernel(hidden, head, excluded, want_slope=want_slope)
    blocks = zip(hidden.split(BLOCK_TOKENS), excluded.split(BLOCK_TOKENS), strict=True)
    parts = [_others_of_block(*block, head, want_slope) for block in blocks]
    slope = torch.cat([part.slope for part in parts]) if want_slope else None
    return Others(torch.cat([part.lse for part in parts]), slope)


class LogitGradients(NamedTuple):
    """The gradient of a loss with respect to all logits of T tokens, in a few numbers each."""

    ids: Tensor
    """`(T, N)` int64; below 0: absent."""
    chosen: Tensor
    """`(T, N)`: gradients of the logits of `ids`, before any soft cap."""
    num_excluded: int
    """The first so many of `ids` are not among the others."""
    lse: Tensor | None = None
    """`Others.lse`; None if the loss does not read the others."""
    others: Tensor | None = None
    """`(T,)`: gradients of `lse`."""


def hidden_gradient(
    g_logits: LogitGradients, slope: Tensor | None, weight: Tensor, *, out: Tensor
) -> None:
    """Writes the gradient of the hidden states to `out`, `(T, D)` of any float dtype.

    `sum_n chosen[:, n] * weight[ids[:, n]] + others * slope`, summed in float32 (float64 stays) and
    rounded once. `slope` is `Others.slope`, None where the loss does not read the others.
    """
    if triton := _triton_for(g_logits.chosen):
        triton.hidden_gradient_by_kernel(g_logits, slope, weight, out=out)
        return
    ids, g_chosen = g_logits.ids, g_logits.chosen.masked_fill(g_logits.ids < 0, 0.0)
    total = torch.zeros_like(out, dtype=g_chosen.dtype)
    if slope is not None:
        total += g_logits.others[:, None] * slope
    for g, column in zip(g_chosen.unbind(1), ids.clamp_min(0).unbind(1), strict=True):
        total += g[:, None] * weight[column]
    out.copy_(total)


def add_head_gradient(hidden: Tensor, head: Head, g_logits: LogitGradients, *, out: Head) -> None:
    """Adds the gradients of the head's weight, and of its bias if it has one, to those in `out`.

    Logits are formed again for a block of tokens and words at a time; never `(T, V)`.
    """
    V = head.weight.shape[0]
    for begin in range(0, hidden.shape[0], HEAD_BLOCK_TOKENS):
        rows = slice(begin, begin + HEAD_BLOCK_TOKENS)
        block = LogitGradients(*(g[rows] if isinstance(g, Tensor) else g for g in g_logits))
        for start in range(0, V, BLOCK_WORDS):
            tile, out_tile = (h.words(start, min(start + BLOCK_WORDS, V)) for h in (head, out))
            dlogits = _logit_gradient(hidden[rows], tile, block, start)
            out_tile.weight.add_(dlogits.to(hidden.dtype).T @ hidden[rows])
            if out_tile.bias is not None:
                out_tile.bias.add_(dlogits.sum(0))


def before_softcap(g: Tensor, logits: Tensor, softcap: float | None) -> Tensor:
    """The gradient before a soft cap from `g` behind it, where the capped logits are `logits`."""
    return g if softcap is None else g * (1 - (logits / softcap).square())


def without(values: Tensor, ids: Tensor, fill: float) -> Tensor:
    """`(T, V)` values with `fill` at each row's ids; ids outside 0..V-1 fill nothing."""
    T, V = values.shape
    is_filled = torch.zeros(T, V + 1, dtype=torch.bool, device=values.device)
    is_filled.scatter_(1, _or_beyond(ids, V), True)
    return values.masked_fill(is_filled[:, :V], fill)


def _triton_for(tensor: Tensor) -> ModuleType | None:
    """The Triton twin of these functions, where it computes."""
    if not use_triton(tensor) or tensor.dtype == torch.float64:
        return None
    from qat.kernels import head_triton

    return head_triton


def _others_of_block(hidden: Tensor, excluded: Tensor, head: Head, want_slope: bool) -> Others:
    logits = wide(head.logits(hidden))
    others = without(logits, excluded, -torch.inf)
    lse = others.logsumexp(1)
    if not want_slope:
        return Others(lse, None)
    # where no word is left, lse = -inf: finite, so that the shares are exp(-inf) = 0, not NaN
    shares = (others - lse.clamp_min(torch.finfo(lse.dtype).min)[:, None]).exp()
    shares = before_softcap(shares, logits, head.softcap)
    tiles = zip(shares.split(BLOCK_WORDS, 1), head.weight.split(BLOCK_WORDS), strict=True)
    return Others(lse, sum(shares @ weight.to(shares.dtype) for shares, weight in tiles))


def _logit_gradient(hidden: Tensor, tile: Head, block: LogitGradients, start: int) -> Tensor:
    """`(T, words)`: the gradient of the logits, before any soft cap, of the words from `start`."""
    T, num_words = hidden.shape[0], tile.weight.shape[0]
    ids = _or_beyond(torch.where(block.ids < 0, -1, block.ids - start), num_words)
    gradient = block.chosen.new_zeros(T, num_words + 1)  # the last column takes what is elsewhere
    if block.lse is not None:
        logits = wide(tile.logits(hidden))
        shares = before_softcap((logits - block.lse[:, None]).exp(), logits, tile.softcap)
        shares = without(shares, ids[:, : block.num_excluded], 0.0)
        gradient[:, :num_words] = block.others[:, None] * shares
    return gradient.scatter_add_(1, ids, block.chosen)[:, :num_words]


def _or_beyond(ids: Tensor, size: int) -> Tensor:
    """The ids inside 0..size-1; `size` for all others."""
    return torch.where((ids < 0) | (ids >= size), size, ids)
