"""The gated unit between an MLP's projections, for gates and ups that lie side by side.

Shapes: F width of gates and of ups.
"""

import torch
from torch import Tensor
from torch.nn import functional

from qat.kernels.dispatch import use_triton


def silu_mul(joined: Tensor) -> Tensor:
    """`silu(gate) * up`, `(..., F)`, of `joined` `(..., 2F)`, which holds gates, then ups.

    On a GPU one pass computes it, and one its gradient, which lies as `joined` does; both in
    float32, rounded once.
    """
    if use_triton(joined):
        return fused_silu_mul(joined)
    gate, up = joined.chunk(2, dim=-1)
    return functional.silu(gate) * up


@torch.library.custom_op("qat::silu_mul", mutates_args=())
def fused_silu_mul(joined: Tensor) -> Tensor:
    """`silu_mul` in one Triton kernel."""
    from qat.kernels.glu_triton import silu_mul_forward

    return silu_mul_forward(joined)


@fused_silu_mul.register_fake
def _(joined: Tensor) -> Tensor:
    return joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)


@torch.library.custom_op("qat::silu_mul_backward", mutates_args=())
def _silu_mul_backward(grad: Tensor, joined: Tensor) -> Tensor:
    from qat.kernels.glu_triton import silu_mul_backward

    return silu_mul_backward(grad, joined)


@_silu_mul_backward.register_fake
def _(grad: Tensor, joined: Tensor) -> Tensor:
    return joined.new_empty(joined.shape)


def _keep_input(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
    return _silu_mul_backward(grad, *ctx.saved_tensors)


fused_silu_mul.register_autograd(_gradient, setup_context=_keep_input)
