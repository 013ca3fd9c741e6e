"""Losses from logits against textbook PyTorch, and the promises that a trainer relies on."""

from itertools import product

import pytest
import torch
from covering import covering
from logit_losses import FROM_LOGITS
from teacher_targets import targets_of
from torch import Tensor
from torch.nn import functional as F

from qat.kernels.head import Head
from qat.losses import formulas
from qat.losses.formulas import Targets, jsd, student_of, valid_rows
from qat.losses.from_hidden import loss_from_hidden

T, V, K = 12, 17, 5
TAILED = {name: FROM_LOGITS[name] for name in ("tail", "reverse_kl", "jsd", "cakld")}
DIVERGENCES = {**TAILED, "candidates": FROM_LOGITS["candidates"]}
tail, reverse_kl, candidates = (DIVERGENCES[n] for n in ("tail", "reverse_kl", "candidates"))
hard_ce, sampled = FROM_LOGITS["hard_ce"], FROM_LOGITS["sampled"]


def logits_pair(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    student, teacher = torch.randn(T, V).to(dtype) * 2, torch.randn(T, V).to(dtype) * 2
    return student.requires_grad_(), teacher


def textbook(name: str, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Full-vocabulary divergence of each row, `(T,)`."""
    log_p, log_q = (teacher / temperature).log_softmax(1), (student / temperature).log_softmax(1)

    def kl(target: Tensor, other: Tensor) -> Tensor:
        return F.kl_div(other, target, log_target=True, reduction="none").sum(1)

    if name == "reverse_kl":
        return kl(log_q, log_p)
    if name == "jsd":
        log_m = ((log_p.exp() + log_q.exp()) / 2).log()
        return (kl(log_p, log_m) + kl(log_q, log_m)) / 2
    if name == "cakld":
        c = teacher.softmax(1).square().sum(1)
        return c * kl(log_q, log_p) + (1 - c) * kl(log_p, log_q)
    return kl(log_p, log_q)


@pytest.mark.parametrize(
    ("case", "dtype"),
    covering(product(DIVERGENCES, [0.5, 1.0, 4.0]), [torch.float64, torch.float32]),
)
def test_full_topk_equals_the_textbook(case: tuple[str, float], dtype: torch.dtype) -> None:
    name, temperature = case
    student, teacher = logits_pair(dtype)
    targets = targets_of(teacher, V)
    rows = temperature**2 * textbook(name, student, teacher, temperature)
    expected = rows[targets.mask].sum()
    actual = DIVERGENCES[name](student, targets, temperature=temperature)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(actual, student)
    (expected_gradient,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(gradient, expected_gradient, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", TAILED)
def test_tail_is_one_outcome_of_the_textbook(name: str) -> None:
    student, teacher = logits_pair()
    targets = targets_of(teacher, K)

    def merged(logits: Tensor) -> Tensor:
        probabilities = logits.softmax(1)
        head = probabilities.gather(1, targets.topk_ids)
        return torch.cat([head, 1 - head.sum(1, keepdim=True)], dim=1).log()

    rows = textbook(name, merged(student), merged(teacher), 1.0)
    if name == "cakld":  # the tail is many words: it adds nothing to the confidence
        p, q = merged(teacher), merged(student)
        c = p[:, :-1].exp().square().sum(1)
        rows = c * textbook("reverse_kl", q, p, 1.0) + (1 - c) * textbook("tail", q, p, 1.0)
    actual = TAILED[name](student, targets)
    torch.testing.assert_close(actual, rows[targets.mask].sum(), rtol=2e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(actual, student)
    (expected,) = torch.autograd.grad(rows[targets.mask].sum(), student)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["tail", "reverse_kl", "jsd"])
def test_bound_grows_with_k_up_to_the_full_divergence(name: str) -> None:
    student, teacher = logits_pair()
    values = [TAILED[name](student, targets_of(teacher, k)).item() for k in range(1, V + 1)]
    exact = textbook(name, student, teacher, 1.0)[targets_of(teacher, V).mask].sum().item()
    assert values[0] > 0
    assert all(a <= b + 1e-6 for a, b in zip(values, values[1:], strict=False))
    assert values[-1] == pytest.approx(exact, rel=1e-5)


def test_candidates_is_blind_to_the_tail_and_tail_is_not() -> None:
    _, teacher = logits_pair()
    targets = targets_of(teacher, K)
    adrift = teacher + 12.0  # all mass on the words the teacher left out
    adrift = adrift.scatter(1, targets.topk_ids, teacher.gather(1, targets.topk_ids))
    assert candidates(adrift, targets).item() == pytest.approx(0, abs=1e-6)
    assert tail(adrift, targets).item() > 1.0


def test_candidates_is_the_reference_formula() -> None:
    student, teacher = logits_pair()
    targets = targets_of(teacher, K)
    p = F.softmax(targets.topk_logprobs.double() / 2, 1)
    log_q = F.log_softmax(student.gather(1, targets.topk_ids) / 2, 1)
    rows = 4 * (p * (p.log() - log_q)).sum(1)
    actual = candidates(student, targets, temperature=2.0)
    torch.testing.assert_close(actual, rows[targets.mask].sum())


@pytest.mark.parametrize("name", TAILED)
def test_a_tail_of_zero_gives_no_nan(name: str) -> None:
    for top_k in (K, V):
        student, teacher = logits_pair(torch.float32)
        targets = targets_of(teacher, top_k)
        targets = targets._replace(tail_logprob=torch.full((T,), -torch.inf))
        loss = TAILED[name](student, targets)
        (gradient,) = torch.autograd.grad(loss, student)
        assert loss.isfinite() and gradient.isfinite().all(), top_k


@pytest.mark.parametrize("name", FROM_LOGITS)
def test_micro_batches_sum_to_the_batch(name: str) -> None:
    student, teacher = logits_pair()
    targets = targets_of(teacher, K)
    pieces = zip(student.split(5), *(t.split(5) for t in targets), strict=True)
    parts = sum(FROM_LOGITS[name](z, Targets(*rows), temperature=2.0) for z, *rows in pieces)
    torch.testing.assert_close(parts, FROM_LOGITS[name](student, targets, temperature=2.0))


def test_half_precision_logits_are_computed_in_float32() -> None:
    for name in FROM_LOGITS:
        student, teacher = logits_pair(torch.bfloat16)
        targets = targets_of(teacher, K)
        loss = FROM_LOGITS[name](student, targets)
        assert loss.dtype == torch.float32, name
        assert torch.equal(loss, FROM_LOGITS[name](student.float(), targets)), name


@pytest.mark.parametrize("name", DIVERGENCES)
def test_zero_exactly_at_the_teacher_and_temperature_matters(name: str) -> None:
    student, teacher = logits_pair()
    targets = targets_of(teacher, K)
    at_one, at_two = (DIVERGENCES[name](student, targets, temperature=t) for t in (1.0, 2.0))
    assert at_one.item() > 0.1
    assert abs(at_one.item() - at_two.item()) > 0.1
    rows = valid_rows(targets)
    parts = student_of(student, rows, [name])
    assert torch.equal(getattr(formulas, name)(parts, rows), at_one)
    assert DIVERGENCES[name](teacher, targets).item() == pytest.approx(0, abs=1e-6)


def test_jsd_leans_as_beta_says() -> None:
    student, teacher = logits_pair()
    targets = targets_of(teacher, K)
    rows = valid_rows(targets)
    parts = student_of(student, rows, ["jsd"])
    near_one = jsd(parts, rows, beta=1 - 1e-6) / 1e-6  # GKD: the ends are the two KLs
    near_zero = jsd(parts, rows, beta=1e-6) / 1e-6
    assert near_one.item() == pytest.approx(reverse_kl(student, targets).item(), rel=1e-3)
    assert near_zero.item() == pytest.approx(tail(student, targets).item(), rel=1e-3)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5])
def test_jsd_refuses_beta_outside(beta: float) -> None:
    student, teacher = logits_pair()
    rows = valid_rows(targets_of(teacher, K))
    with pytest.raises(ValueError, match="must lie inside"):
        jsd(student_of(student, rows, ["jsd"]), rows, beta=beta)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_refuses_a_bad_temperature_and_a_missing_topk(name: str) -> None:
    student, teacher = logits_pair()
    with pytest.raises(ValueError, match="temperature=0 must be positive"):
        DIVERGENCES[name](student, targets_of(teacher, K), temperature=0)
    with pytest.raises(ValueError, match="hold none"):
        DIVERGENCES[name](student, targets_of(teacher, 0))
    hidden, head = torch.randn(T, 3), Head(torch.randn(V, 3))
    with pytest.raises(ValueError, match="temperature=0 must be positive"):
        loss_from_hidden(hidden, head, targets_of(teacher, K), {name: 1.0}, temperature=0)
    with pytest.raises(ValueError, match="top-k, but the targets hold none"):
        loss_from_hidden(hidden, head, targets_of(teacher, 0), {name: 1.0})


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
