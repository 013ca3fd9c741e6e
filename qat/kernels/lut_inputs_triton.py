"""Where the kernels of a decoding step put what the next matrix reads."""

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton
from qat.kernels.lut_matvec import SPLIT


def empty_inputs(B: int, I: int, order: int, device: torch.device) -> Tensor:
    """Room for inputs in that order (`lut_matvec.spread`)."""
    is_split = order == SPLIT
    dtype = torch.float16 if is_split else torch.float32
    return torch.empty(B, 2 * I if is_split else I, dtype=dtype, device=device)


@triton.jit
def put_inputs(out, b, place, y, is_there, size, ORDER: tl.constexpr):
    """Write inputs of the next matrix, of `size` a vector, as `lut_matvec.spread` lays them."""
    if ORDER == 0:
        at = b * 2 * size + place // 16 * 16 + place % 2 * 8 + place % 16 // 2
        part = y * 0.0625
        upper = part.to(tl.float16)
        tl.store(out + at, upper, mask=is_there)
        tl.store(out + at + size, (part - upper.to(tl.float32)).to(tl.float16), mask=is_there)
    else:
        at = b * size + place % ORDER * (size // ORDER) + place // ORDER
        tl.store(out + at, y, mask=is_there)
