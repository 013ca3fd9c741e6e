"""Cross-entropies: the textbook, and that draws teach what the whole teacher would."""

import pytest
import torch
from logit_losses import FROM_LOGITS
from teacher_targets import targets_of
from torch import Tensor
from torch.nn import functional as F

T, V = 12, 17
hard_ce, sampled = FROM_LOGITS["hard_ce"], FROM_LOGITS["sampled"]


def logits_pair() -> tuple[Tensor, Tensor]:
    student = torch.randn(T, V, dtype=torch.float64) * 2
    return student.requires_grad_(), torch.randn(T, V, dtype=torch.float64) * 2


def test_hard_ce_equals_the_textbook() -> None:
    student, teacher = logits_pair()
    targets = targets_of(teacher, 4)
    labels = targets.labels.masked_fill(~targets.mask, -100)
    expected = F.cross_entropy(student, labels, ignore_index=-100, reduction="sum")
    actual = hard_ce(student, targets)
    torch.testing.assert_close(actual, expected)
    (gradient,) = torch.autograd.grad(actual, student)
    (expected_gradient,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(gradient, expected_gradient)


def test_sampled_equals_soft_label_cross_entropy() -> None:
    student, teacher = logits_pair()
    targets = targets_of(teacher, 4, draws=9)
    soft = torch.zeros(T, V, dtype=torch.float64)
    soft.scatter_add_(1, targets.sample_ids, targets.sample_counts.double() / 9)
    expected = F.cross_entropy(student[targets.mask], soft[targets.mask], reduction="sum")
    torch.testing.assert_close(sampled(student, targets), expected)
    assert torch.autograd.gradcheck(lambda z: sampled(z, targets), student)


def test_words_know_no_temperature_and_no_draws_add_zero() -> None:
    student, teacher = logits_pair()
    targets = targets_of(teacher, 4)
    for loss in (sampled, hard_ce):
        assert torch.equal(loss(student, targets, temperature=3.0), loss(student, targets))
    silent = targets._replace(sample_counts=torch.zeros_like(targets.sample_counts))
    assert sampled(student, silent).item() == 0


def test_sampled_refuses_targets_without_draws() -> None:
    student, teacher = logits_pair()
    with pytest.raises(ValueError, match="hold none"):
        sampled(student, targets_of(teacher, 4, draws=0))
