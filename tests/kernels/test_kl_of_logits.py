"""KL of two rows of logits and its gradient: against autograd, and the kernel against eager."""

import pytest
import torch
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.nn import functional as F

from qat.kernels import kl_of_logits as module
from qat.kernels.dispatch import computing_by
from qat.kernels.kl_of_logits import Scale, kl_of_logits

SCALES = [Scale(), Scale(2.0, 0.25), Scale(0.5, 3.0, softcap=5.0)]


def logits_of(rows: int, words: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return a teacher's and a student's logits, and a mask that leaves out every third token."""
    teacher, student = 4 * torch.randn(2, rows, words, dtype=dtype)
    return teacher, student.clamp(-4.9, 4.9), torch.arange(rows) % 3 != 1


@pytest.mark.parametrize("scale", SCALES)
def test_equals_autograd(scale: Scale) -> None:
    teacher, student, mask = logits_of(7, 19)
    before = student
    if scale.softcap is not None:
        before = scale.softcap * (student / scale.softcap).atanh()
    leaf, t = before.clone().requires_grad_(), scale.temperature
    capped = leaf if scale.softcap is None else scale.softcap * (leaf / scale.softcap).tanh()
    parts = ((capped / t).log_softmax(1), (teacher / t).log_softmax(1))
    kl = t**2 * F.kl_div(*parts, reduction="none", log_target=True).sum(1) * mask
    (expected,) = torch.autograd.grad(scale.weight * kl.sum(), leaf)
    found = kl_of_logits(teacher, student, mask, scale, slope=torch.float64)
    torch.testing.assert_close(found.kl, kl.detach())
    torch.testing.assert_close(found.slope, expected)
    assert kl_of_logits(teacher, student, mask, scale, slope=None).slope is None


@pytest.mark.parametrize(
    ("rows", "words", "scale"),
    [(4, 19, SCALES[0]), (2, 64, SCALES[1]), (3, 333, SCALES[2]), (0, 5, SCALES[0])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_errs_no_more_than_eager(rows, words, scale, dtype, monkeypatch) -> None:
    """Over several blocks of words, whose last is not full."""
    pytest.importorskip("triton")
    monkeypatch.setattr(module, "BLOCK", 64)
    *both, mask = logits_of(rows, words, torch.float32)
    both[0] = both[0].T.contiguous().T  # a layout of its own
    with computing_by(kernel=True):
        kernel = kl_of_logits(*both, mask, scale, slope=dtype)
    eager = kl_of_logits(*both, mask, scale, slope=dtype)
    exact = kl_of_logits(*(each.double() for each in both), mask, scale, slope=torch.float64)
    if rows == 0:
        assert kernel.kl.shape == (0,) and kernel.slope.shape == (0, words)
        return
    slack = 2**-22 * exact.kl.max().item()  # two roundings of the largest
    assert_no_worse_than_eager(kernel.kl, eager.kl, exact.kl, slack=slack)
    assert kernel.slope.dtype == dtype and not kernel.slope[~mask].any()
    assert_no_worse_than_eager(kernel.slope, eager.slope, exact.slope, slack=2e-7)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_what_does_not_count_may_be_anything(by_kernel: bool) -> None:
    if by_kernel:
        pytest.importorskip("triton")
    teacher, student, mask = logits_of(4, 19, torch.float32)
    with computing_by(kernel=by_kernel):
        expected = kl_of_logits(teacher, student, mask, Scale(), slope=torch.float32)
        student[1] = torch.nan
        teacher[1] = torch.inf
        found = kl_of_logits(teacher, student, mask, Scale(), slope=torch.float32)
        assert torch.equal(found.kl, expected.kl) and torch.equal(found.slope, expected.slope)
        student[0, 3] = torch.nan
        found = kl_of_logits(teacher, student, mask, Scale(), slope=torch.float32)
    assert found.kl.isnan().tolist() == [True, False, False, False]
    assert found.slope[0].isnan().all()


def test_logits_far_apart_have_a_finite_divergence() -> None:
    pytest.importorskip("triton")
    teacher = torch.tensor([[0.0, 3e4, -3e4]])
    student = torch.tensor([[3e4, 0.0, -3e4]])
    with computing_by(kernel=True):
        found = kl_of_logits(teacher, student, torch.ones(1) > 0, Scale(), slope=torch.float32)
        alone = kl_of_logits(teacher, student, torch.ones(1) > 0, Scale(), slope=None)
    assert alone.slope is None and torch.equal(alone.kl, found.kl)
    torch.testing.assert_close(found.kl, torch.tensor([3e4]))
    torch.testing.assert_close(found.slope, torch.tensor([[1.0, -1.0, 0.0]]))
