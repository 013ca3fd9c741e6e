"""Add to a residual stream and apply the norm that reads it, in one pass.

Shapes: T tokens, D model width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.kernels.dispatch import tl, triton, use_triton


def add_norm_(
    residual: Tensor, delta: Tensor | None, gain: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Add `delta` to `residual` in place; return `rms_norm(residual) * gain`, `(T, D)` in `dtype`.

    `residual` `(T, D)` and `gain` `(D,)` are float32; `delta` may be None. On a GPU every tensor is
    read or written once.
    """
    if not use_triton(residual, __name__):
        if delta is not None:
            residual += delta
        return F.rms_norm(residual, residual.shape[-1:], gain, eps).to(dtype)
    T, D = residual.shape
    out = torch.empty(T, D, dtype=dtype, device=residual.device)
    block = triton.next_power_of_2(D)
    _add_norm_kernel[(T,)](
        out, residual, delta, gain, eps, D=D, BLOCK=block, num_warps=4 if block <= 2048 else 8
    )
    return out


@triton.jit
def _add_norm_kernel(out, residual, delta, gain, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    # a program has a row; D is padded to BLOCK, a power of two
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < D
    place = row * D + column
    x = tl.load(residual + place, mask=inside, other=0.0)
    if delta is not None:
        x += tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + place, x, mask=inside)
    norm = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    y = x * norm * tl.load(gain + column, mask=inside, other=0.0)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)
