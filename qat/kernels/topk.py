"""The top K of a vocabulary's logits and the mass outside, with about one read of the logits.

The vocabulary is cut into blocks of `BLOCK` columns, and one pass stores each block's largest logit
and its sum of exponentials. The K blocks with the highest largest logits contain the whole top K: a
token outside of them is below the largest of each. So only K * BLOCK candidates are read again, and
mass outside the top K is summed over its tokens, never computed as `1 - sum`.

Tokens are ordered by logit, highest first, and among equal logits by id, lowest first, so that the
many ties of bfloat16 are resolved alike on every device.

Shapes: T tokens, V vocabulary, K tokens kept, N blocks, C blocks chosen.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qat.backend.device import on
from qat.kernels.dispatch import tl, triton, use_triton
from qat.kernels.tuned import chosen

BLOCK = 64
"""Columns per block: K * 64 candidates are read again, V / 64 peaks are stored."""
LOW_BITS = 2**31 - 1
"""All bits of an int32 but the sign; flipping them orders negative floats."""
MAX_K = 512
"""The largest K; its K * BLOCK candidates fit in one program's registers."""
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Lowest bits of a float32 that are zero in every number of that dtype."""


class BlockPass(NamedTuple):
    """The tiling of the pass over logits."""

    blocks: int = 64
    """Blocks per program, a power of two."""
    warps: int = 4


class Blocks(NamedTuple):
    """The summary of each block of `BLOCK` columns after one pass over `(T, V)` logits."""

    peaks: Tensor
    """`(T, N)` float32: the largest logit; -inf if all are."""
    sums: Tensor
    """`(T, N)` float32: sum of exp(logit - peak); NaN if a logit is NaN or +inf."""


class Selection(NamedTuple):
    """The K largest logits, and the normalization of the vocabulary."""

    values: Tensor
    """`(T, K)` float32, descending."""
    ids: Tensor
    """`(T, K)` int64; ascending among equal values."""
    log_sum_exp: Tensor
    """`(T,)` float32, of all logits; not finite if one is NaN or +inf, or all are -inf."""
    tail_logprob: Tensor
    """`(T,)` float32: log of the mass outside the K; -inf when K = V."""


def top_k_of_logits(logits: Tensor, k: int) -> Selection:
    """Return `torch.topk` of `(T, V)` logits, with ties by ascending id, and the tail mass.

    Log-sum-exp and log tail mass are within 2e-6 of float64 (relative if above 1). Mass more than
    a factor e^-87 below the most likely token may count as zero.
    """
    return top_k_of_blocks(logits, k, summarize(logits))


def summarize(logits: Tensor) -> Blocks:
    """Return peak and sum of exponentials of each block of `(T, V)` logits.

    The last block may be narrower.
    """
    if not use_triton(logits, __name__):
        width = logits.shape[1]
        blocks_TNB = pad(logits, (0, -width % BLOCK), value=-torch.inf).unflatten(1, (-1, BLOCK))
        peaks_TN = blocks_TNB.amax(-1).float()
        zero_TN = peaks_TN.masked_fill(peaks_TN == -torch.inf, 0.0)
        weights_TNB = (blocks_TNB.float() - zero_TN[..., None]).exp_()
        return Blocks(peaks_TN, weights_TNB.sum(-1))
    logits = _rows(logits)
    T, V = logits.shape
    N = triton.cdiv(V, BLOCK)
    peaks = torch.empty(T, N, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(peaks)
    cut = chosen("top_k_blocks", (V,), BlockPass(), logits.device)
    with torch.cuda.device_of(logits):
        _summarize[(T, triton.cdiv(N, cut.blocks))](
            logits, peaks, sums, logits.stride(0), V, N, BLOCK, cut.blocks, num_warps=cut.warps
        )
    return Blocks(peaks, sums)


def top_k_of_blocks(logits: Tensor, k: int, blocks: Blocks) -> Selection:
    """Do what `top_k_of_logits` does, given the summary of these logits."""
    # the kernel needs K blocks, and candidates that fit into registers
    if use_triton(logits, __name__) and k <= min(MAX_K, blocks.peaks.shape[1]):
        return _select_by_kernel(logits, k, blocks)
    if on(logits.device).is_traced:
        return _sorted(logits, k)
    return _select(logits, k, blocks)


def masses(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return each block's mass relative to the row's peak, `(T, N)` float64, and that peak."""
    peak_T1 = blocks.peaks.amax(-1, keepdim=True)
    return blocks.sums.double() * (blocks.peaks - peak_T1).double().exp(), peak_T1


def log_sum_exp(blocks: Blocks) -> Tensor:
    """Return `(T,)` float32 log-sum-exp; not finite if a logit is NaN or +inf, or all are -inf."""
    mass_TN, peak_T1 = masses(blocks)
    return (mass_TN.sum(-1).log() + peak_T1[:, 0]).float()


def candidates(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of `(T, C)` chosen blocks and their ids, `(T, C, BLOCK)`; -inf beyond V."""
    V = logits.shape[1]
    columns_B = torch.arange(BLOCK, device=logits.device)
    ids_TCB = chosen[..., None] * BLOCK + columns_B
    flat = ids_TCB.clamp(max=V - 1).flatten(1)
    values_TCB = logits.gather(1, flat).view(ids_TCB.shape).float()
    return values_TCB.masked_fill(ids_TCB >= V, -torch.inf), ids_TCB


def _sorted(logits: Tensor, k: int) -> Selection:
    """Compute the selection by one stable sort of all logits."""
    values_TV, ids_TV = (logits.float() + 0.0).sort(dim=1, descending=True, stable=True)
    weights_TV = (values_TV - values_TV[:, :1]).exp().double()
    total_T = weights_TV.sum(-1).log()
    return Selection(
        values=values_TV[:, :k],
        ids=ids_TV[:, :k],
        log_sum_exp=(total_T + values_TV[:, 0]).float(),
        tail_logprob=(weights_TV[:, k:].sum(-1).log() - total_T).float(),
    )


def _select(logits: Tensor, k: int, blocks: Blocks) -> Selection:
    mass_TN, peak_T1 = masses(blocks)
    N = mass_TN.shape[1]
    if 2 * k < N:  # otherwise gathering costs more than taking all
        block_keys_TN = _keys(blocks.peaks, torch.arange(N, device=logits.device))
        best_TC = block_keys_TN.topk(k).values
        outside_T = mass_TN.masked_fill(block_keys_TN >= best_TC[:, -1:], 0.0).sum(-1)
        values_TX, ids_TX = (x.flatten(1) for x in candidates(logits, unpack_keys(best_TC)[1]))
    else:
        outside_T = mass_TN.new_zeros(())
        values_TX, ids_TX = logits.float(), torch.arange(logits.shape[1], device=logits.device)
    keys_TX = _keys(values_TX, ids_TX)
    best_TK = keys_TX.topk(k).values
    weights_TX = (values_TX - peak_T1).exp_().masked_fill_(keys_TX >= best_TK[:, -1:], 0.0)
    rest_T = outside_T + weights_TX.sum(-1).double()
    total_T = mass_TN.sum(-1).log()
    values_TK, ids_TK = unpack_keys(best_TK)
    return Selection(
        values=values_TK,
        ids=ids_TK,
        log_sum_exp=(total_T + peak_T1[:, 0]).float(),
        tail_logprob=(rest_T.log() - total_T).float(),
    )


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """Return int64 keys whose descending order is (value descending, id ascending).

    The upper half is the float's bits, flipped for negative numbers, which orders like the floats;
    the lower half is the id, counted from above.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    ordered = bits ^ ((bits >> 31) & LOW_BITS)
    return ordered.long().mul_(2**32).add_(LOW_BITS - ids)


def unpack_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float32 values and int64 ids of keys."""
    ordered = (keys >> 32).int()
    values = (ordered ^ ((ordered >> 31) & LOW_BITS)).view(torch.float32)
    return values, LOW_BITS - (keys & LOW_BITS)


def _select_by_kernel(logits: Tensor, k: int, blocks: Blocks) -> Selection:
    logits = _rows(logits)
    T, V = logits.shape
    N = blocks.peaks.shape[1]
    device = logits.device
    chosen_TK = torch.empty(T, k, dtype=torch.int32, device=device)
    peak_T, total_T, rest_T = torch.empty(3, T, dtype=torch.float32, device=device)
    keys_TK = torch.empty(T, k, dtype=torch.int64, device=device)
    padded_N, padded_K = triton.next_power_of_2(N), triton.next_power_of_2(k)
    unused = UNUSED_BITS[logits.dtype]
    with torch.cuda.device_of(logits):
        _choose_blocks[(T,)](
            *blocks, chosen_TK, peak_T, total_T, rest_T, N, k, padded_N, unused,
            num_warps=_warps(padded_N),
        )  # fmt: skip
        _choose_tokens[(T,)](
            logits, chosen_TK, peak_T, rest_T, keys_TK, logits.stride(0), V, k, padded_K * BLOCK,
            BLOCK, unused, num_warps=_warps(padded_K * BLOCK),
        )  # fmt: skip
    values_TK, ids_TK = unpack_keys(keys_TK.sort(dim=-1, descending=True).values)
    log_total_T = total_T.log()
    return Selection(values_TK, ids_TK, log_total_T + peak_T, rest_T.log() - log_total_T)


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _warps(lanes: int) -> int:
    """Return the warps for a row of `lanes` values: 16 values per thread, 1 to 16 warps."""
    return min(16, max(1, lanes // 512))


@triton.jit
def _summarize(
    logits, peaks, sums, stride, V, N, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * stride + column, mask=column < V, other=-float("inf"))
    x = x.to(tl.float32)
    peak = tl.max(x, axis=1)
    zero = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(tl.exp(x - zero[:, None]), axis=1)
    tl.store(peaks + row * N + block, peak, mask=block < N)
    tl.store(sums + row * N + block, total, mask=block < N)


@triton.jit
def _choose_blocks(
    peaks, sums, chosen, peak_out, total_out, rest_out, N, K, LANES: tl.constexpr,
    UNUSED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, LANES)
    is_real = block < N
    peak = tl.load(peaks + row * N + block, mask=is_real, other=-float("inf"))
    is_chosen = _largest(peak, is_real, K, UNUSED)
    place = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(chosen + row * K + place, block, mask=is_chosen)
    top = tl.max(peak, axis=0)
    mass = tl.load(sums + row * N + block, mask=is_real, other=0.0) * tl.exp(peak - top)
    tl.store(peak_out + row, top)
    tl.store(total_out + row, tl.sum(mass, axis=0))
    tl.store(rest_out + row, tl.sum(tl.where(is_chosen, 0.0, mass), axis=0))


@triton.jit
def _choose_tokens(
    logits, chosen, peak_in, rest, keys, stride, V, K, LANES: tl.constexpr, BLOCK: tl.constexpr,
    UNUSED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    slot = lane // BLOCK
    block = tl.load(chosen + row * K + slot, mask=slot < K, other=0)
    token = block * BLOCK + lane % BLOCK
    is_real = (slot < K) & (token < V)
    x = tl.load(logits + row * stride + token, mask=is_real, other=-float("inf")).to(tl.float32)
    is_chosen = _largest(x, is_real, K, UNUSED)
    place = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    # the same keys as in `_keys`
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    tl.store(keys + row * K + place, key, mask=is_chosen)
    outside = tl.where(is_chosen | (slot >= K), 0.0, tl.exp(x - tl.load(peak_in + row)))
    tl.store(rest + row, tl.load(rest + row) + tl.sum(outside, axis=0))


@triton.jit
def _largest(x, is_real, K, UNUSED: tl.constexpr):
    """Return a mask of the lanes that hold the K largest; ties: the first lanes."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    # map floats to unsigned integers in order: set the sign, or flip all bits of a negative one
    flipped = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    key = tl.where(is_real, flipped >> UNUSED, 0)  # the key of -inf is larger
    # the threshold, bit by bit: the largest key that at least K of the row's keys reach; the lowest
    # UNUSED bits are equal in all keys
    threshold = tl.zeros((), dtype=tl.uint32)
    for i in range(32 - UNUSED):
        higher = threshold | (tl.full((), 1, tl.uint32) << (31 - UNUSED - i))
        reached = tl.sum((key >= higher).to(tl.int32), axis=0)
        threshold = tl.where(reached >= K, higher, threshold)
    is_above = key > threshold
    is_equal = key == threshold
    missing = K - tl.sum(is_above.to(tl.int32), axis=0)
    return is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= missing))
