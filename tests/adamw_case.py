"""A weight in bfloat16 that AdamW moves, and where exactly it should go."""

import torch
from torch import Tensor

from qat.kernels.adamw import Moving, Rates

RATES = Rates(lr=1e-2, decay=1e-3, beta1=0.9, beta2=0.95, eps=1e-12)


def moving(*shape: int, gradient_dtype: torch.dtype = torch.bfloat16) -> Moving:
    p, g, m = torch.randn(3, *shape)
    return Moving(
        p.bfloat16(), g.to(gradient_dtype), (m * 0.1).bfloat16(), m.square().bfloat16() * 0.3
    )


def shared(factor: float = 0.5, step: int = 3) -> Tensor:
    return torch.tensor([factor, 1 - 0.9**step, (1 - 0.95**step) ** 0.5])


def moved(before: Moving) -> list[Tensor]:
    """Return the results of torch.optim.AdamW in float64 at step 3, with the gradient halved."""
    p, g, m, v = (tensor.cpu().double() for tensor in before)
    p = torch.nn.Parameter(p)
    adamw = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    adamw.state[p] = {"step": torch.tensor(2.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    p.grad = g / 2
    adamw.step()
    return [p.detach(), adamw.state[p]["exp_avg"], adamw.state[p]["exp_avg_sq"]]


def neighbours(exact: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers around float64 ones: towards zero and away from it."""
    bits = exact.float().view(torch.int32)
    inner = bits & -(1 << 16)
    return inner.view(torch.float32).double(), (inner + (1 << 16)).view(torch.float32).double()


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """Each number is one of the two bfloat16 neighbours of the exact one.

    Of a million, one may lie beyond: float32 arithmetic may put it on the other side of a number.
    """
    low, high = neighbours(exact)
    slack = 1e-6 + exact.abs() * 1e-6  # of float32 arithmetic, where terms cancel
    size = found.double().abs()
    is_near = (size >= low.abs() - slack) & (size <= high.abs() + slack)
    assert (~is_near).sum() <= 1e-6 * exact.numel()


def copy(tensors: Moving) -> Moving:
    return Moving(*(tensor.clone() for tensor in tensors))


def kept(tensors: Moving) -> tuple[Tensor, Tensor, Tensor]:
    return tensors.parameter, tensors.exp_avg, tensors.exp_avg_sq
