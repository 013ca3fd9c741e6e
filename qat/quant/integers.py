"""Recovery of the integers and scales behind a weight that another format has already rounded.

llama.cpp stores Q4_0, Q5_0 and Q8_0 as integers times a float16 scale per 32 weights of a row. Such
a weight, read as floats and fitted again, would lose precision a second time; with its integers
recovered it loses nothing.

Shapes: O rows, I columns, N blocks of W weights.
"""

from typing import cast

import torch
from torch import Tensor

from qat.quant.codebook import fixed_grid
from qat.quant.spec import LutSpec
from qat.quant.weight import QuantizedWeight, Scales, index_dtype

BITS = (4, 5, 8)  # bits of the integers in the ggml types that have one float16 scale per block
BLOCK = 32  # weights of a row that share one scale
PIECE = 2**16  # blocks that are processed at a time


def integer_spec(bits: int) -> LutSpec:
    """Return the format of a weight that `exact_integers` recovers at `bits` bits."""
    return LutSpec(bits=bits, codebook="int", group_size=BLOCK, scale_bits=16)


def is_integers(spec: LutSpec) -> bool:
    """Return whether `spec` is a format that `exact_integers` can recover."""
    return spec.codebook == "int" and spec.bits in BITS and spec == integer_spec(spec.bits)


def rounded_bits(weight: Tensor) -> int | None:
    """Return the fewest bits whose integers represent `weight` `(O, I)` exactly, else None.

    Also None for a weight of zeros.
    """
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
    levels = cast(Tensor, fixed_grid(spec)).to(weight.device)  # a grid of integers is never None
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
    """Return the integers `(N, W)` and the scale `(N,)` of each block; None if a block has no exact
    form.
    """
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    place_N1 = blocks_NW.abs().argmax(1, keepdim=True)
    extreme_N = blocks_NW.gather(1, place_N1)[:, 0]
    codes_NW, scales_N = torch.zeros_like(blocks_NW), torch.zeros_like(extreme_N)
    left = extreme_N.nonzero()[:, 0]  # a block of zeros has a scale of zero
    # try each integer for the extreme: mostly the outermost, but one further inside where ggml
    # searched for the scale
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
