"""The best path through a trellis, by whoever finds it fastest.

A program owns a few rows and walks their weights; its lanes share the states, 8 each of 256. A
weight costs a state one product, one sum and its share of finding the least of the K states that
lead to the same K; which of them that was takes k bits, in words that the walk back reads. For 2
bits those are 16 bytes a weight.

Shapes: O out_features, I in_features, C states, K states that one leads to.
"""

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton, use_triton
from qat.quant import trellis as reference

ROWS = 2
"""Of a program, one warp."""
PIECE = 2**24
"""Weights whose paths are found in one launch: 256 MiB of ways back at 2 bits."""


def best_path(weight: Tensor, S: Tensor, codebook: Tensor, trellis_bits: int) -> Tensor:
    """Indices `(O, I)` of least error, as `quant.trellis.best_path` defines them, to the bit."""
    if use_triton(weight):
        return path_by_kernel(weight, S, codebook, trellis_bits)
    return reference.best_path(weight, S, codebook, trellis_bits)


def path_by_kernel(weight: Tensor, S: Tensor, codebook: Tensor, trellis_bits: int) -> Tensor:
    """As `quant.trellis.best_path`."""
    (O, I), C, k = weight.shape, len(codebook), trellis_bits
    weight, S = weight.contiguous(), S.contiguous()
    U = C >> k
    bits = 1 << (k - 1).bit_length()  # 1, 2 or 4 of them fill a word
    per_word = min(32 // bits, U)
    indices = torch.empty(O, I, dtype=torch.uint8, device=weight.device)
    size = max(1, PIECE // I)
    back = torch.empty(min(O, size), I, U // per_word, dtype=torch.int32, device=weight.device)
    for start in range(0, O, size):
        rows = slice(start, start + size)
        count = len(weight[rows])
        _path_kernel[(triton.cdiv(count, ROWS),)](
            indices[rows], back, weight[rows], S[rows], codebook.contiguous(), count, I,
            BITS=k, C=C, FIELD=bits, PER_WORD=per_word, TILE=ROWS,
            enable_fp_fusion=False, num_warps=1,
        )  # fmt: skip
    return indices


@triton.jit
def _path_kernel(
    indices, back, weight, S, codebook, num_rows, I,
    BITS: tl.constexpr, C: tl.constexpr, FIELD: tl.constexpr, PER_WORD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = 2**BITS
    U: tl.constexpr = C // K
    WORDS: tl.constexpr = U // PER_WORD
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_row = row < num_rows
    first = row.to(tl.int64) * I
    state = tl.arange(0, C)[None, :]
    levels = tl.load(codebook + state)
    cost = tl.zeros([TILE, C], tl.float32) + tl.where(state == 0, 0.0, float("inf"))
    shifts = (tl.arange(0, PER_WORD) * FIELD)[None, None, :]
    word = tl.arange(0, WORDS)[None, :]
    next_w = tl.load(weight + first, mask=is_row, other=0).to(tl.float32)
    next_S = tl.load(S + first, mask=is_row, other=0)
    for i in range(I):
        w, s = next_w[:, None], next_S[:, None]
        # the next weight is on its way while this one is computed
        is_next = is_row & (i + 1 < I)
        next_w = tl.load(weight + first + i + 1, mask=is_next, other=0).to(tl.float32)
        next_S = tl.load(S + first + i + 1, mask=is_next, other=0)
        # K states in a row lead to the same K: halves of them, of which the lower wins a tie
        least, which = cost, tl.zeros([TILE, C], tl.int32) + state % K
        for halving in tl.static_range(1, BITS + 1):
            even, odd = tl.split(tl.reshape(least, (TILE, C >> halving, 2)))
            which_even, which_odd = tl.split(tl.reshape(which, (TILE, C >> halving, 2)))
            is_less = odd < even
            least, which = tl.where(is_less, odd, even), tl.where(is_less, which_odd, which_even)
        fields = tl.sum(tl.reshape(which, (TILE, WORDS, PER_WORD)) << shifts, axis=2)
        tl.store(back + ((first + i) * WORDS)[:, None] + word, fields, mask=is_row[:, None])
        error = w - s * levels
        before = tl.broadcast_to(least[:, None, :], (TILE, K, U))
        cost = error * error + tl.reshape(before, (TILE, C))
    tl.debug_barrier()  # every thread has stored before one of them reads
    found = tl.argmin(cost, axis=1)
    for j in range(I):
        i = I - 1 - j
        tl.store(indices + first + i, found.to(tl.uint8), mask=is_row)
        older = found % U
        fields = tl.load(back + (first + i) * WORDS + older // PER_WORD, mask=is_row, other=0)
        found = older * K + (fields >> (older % PER_WORD * FIELD) & (K - 1))
