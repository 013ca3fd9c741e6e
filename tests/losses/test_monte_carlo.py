"""Draws teach what the whole teacher teaches: their mean gradient is that of the full KL.

Many tokens with one student state and one teacher distribution, each with draws of its own, are
that many tries; a mean must lie within five of its standard errors.
"""

from collections.abc import Callable

import pytest
import torch
from teacher_targets import targets_of
from torch import Tensor

from qat.data.codec import draw
from qat.kernels.head import Head
from qat.losses.config import kinds_read
from qat.losses.formulas import LOSSES, Targets, loss_from_logits
from qat.losses.from_hidden import loss_from_hidden
from qat.losses.from_teacher import OnlineTargets, loss_from_teacher

D, E, V = 5, 7, 23
TRIES, GROUPS = 2048, 32


def systematic(logits: Tensor, count: int) -> Tensor:
    """Return draws as a cache keeps them."""
    return draw(logits, torch.rand(len(logits), dtype=torch.float64), count)


def independent(logits: Tensor, count: int) -> Tensor:
    """Draws that know nothing of each other."""
    return torch.multinomial(logits.softmax(1), count, replacement=True)


class Case:
    """A student, a teacher, and gradients from either kind of target."""

    def __init__(self) -> None:
        self.hidden = torch.randn(1, D, dtype=torch.float64)
        self.weight = torch.randn(V, D, dtype=torch.float64)
        self.teacher = torch.randn(1, E, dtype=torch.float64)
        # flat enough that every word is drawn sometimes
        self.teacher_head = Head(0.5 * torch.randn(V, E, dtype=torch.float64))

    def exact(self) -> tuple[Tensor, Tensor]:
        """The gradients of the full KL, of the hidden state and of the head's weight."""
        known = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
        targets = OnlineTargets(*known, self.teacher, self.teacher_head)
        leaves = self._leaves(1)
        loss = loss_from_teacher(leaves[0], Head(leaves[1]), targets, {"kl": 1.0})["loss"]
        return torch.autograd.grad(loss, leaves)

    def of(self, name: str, targets: Targets) -> tuple[Tensor, Tensor]:
        """The gradients of a loss on a cache: of each try's hidden state, and of the head's sum."""
        leaves = self._leaves(len(targets.mask))
        loss = loss_from_hidden(leaves[0], Head(leaves[1]), targets, {name: 1.0})["loss"]
        return torch.autograd.grad(loss, leaves)

    def targets(
        self, tries: int, sampler: Callable = systematic, draws: int = 50, top_k: int = 4
    ) -> Targets:
        logits = self.teacher_head.logits(self.teacher).expand(tries, V)
        found = targets_of(logits, top_k)
        drawn = sampler(logits, draws)
        counts = torch.zeros(tries, V).scatter_add_(1, drawn, torch.ones(drawn.shape))
        mask = torch.ones(tries, dtype=torch.bool)
        ids = torch.arange(V).expand(tries, V)
        return found._replace(mask=mask, sample_ids=ids, sample_counts=counts)

    def _leaves(self, tries: int) -> list[Tensor]:
        hidden = self.hidden.repeat(tries, 1)
        return [hidden.requires_grad_(), self.weight.clone().requires_grad_()]


def standard_errors(tries: Tensor, exact: Tensor) -> Tensor:
    """Return the distance of the mean over the first dimension from `exact`, in standard errors."""
    return (tries.mean(0) - exact).abs() / (tries.std(0) / len(tries) ** 0.5)


@pytest.mark.parametrize("sampler", [systematic, independent])
def test_the_expected_gradient_of_draws_is_that_of_the_full_kl(sampler: Callable) -> None:
    case = Case()
    of_hidden, of_weight = case.exact()
    gradients, _ = case.of("sampled", case.targets(TRIES, sampler))
    assert standard_errors(gradients, of_hidden[0]).max() < 5
    few = TRIES // GROUPS
    groups = [case.of("sampled", case.targets(few, sampler))[1] for _ in range(GROUPS)]
    means = torch.stack(groups) / few
    assert standard_errors(means, of_weight).max() < 5


def test_the_same_test_sees_the_bias_of_a_top_k() -> None:
    """The gradient of the top 4 is off by far more than draws could be by luck."""
    case = Case()
    of_hidden, _ = case.exact()
    targets = case.targets(TRIES)
    draws, _ = case.of("sampled", targets)
    biased, _ = case.of("tail", targets)
    error = draws.std(0) / TRIES**0.5
    assert ((biased[0] - of_hidden[0]).abs() / error).max() > 10


def noise(case: Case, sampler: Callable, draws: int) -> float:
    """The root mean square distance between the gradients of draws and of the full KL."""
    of_hidden, _ = case.exact()
    gradients, _ = case.of("sampled", case.targets(TRIES, sampler, draws))
    return (gradients - of_hidden).square().sum(1).mean().sqrt().item()


def test_the_noise_of_independent_draws_falls_with_the_root_of_their_number() -> None:
    case = Case()
    few, many = (noise(case, independent, draws) for draws in (16, 64))
    assert few / many == pytest.approx(2.0, rel=0.05)


def test_the_noise_of_systematic_draws_is_smaller_and_falls_faster() -> None:
    case = Case()
    few, many = (noise(case, systematic, draws) for draws in (16, 64))
    assert few / many > 3
    assert many < noise(case, independent, 64) / 3


def test_padding_of_draws_names_no_word() -> None:
    """The loss ignores any id where a count is 0, even one that no word has."""
    logits, teacher = torch.randn(2, 6, V)
    targets = targets_of(teacher, 4, draws=3)
    padding = targets.sample_counts == 0
    assert padding.any()
    other = targets._replace(sample_ids=targets.sample_ids.masked_fill(padding, V + 5))
    for name in [name for name in LOSSES if "draws" in kinds_read([name])]:
        expected, found = (loss_from_logits(logits, each, {name: 1.0}) for each in (targets, other))
        assert torch.equal(found["loss"], expected["loss"]), name
