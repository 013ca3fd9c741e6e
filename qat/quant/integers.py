"""Finds the integers and scales behind a weight that another format has rounded already.

What llama.cpp stores as Q4_0, Q5_0 or Q8_0 is integers times a float16 scale for each 32 weights of
a row. Read as floats and fitted again it would lose a second time; found again it loses nothing.

Shapes: O rows, I columns, N blocks of W weights.
"""

from typing import cast

import torch
from torch import Tensor

from qat.quant.codebook import fixed_grid
from qat.quant.spec import LutSpec
from qat.quant.weight import QuantizedWeight, Scales, index_dtype

BITS = (4, 5, 8)
"""Bits of the integers in ggml's types of one float16 scale for each block."""
BLOCK = 32
"""Weights of a row that share such a scale."""
PIECE = 2**16
"""Blocks whose integers are found at a time."""


def integer_spec(bits: int) -> LutSpec:
    """The format of a weight in so many bits that `exact_integers` finds."""
    return LutSpec(bits=bits, codebook="int", group_size=BLOCK, scale_bits=16)


def is_integers(spec: LutSpec) -> bool:
    """Return whether `spec` is one that `exact_integers` finds."""
    return spec.codebook == "int" and spec.bits in BITS and spec == integer_spec(spec.bits)


def rounded_bits(weight: Tensor) -> int | None:
    """The fewest bits of integers that `weight` `(O, I)` is; None if it is none, or zero."""
    if weight.shape[1] % BLOCK or not weight.any():
        return None
    return next((bits for bits in BITS if exact_integers(weight, bits) is not None), None)


def exact_integers(weight: Tensor, bits: int) -> QuantizedWeight | None:
    """Return `weight` `(O, I)` as integers of `bits` bits times float16 scales; None if inexact.

    A scale may be negative: ggml gives the value of largest magnitude, of either sign, the
    lowest integer, because there is one more below zero than above.
    """
    O, I = weight.shape
    spec = integer_spec(bits)
    levels = cast(Tensor, fixed_grid(spec)).to(weight.device)  # integers always have one
    codes, scales = [], []
    for blocks_NW in weight.detach().float().reshape(-1, BLOCK).split(PIECE):
        found = _integers(blocks_NW, bits)
        if found is None:
            return None
        codes.append(found[0])
        scales.append(found[1])
    indices = (torch.cat(codes) - levels[0]).to(index_dtype(len(levels))).view(O, I)
    return QuantizedWeight(indices, levels, Scales(torch.cat(scales).view(O, -1), bits=16))


def _integers(blocks_NW: Tensor, bits: int) -> tuple[Tensor, Tensor] | None:
    """The integers `(N, W)` and the scale `(N,)` of each block; None where one has none."""
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    place_N1 = blocks_NW.abs().argmax(1, keepdim=True)
    extreme_N = blocks_NW.gather(1, place_N1)[:, 0]
    codes_NW, scales_N = torch.zeros_like(blocks_NW), torch.zeros_like(extreme_N)
    left = extreme_N.nonzero()[:, 0]  # a block of zeros has a scale of zero
    # which integer the extreme is: mostly the outermost, of a searched scale one further inside
    for integer in sorted(range(lowest, highest + 1), key=lambda n: (abs(n), n), reverse=True):
        if not len(left) or integer == 0:
            break
        scale_n = (extreme_N[left] / integer).half().float()
        codes_nW = (blocks_NW[left] / scale_n[:, None]).round()
        is_exact = (codes_nW * scale_n[:, None] == blocks_NW[left]).all(1)
        is_exact &= ((codes_nW >= lowest) & (codes_nW <= highest)).all(1)
        done = left[is_exact]
        codes_NW[done], scales_N[done] = codes_nW[is_exact], scale_n[is_exact]
        left = left[~is_exact]
    return None if len(left) else (codes_NW, scales_N)
