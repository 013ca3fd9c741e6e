"""Triton's side of `qat.kernels.topk`: one pass over the logits, then K candidate blocks a row.

A threshold is found bit by bit: the largest 32-bit key that at least K of a row's keys reach. For
16-bit logits only the upper bits are tried, since the others are equal in all.

Shapes: T tokens, V vocabulary, K tokens kept, N blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton
from qat.kernels.topk import BLOCK, Blocks, Selection, unpack_keys
from qat.kernels.tuned import chosen


class BlockPass(NamedTuple):
    """How the pass over logits is cut."""

    blocks: int = 64
    """Blocks of a program, a power of two."""
    warps: int = 4


MAX_K = 512  # K * BLOCK candidates are held in one program's registers
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def summarize_by_kernel(logits: Tensor) -> Blocks:
    """`topk.summarize`."""
    logits = _rows(logits)
    T, V = logits.shape
    N = triton.cdiv(V, BLOCK)
    peaks = torch.empty(T, N, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(peaks)
    cut = chosen("top_k_blocks", (V,), BlockPass(), logits.device)
    grid = (T, triton.cdiv(N, cut.blocks))
    with torch.cuda.device_of(logits):
        _summarize[grid](
            logits, peaks, sums, logits.stride(0), V, N, BLOCK, cut.blocks, num_warps=cut.warps
        )
    return Blocks(peaks, sums)


def can_select(k: int, blocks: Blocks) -> bool:
    """Whether the kernel takes this K: a block for each, and candidates that fit one program."""
    return k <= min(MAX_K, blocks.peaks.shape[1])


def select_by_kernel(logits: Tensor, k: int, blocks: Blocks) -> Selection:
    """`topk.top_k_of_blocks` for a K that `can_select` allows."""
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
    """Warps for a row of `lanes` values: 16 a thread, at least one warp and at most 16."""
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
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    tl.store(keys + row * K + place, key, mask=is_chosen)
    outside = tl.where(is_chosen | (slot >= K), 0.0, tl.exp(x - tl.load(peak_in + row)))
    tl.store(rest + row, tl.load(rest + row) + tl.sum(outside, axis=0))


@triton.jit
def _largest(x, is_real, K, UNUSED: tl.constexpr):
    """Which lanes hold the K largest; among equal ones the first."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    flipped = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    key = tl.where(is_real, flipped >> UNUSED, 0)  # that of -inf is greater
    threshold = tl.zeros((), dtype=tl.uint32)
    for i in range(32 - UNUSED):
        higher = threshold | (tl.full((), 1, tl.uint32) << (31 - UNUSED - i))
        reached = tl.sum((key >= higher).to(tl.int32), axis=0)
        threshold = tl.where(reached >= K, higher, threshold)
    is_above = key > threshold
    is_equal = key == threshold
    missing = K - tl.sum(is_above.to(tl.int32), axis=0)
    return is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= missing))
