"""Divergences between teacher and student over the teacher's top-k tokens.

Every loss here takes a student and targets as `valid_rows` gives them, and returns the SUM over the
tokens in `targets.mask`, in nats; the trainer divides once. It multiplies by `temperature` squared,
so that gradients keep their size as it changes (arXiv:1503.02531, section 2). A `temperature` that
is not positive, or targets without a top-k, raise ValueError.

Shapes: T tokens, V vocabulary, K teacher tokens kept, N outcomes (K + 1 with the tail).
"""

import math

from torch import Tensor

from qat.losses.outcomes import sum_valid, topk_only, with_tail
from qat.losses.student import Student, log_add
from qat.losses.targets import Targets


def tail(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) over the teacher's K tokens plus one outcome for all others.

    The tail keeps the probability that top-k drops: without it the student is free to put any mass
    on the V - K unseen tokens. At temperature 1 a lower bound on the full KL; equal to it when
    K = V, at every temperature. A sum of nats over valid tokens.
    """
    log_p, log_q = with_tail(student, targets, temperature)
    return temperature**2 * sum_valid(_kl(log_p, log_q), targets.mask)


def candidates(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) with both sides renormalised over the K tokens: blind to the tail.

    `T^2 * F.kl_div(log_softmax(z[ids] / T), softmax(log_p / T))`: the distillation loss of
    Anemll/qwen3_apple_style_2bit_qat_lora at b1eaee5, whose published KD numbers are this at
    temperature 2 (a mean there, a sum over valid tokens here).
    """
    log_p, log_q = topk_only(student, targets, temperature)
    return temperature**2 * sum_valid(_kl(log_p, log_q), targets.mask)


def reverse_kl(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """KL(student || teacher) over the teacher's K tokens plus one outcome for all others.

    Approximate with a cache: inside the tail, where the student may put mass that the teacher does
    not, the two count as equal. A lower bound on the full reverse KL at temperature 1.
    """
    log_p, log_q = with_tail(student, targets, temperature)
    return temperature**2 * sum_valid(_kl(log_q, log_p), targets.mask)


def jsd(
    student: Student, targets: Targets, *, temperature: float = 1.0, beta: float = 0.5
) -> Tensor:
    """`beta KL(p || m) + (1 - beta) KL(q || m)` with `m = beta p + (1 - beta) q`.

    The generalised Jensen-Shannon divergence (arXiv:2306.13649, section 2) of teacher `p` and
    student `q` over the K tokens and the tail: bounded, and approximate with a cache as
    `reverse_kl` is.

    Raises:
        ValueError: `beta` is not inside (0, 1).
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta} must lie inside (0, 1)")
    log_p, log_q = with_tail(student, targets, temperature)
    log_m = log_add(log_p + math.log(beta), log_q + math.log1p(-beta))
    mixed = beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)
    return temperature**2 * sum_valid(mixed, targets.mask)


def cakld(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """`c KL(student || teacher) + (1 - c) KL(teacher || student)`, `c` the teacher's confidence.

    Confidence-aware KL (BitDistiller, arXiv:2402.10631): seek one mode where the
    teacher is sure, cover all where it is not. `c` is the probability that the teacher expects of
    its own next word, `sum p^2` over its top K at temperature 1. The paper takes one mean over the
    data instead; a `c` per token keeps the loss additive over micro-batches. Approximate with a
    cache as `reverse_kl` is.
    """
    log_p, log_q = with_tail(student, targets, temperature)
    confidence = (2 * targets.topk_logprobs.to(log_q.dtype)).exp().sum(1)
    mixed = confidence * _kl(log_q, log_p) + (1 - confidence) * _kl(log_p, log_q)
    return temperature**2 * sum_valid(mixed, targets.mask)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) of each row, `(T, N)` to `(T,)`."""
    return (log_a.exp() * (log_a - log_b)).sum(1)
