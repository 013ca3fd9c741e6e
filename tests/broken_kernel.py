"""A Triton kernel that no compiler takes, for tests of what happens then."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(x, y, N: tl.constexpr):
    place = tl.arange(0, N)  # not a power of two
    tl.store(y + place, tl.no_such_function(tl.load(x + place)))


def launch(inputs: dict[str, Tensor], size: dict[str, int]) -> dict[str, Tensor]:
    y = torch.empty_like(inputs["x"])
    _kernel[(1,)](inputs["x"], y, N=size["N"])
    return {"y": y}
