"""The best path through a trellis, in Triton or by the reference.

A program, one warp, iterates over the weights of a row; its lanes share the states, 8 of 256 each.
The index of the best of the K predecessors of a state is a byte for the backward pass: 64 bytes per
weight at 2 bits. Compiled for Hopper, a weight takes 101 instructions forward, 32 of them the
products and sums of its states, and 12 backward. With 16 such bytes packed in words it is 127 and
27; with two rows per program it is 152 each, since states are then computed twice.

Shapes: O out_features, I in_features, C states, K predecessors of a state, U distinct sets of them.
"""

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton, use_triton
from qat.quant import trellis as reference

PIECE = 2**22
"""Weights whose paths are found in one launch: 256 MiB of back pointers at 2 bits."""


def best_path(weight: Tensor, S: Tensor, codebook: Tensor, trellis_bits: int) -> Tensor:
    """Return the indices `(O, I)` of least error, bit-identical to `quant.trellis.best_path`."""
    if use_triton(weight, __name__):
        return path_by_kernel(weight, S, codebook, trellis_bits)
    return reference.best_path(weight, S, codebook, trellis_bits)


def path_by_kernel(weight: Tensor, S: Tensor, codebook: Tensor, trellis_bits: int) -> Tensor:
    """Do what `quant.trellis.best_path` does in a kernel."""
    (O, I), C, k = weight.shape, len(codebook), trellis_bits
    weight, S = weight.contiguous(), S.contiguous()
    indices = torch.empty(O, I, dtype=torch.uint8, device=weight.device)
    size = max(1, PIECE // I)
    back = torch.empty(min(O, size), I, C >> k, dtype=torch.uint8, device=weight.device)
    for start in range(0, O, size):
        rows = slice(start, start + size)
        _path_kernel[(len(indices[rows]),)](
            indices[rows], back, weight[rows], S[rows], codebook.contiguous(), I,
            BITS=k, C=C, enable_fp_fusion=False, num_warps=1,
        )  # fmt: skip
    return indices


@triton.jit
def _path_kernel(
    indices, back, weight, S, codebook, I, BITS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    K: tl.constexpr = 2**BITS
    U: tl.constexpr = C // K
    first = tl.program_id(0).to(tl.int64) * I
    state = tl.arange(0, C)
    levels = tl.load(codebook + state)
    cost = tl.where(state == 0, 0.0, float("inf"))
    next_w, next_S = tl.load(weight + first).to(tl.float32), tl.load(S + first)
    for i in range(I):
        w, s = next_w, next_S
        # prefetch the next weight while this one is computed
        next_w = tl.load(weight + first + i + 1, mask=i + 1 < I, other=0).to(tl.float32)
        next_S = tl.load(S + first + i + 1, mask=i + 1 < I, other=0)
        # K consecutive states lead to the same K states: reduce them in halves; the lower wins a
        # tie
        least, which = cost, state % K
        for halving in tl.static_range(1, BITS + 1):
            even, odd = tl.split(tl.reshape(least, (C >> halving, 2)))
            which_even, which_odd = tl.split(tl.reshape(which, (C >> halving, 2)))
            is_less = odd < even
            least, which = tl.where(is_less, odd, even), tl.where(is_less, which_odd, which_even)
        tl.store(back + (first + i) * U + tl.arange(0, U), which.to(tl.uint8))
        error = w - s * levels
        cost = error * error + tl.reshape(tl.broadcast_to(least[None, :], (K, U)), (C,))
    tl.debug_barrier()  # every thread stores before one of them reads
    found = tl.argmin(cost, axis=0)
    for j in range(I):
        i = I - 1 - j
        tl.store(indices + first + i, found.to(tl.uint8))
        older = found % U
        found = older * K + tl.load(back + (first + i) * U + older).to(tl.int32)
