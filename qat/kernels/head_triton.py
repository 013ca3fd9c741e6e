"""The functions of `qat.kernels.head` on a GPU: cuBLAS for the head, Triton around it.

The log-sum-exp over the vocabulary is online, as in flash attention: for each tile of words the
logits are formed by one matmul, a kernel turns them into `P = exp(logits - peak)`, and a second
matmul adds `P @ weight` to the gradient. Both matmuls run at the head's own shape, and memory does
not grow with V.

Shapes: T tokens, D model width, V vocabulary, N chosen words, K of them excluded from the others.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton
from qat.kernels.head import Head, LogitGradients, Others
from qat.kernels.tuned import chosen

TILE_TOKENS = 8192
"""Tokens whose logits of a tile of words exist together."""

TILE_WORDS = 8192
"""Words whose logits exist together: a power of two, for a program holds a token's in registers."""

FLOAT32_LOGITS = True
"""Keep half-precision matmuls' float32 sums as logits; else round them as eager PyTorch does."""

PEAK_SLACK = tl.constexpr(8.0)
"""Nats by which a logit may exceed `peak` before peak moves: `exp(8)` loses nothing in any dtype,
and what was summed so far seldom has to be rescaled."""

ADDS_IN_FLOAT32 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
"""Whether `addmm` adds products of half-precision matrices to a float32 matrix."""


class Gather(NamedTuple):
    """The piece of chosen words' weights that a program holds in registers."""

    words: int = 16
    """A power of two, as the features are."""
    features: int = 256
    warps: int = 4


def chosen_logits_by_kernel(hidden: Tensor, head: Head, ids: Tensor) -> Tensor:
    """See `qat.kernels.head.chosen_logits`; `(T, N, D)` passes through registers only."""
    hidden, ids = hidden.contiguous(), ids.contiguous()
    (T, D), N = hidden.shape, ids.shape[1]
    out = torch.empty(T, N, dtype=torch.float32, device=hidden.device)
    if out.numel() == 0:
        return out
    cut = chosen("gather_dot", (N, D), Gather(), hidden.device)
    with torch.cuda.device_of(hidden):
        _gather_dot_kernel[(T,)](
            hidden,
            head.weight,
            head.bias,
            ids,
            out,
            head.weight.stride(0),
            head.softcap or 1.0,
            N=N,
            D=D,
            HAS_BIAS=head.bias is not None,
            HAS_CAP=head.softcap is not None,
            BLOCK_N=cut.words,
            BLOCK_D=cut.features,
            num_warps=cut.warps,
        )
    return out


def hidden_gradient_by_kernel(
    g_logits: LogitGradients, slope: Tensor | None, weight: Tensor, *, out: Tensor
) -> None:
    """See `qat.kernels.head.hidden_gradient`; rounds to the dtype of `out` once."""
    ids, g_chosen = g_logits.ids.contiguous(), g_logits.chosen.contiguous()
    # a column of a wider gradient, often
    g_others = None if g_logits.others is None else g_logits.others.contiguous()
    (T, N), D = ids.shape, out.shape[1]
    if out.numel() == 0:
        return
    cut = chosen("gather_sum", (N, D), Gather(), out.device)
    with torch.cuda.device_of(out):
        _gather_sum_kernel[(T, triton.cdiv(D, cut.features))](
            g_chosen,
            ids,
            weight,
            g_others,
            slope,
            out,
            weight.stride(0),
            out.stride(0),
            N=N,
            D=D,
            HAS_OTHERS=slope is not None,
            BLOCK_N=cut.words,
            BLOCK_D=cut.features,
            num_warps=cut.warps,
        )


def other_words_by_kernel(
    hidden: Tensor, head: Head, excluded: Tensor, *, want_slope: bool
) -> Others:
    """See `qat.kernels.head.other_words`; both results are float32."""
    T, V = hidden.shape[0], head.weight.shape[0]
    peak = torch.full((T,), -torch.inf, dtype=torch.float32, device=hidden.device)
    online = _Online(
        peak=peak,
        total=torch.zeros_like(peak),
        slope=torch.zeros_like(hidden, dtype=torch.float32) if want_slope else None,
        excluded=excluded.contiguous(),
    )
    width = _tile_width(V)
    scratch = _Scratch.of(hidden, min(T, TILE_TOKENS) * min(V, width))
    with torch.cuda.device_of(hidden):
        for begin in range(0, T, TILE_TOKENS):
            rows = slice(begin, begin + TILE_TOKENS)
            for start in range(0, V, width):
                tile = head.words(start, start + width)
                _add_tile(hidden[rows], tile, start, online.of_rows(rows), scratch)
    if want_slope:
        online.slope.mul_(torch.where(online.total > 0, online.total.reciprocal(), 0.0)[:, None])
    return Others(peak + online.total.log(), online.slope)


class _Online(NamedTuple):
    """The log-sum-exp and its slope over the words seen so far, relative to `exp(peak)`."""

    peak: Tensor
    """`(T,)` float32: no logit seen exceeds it by more than `PEAK_SLACK`; -inf before any."""
    total: Tensor
    """`(T,)` float32: `sum_v exp(logit_v - peak)`."""
    slope: Tensor | None
    """`(T, D)` float32: `sum_v exp(logit_v - peak) d logit_v / d hidden`."""
    excluded: Tensor
    """`(T, K)` int64: words not to be counted."""

    def of_rows(self, rows: slice) -> "_Online":
        """Views of some rows."""
        return _Online(*(None if part is None else part[rows] for part in self))


class _Scratch(NamedTuple):
    """Room for one tile of logits and of `P`; the same room where they have the same dtype."""

    logits: Tensor
    shares: Tensor

    @classmethod
    def of(cls, hidden: Tensor, size: int) -> "_Scratch":
        dtype = torch.float32 if FLOAT32_LOGITS else hidden.dtype
        logits = hidden.new_empty(size, dtype=dtype)
        return cls(logits, logits if dtype == hidden.dtype else hidden.new_empty(size))

    def tile(self, rows: int, words: int) -> "_Scratch":
        """Both as contiguous `(rows, words)`."""
        return _Scratch(*(room[: rows * words].view(rows, words) for room in self))


def _tile_width(num_words: int) -> int:
    """At most `TILE_WORDS`; tiles are nearly equal, and multiples of 128 keep them aligned."""
    num_tiles = triton.cdiv(num_words, TILE_WORDS)
    return 128 * triton.cdiv(triton.cdiv(num_words, num_tiles), 128)


def _add_tile(hidden: Tensor, tile: Head, start: int, online: _Online, scratch: _Scratch) -> None:
    """Add a tile of words, of which `start` is the first, to what is known of some rows."""
    rows, words = hidden.shape[0], tile.weight.shape[0]
    weight = tile.weight.to(hidden.dtype)
    logits, shares = scratch.tile(rows, words)
    _write_product(hidden, weight.T, out=logits)
    _softmax_tile_kernel[(rows,)](
        logits,
        shares,
        tile.bias,
        online.excluded,
        online.peak,
        online.total,
        online.slope,
        start,
        words,
        tile.softcap or 1.0,
        K=online.excluded.shape[1],
        D=hidden.shape[1],
        HAS_BIAS=tile.bias is not None,
        HAS_CAP=tile.softcap is not None,
        WANT_SLOPE=online.slope is not None,
        BLOCK_K=max(16, triton.next_power_of_2(online.excluded.shape[1])),
        BLOCK_V=triton.next_power_of_2(words),
        BLOCK_D=1024,
        num_warps=8,
    )
    if online.slope is not None:
        _add_product(shares, weight, out=online.slope)


def _write_product(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """`out = a @ b`, in the dtype of `out`."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _add_product(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """`out += a @ b`, summed in float32."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif ADDS_IN_FLOAT32:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.add_(torch.mm(a, b, out_dtype=out.dtype))


@triton.jit
def _gather_dot_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    out_ptr,
    weight_stride,
    softcap,
    N: tl.constexpr,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token: `out[n] = hidden . weight[ids[n]]`, 0 where `ids[n] < 0`."""
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
    g_chosen_ptr,
    ids_ptr,
    weight_ptr,
    g_others_ptr,
    slope_ptr,
    out_ptr,
    weight_stride,
    out_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token, some features: `out = sum_n g_chosen[n] weight[ids[n]] + g_others * slope`."""
    token = tl.program_id(0).to(tl.int64)
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
    logits_ptr,
    shares_ptr,
    bias_ptr,
    excluded_ptr,
    peak_ptr,
    total_ptr,
    slope_ptr,
    start,
    words,
    softcap,
    K: tl.constexpr,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WANT_SLOPE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token: add a tile's logits to `peak` and `total`, and rescale `slope` if peak moves.

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
    # exp(-inf) = 0 for what is not counted; peak is -inf as long as nothing is
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
def _tanh(x):
    """`tanh(x)`, its absolute error that of float32 at 1; beyond 20 it is 1 anyway."""
    return 2.0 / (1.0 + tl.exp(-2.0 * tl.minimum(tl.maximum(x, -20.0), 20.0))) - 1.0
