"""The gated unit between an MLP's projections, for joined gates and ups.

Shapes: F width of gates and of ups.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from qat.kernels.dispatch import tl, triton, use_triton
from qat.kernels.tuned import chosen

LARGEST_BLOCK = 1024
"""Columns of a row per program: 16 bytes of gates and of ups for each of 128 threads.

A tuned table may override it: on an H200, 4,096 columns were faster (`tuned/`).
"""


class Cut(NamedTuple):
    """The tiling of a row."""

    block: int
    """Columns per program, a power of two."""
    warps: int = 4


def silu_mul(joined: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `(..., F)`, for `joined` `(..., 2F)`, which holds gates, then ups.

    On a GPU one pass computes the result and one pass the gradient, which has the layout of
    `joined`; both in float32, rounded once.
    """
    if use_triton(joined, __name__):
        if joined.requires_grad or torch.compiler.is_compiling():
            return fused_silu_mul(joined)
        return _forward(joined)  # a custom op costs the host more than the launch does
    gate, up = joined.chunk(2, dim=-1)
    return functional.silu(gate) * up


@torch.library.custom_op("qat::silu_mul", mutates_args=())
def fused_silu_mul(joined: Tensor) -> Tensor:
    """Compute `silu_mul` in one Triton kernel; every tensor is read or written once."""
    return _forward(joined)


def _forward(joined: Tensor) -> Tensor:
    out = joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)
    _launch("gated_unit", _forward_kernel, joined.contiguous(), out, like=out)
    return out


@fused_silu_mul.register_fake
def _(joined: Tensor) -> Tensor:
    return joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)


@torch.library.custom_op("qat::silu_mul_backward", mutates_args=())
def _silu_mul_backward(grad: Tensor, joined: Tensor) -> Tensor:
    d_joined = joined.new_empty(joined.shape)
    tensors = (grad.contiguous(), joined.contiguous(), d_joined)
    _launch("gated_unit_backward", _backward_kernel, *tensors, like=grad)
    return d_joined


@_silu_mul_backward.register_fake
def _(grad: Tensor, joined: Tensor) -> Tensor:
    return joined.new_empty(joined.shape)


fused_silu_mul.register_autograd(
    lambda ctx, grad: _silu_mul_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@triton.jit
def _forward_kernel(joined, out, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # offsets may exceed 2**31
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    places = joined + row * (2 * F) + column  # the ups follow F columns later
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(places + F, mask=inside, other=0.0).to(tl.float32)
    found = gate * tl.sigmoid(gate) * up
    tl.store(out + row * F + column, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad, joined, d_joined, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    places = row * (2 * F) + column
    gate = tl.load(joined + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + places + F, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * F + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)  # d silu(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g)))
    d_up = g * gate * share
    d_gate = g * up * share * (1 + gate * (1 - share))
    kind = d_joined.dtype.element_ty
    tl.store(d_joined + places, d_gate.to(kind), mask=inside)
    tl.store(d_joined + places + F, d_up.to(kind), mask=inside)


def _launch(name: str, kernel: triton.JITFunction, *tensors: Tensor, like: Tensor) -> None:
    F = like.shape[-1]
    if like.numel() == 0:
        return
    cut = chosen(name, (F,), Cut(min(LARGEST_BLOCK, triton.next_power_of_2(F))), like.device)
    with torch.cuda.device_of(like):
        kernel[(like.numel() // F, triton.cdiv(F, cut.block))](
            *tensors, F=F, BLOCK=cut.block, num_warps=cut.warps
        )
