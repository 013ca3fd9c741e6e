"""A Triton kernel that needs shared memory, for tests of GPUs that have less."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(x, y, N: tl.constexpr):
    place = tl.arange(0, N)
    tile = tl.load(x + place[:, None] * N + place)
    tl.store(y + place[:, None] * N + place, tl.dot(tile, tile).to(tl.float16))


def squared(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _kernel[(1,)](x, y, N=len(x))
    return y
