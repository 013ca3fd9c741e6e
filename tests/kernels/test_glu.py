"""The gated unit: the reference against PyTorch's own lines, the kernel against the reference."""

import pytest
import torch
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.nn import functional as F

from qat.kernels.dispatch import computing_by
from qat.kernels.glu import fused_silu_mul, silu_mul

SHAPES = [(3, 7, 64), (1, 100), (2, 2 * 1030), (0, 8)]


def value_and_gradient(unit, joined: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = joined.clone().requires_grad_()
    out = unit(leaf)
    out.backward(grad)
    return out.detach(), leaf.grad


def test_reference_is_silu_of_the_first_half_times_the_second() -> None:
    joined = torch.randn(5, 12)
    torch.testing.assert_close(silu_mul(joined), F.silu(joined[:, :6]) * joined[:, 6:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernel_errs_no_more_than_eager(shape, dtype) -> None:
    pytest.importorskip("triton")
    joined = (4 * torch.randn(shape)).to(dtype)
    grad = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    kernel = value_and_gradient(fused_silu_mul, joined, grad)
    with computing_by(kernel=True):
        assert torch.equal(silu_mul(joined), kernel[0])  # which needs no operator
    if joined.numel() == 0:
        assert [found.shape for found in kernel] == [grad.shape, joined.shape]
        return
    eager = value_and_gradient(silu_mul, joined, grad)
    exact = value_and_gradient(silu_mul, joined.double(), grad.double())
    for one, plain, truth in zip(kernel, eager, exact, strict=True):
        slack = torch.finfo(dtype).eps * truth.abs().max().item()
        assert_no_worse_than_eager(one, plain, truth, slack=slack)


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's exp, whose infinity is meant
def test_gates_far_from_zero_stay_finite() -> None:
    pytest.importorskip("triton")
    joined = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    out, grad = value_and_gradient(fused_silu_mul, joined, torch.ones(1, 4))
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 200.0, 1e4]]))
    torch.testing.assert_close(grad[:, :4], torch.tensor([[0.0, 0.0, 1.0, 1.0]]))


def test_a_gradient_that_is_not_contiguous_is_read_right() -> None:
    pytest.importorskip("triton")
    joined, grad = torch.randn(4, 32), torch.randn(16, 4).T
    _, found = value_and_gradient(fused_silu_mul, joined, grad)
    _, expected = value_and_gradient(silu_mul, joined, grad)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_operator_keeps_its_promises_to_the_compiler() -> None:
    pytest.importorskip("triton")
    torch.library.opcheck(fused_silu_mul, (torch.randn(3, 16, requires_grad=True),))
