"""Losses of a student and a teacher whose heads are padded to different numbers of words.

Shapes: T tokens, D model width, V words of the student's head, C words of both.
"""

from itertools import product

import pytest
import torch
from covering import covering
from head_case import HEADS, learnable
from teacher_targets import targets_of
from torch import Tensor

from qat.data.codec import over_words
from qat.kernels.head import Head
from qat.losses.config import ON_CACHE, WITH_TEACHER
from qat.losses.formulas import NO_LABEL, Targets, loss_from_logits
from qat.losses.from_hidden import loss_from_hidden
from qat.losses.from_teacher import OnlineTargets, loss_from_teacher

T, D, C, K = 13, 6, 19, 5
SIZES = ((C, C + 3), (C + 3, C))
"""Words of the student's head and of the teacher's."""


def teacher_logits(words: int) -> Tensor:
    """Logits `(T, words)` float64; in some rows words beyond `C` are likely, in others never."""
    logits = 2 * torch.randn(T, words, dtype=torch.float64)
    logits[:, C:] = -60.0
    logits[::2, C:] = 3.0
    logits[::4, C + 1 :] = -60.0
    return logits


def masked(targets: Targets, words: int) -> Targets:
    """What a reader makes of targets, for students with `words` words."""
    ids, logprobs, tail = over_words(
        targets.topk_ids, targets.topk_logprobs, targets.tail_logprob, words
    )
    is_beyond = targets.sample_ids >= words
    return targets._replace(
        labels=torch.where(targets.labels < words, targets.labels, NO_LABEL),
        topk_ids=ids,
        topk_logprobs=logprobs,
        tail_logprob=tail,
        sample_ids=targets.sample_ids.masked_fill(is_beyond, 0),
        sample_counts=targets.sample_counts.masked_fill(is_beyond, 0.0),
    )


def textbook(logits: Tensor, teacher: Tensor, targets: Targets, name: str) -> Tensor:
    """The loss over the common words, token by token, each with the K that is left of it."""
    log_p, total = teacher[:, :C].log_softmax(1), logits.new_zeros(())
    for row in range(T):
        kept = [i for i in targets.topk_ids[row].tolist() if i < C]
        drawn = targets.sample_ids[row] < C
        others = [i for i in range(C) if i not in kept]
        alone = Targets(
            mask=targets.mask[row : row + 1],
            labels=targets.labels[row : row + 1],
            topk_ids=torch.tensor([kept]),
            topk_logprobs=log_p[row : row + 1, kept],
            tail_logprob=log_p[row : row + 1, others].logsumexp(1),
            sample_ids=targets.sample_ids[row : row + 1, drawn],
            sample_counts=targets.sample_counts[row : row + 1, drawn],
        )
        found = loss_from_logits(logits[row : row + 1, :C].double(), alone, {name: 1.0})
        total = total + found["loss"]
    return total


def head_of(words: int, kind: str = "plain") -> Head:
    has_bias, softcap = HEADS[kind]
    bias = torch.randn(words, dtype=torch.float64).requires_grad_() if has_bias else None
    return Head(torch.randn(words, D, dtype=torch.float64).requires_grad_(), bias, softcap)


@pytest.mark.parametrize(("case", "kind"), covering(product(ON_CACHE, SIZES), HEADS))
def test_losses_on_a_cache_are_those_of_the_common_words(
    case: tuple[str, tuple[int, int]], kind: str
) -> None:
    name, (student, teacher) = case
    logits, head = teacher_logits(teacher), head_of(student, kind)
    targets = targets_of(logits, K, draws=40)
    targets = targets._replace(labels=targets.labels.clamp_max(C - 1))
    assert ((targets.topk_ids >= C).sum(1) > 1).any() == (teacher > C)
    hidden = torch.randn(T, D, dtype=torch.float64).requires_grad_()
    expected = textbook(head.logits(hidden), logits, targets, name)
    read = masked(targets, C) if teacher > C else targets
    actual = loss_from_hidden(hidden, head.words(0, C), read, {name: 1.0})["loss"]
    # the targets' log-probs are in float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    same = loss_from_logits(head.logits(hidden)[:, :C], read, {name: 1.0})["loss"]
    torch.testing.assert_close(same, expected, rtol=1e-6, atol=1e-6)
    leaves = learnable(hidden, head)
    gradients = torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves)
    for ours, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)
    for gradient in gradients[0][1:]:
        assert not gradient[C:].any() and gradient[:C].any()


@pytest.mark.parametrize(("student", "teacher"), SIZES)
@pytest.mark.parametrize("name", WITH_TEACHER)
def test_losses_against_a_teacher_are_those_of_the_common_words(
    name: str, student: int, teacher: int
) -> None:
    logits, head = teacher_logits(teacher), head_of(student)
    targets = targets_of(logits, K)
    targets = targets._replace(labels=targets.labels.clamp_max(C - 1))
    hidden = torch.randn(T, D, dtype=torch.float64).requires_grad_()
    own = Head(logits.T.contiguous())  # read by hidden states that name a token each
    online = OnlineTargets(
        targets.mask, targets.labels, torch.eye(T, dtype=torch.float64), own.words(0, C)
    )
    actual = loss_from_teacher(hidden, head.words(0, C), online, {name: 1.0})["loss"]
    whole = targets_of(logits[:, :C], C)
    log_p, ids = logits[:, :C].log_softmax(1).sort(descending=True)
    whole = whole._replace(
        mask=targets.mask, labels=targets.labels, topk_ids=ids, topk_logprobs=log_p
    )
    cached = "tail" if name == "kl" else name
    expected = loss_from_logits(head.logits(hidden)[:, :C], whole, {cached: 1.0})["loss"]
    torch.testing.assert_close(actual, expected)
    leaves = learnable(hidden, head)
    gradients = torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves)
    for ours, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, exact)


def test_a_taken_gradient_has_all_words() -> None:
    head, taken = head_of(C + 3), []
    hidden = torch.randn(T, D, dtype=torch.float64).requires_grad_()
    targets = targets_of(teacher_logits(C), K)
    loss = loss_from_hidden(hidden, head.words(0, C), targets, {"tail": 1.0})["loss"]
    (expected,) = torch.autograd.grad(loss, head.weight)
    named = torch.arange(C + 3) % 2 == 0
    narrow = head._replace(take_gradient=taken.append, named=named).words(0, C)
    loss_from_hidden(hidden, narrow, targets, {"tail": 1.0})["loss"].backward()
    torch.testing.assert_close(taken[0], expected * named[:, None])
    assert head.weight.grad is None and head.words(0, C + 9) is head


def test_words_are_left_to_the_tail() -> None:
    logits = teacher_logits(C + 3)
    exact = logits[:, :C].log_softmax(1)
    for K_t in (C - 3, C, C + 3):  # the last holds all words
        log_p, ids = logits.log_softmax(1).topk(K_t)
        rest = logits.log_softmax(1).scatter(1, ids, -torch.inf).logsumexp(1)
        ids, logprobs, tail = over_words(ids, log_p, rest, C)
        assert ids.shape[1] == logprobs.shape[1] == min(K_t, C - 1)
        is_known = ids >= 0
        assert ids[:, 0].tolist() == exact.argmax(1).tolist()
        assert torch.equal(logprobs == -torch.inf, ~is_known)
        found = exact.gather(1, ids.clamp_min(0))
        # words beyond the top-k have a mass of e^-60 at most
        torch.testing.assert_close(logprobs[is_known], found[is_known])
        total = torch.cat([logprobs, tail[:, None]], 1).logsumexp(1)
        torch.testing.assert_close(total, torch.zeros_like(total))
