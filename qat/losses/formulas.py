"""The formulas of the losses, by name, and their weighted sum.

Every loss takes a student and targets as `valid_rows` gives them, and returns the SUM over the
tokens in `targets.mask`, in nats; the trainer divides once. Divergences are multiplied by
`temperature` squared, so that gradients keep their size as it changes (arXiv:1503.02531, section
2); a `temperature` that is not positive, or targets without a top-k, raise ValueError.
Cross-entropies are against words rather than probabilities: a drawn or written word is a fact at
temperature 1, so `temperature`, which all losses accept, changes nothing there.

Shapes: T tokens, V vocabulary, K teacher tokens kept, D distinct draws (padded), N outcomes (K, or
K + 1 with the tail).
"""

import math
from collections.abc import Callable, Collection
from typing import NamedTuple, cast

import torch
from torch import Tensor

from qat.kernels.head import wide, without
from qat.losses.config import OWN, kinds_read, reads_others
from qat.losses.targets import NO_LABEL, Student, Targets, WordsRead, log_add, valid_rows

LOG_ZERO = -100.0
"""Teacher log-probabilities below this count as this: `exp(-100)` is zero in float32."""


class Distributions(NamedTuple):
    """Log-probabilities of teacher and student, both `(T, N)` and normalised over N."""

    log_p: Tensor
    log_q: Tensor


def sum_valid(loss: Tensor, mask: Tensor) -> Tensor:
    """The sum of `(T,)` losses over the tokens in `mask`."""
    return loss.masked_fill(~mask, 0.0).sum()


def with_tail(student: Student, targets: Targets, temperature: float) -> Distributions:
    """The teacher's K tokens plus one outcome for all others; no such outcome when K = V.

    The tail of the teacher is the stored one, that of the student a log-sum-exp over its other
    V - K logits: neither is `1 - sum`, so both are right where they are tiny. Temperature softens
    the K + 1 outcomes.

    Raises:
        ValueError: `temperature` is not positive, or the targets hold no top-k.
    """
    log_p, log_q = targets.topk_logprobs, student.topk
    if student.others_lse is not None:
        log_q = torch.cat([log_q, student.others_lse[:, None]], dim=1)
        log_p = torch.cat([log_p, targets.tail_logprob[:, None]], dim=1)
    return _softened(log_p, log_q, targets, temperature)


def topk_only(student: Student, targets: Targets, temperature: float) -> Distributions:
    """The teacher's K tokens alone, both sides renormalised over them.

    Raises:
        ValueError: `temperature` is not positive, or the targets hold no top-k.
    """
    return _softened(targets.topk_logprobs, student.topk, targets, temperature)


def _softened(log_p: Tensor, log_q: Tensor, targets: Targets, temperature: float) -> Distributions:
    if targets.topk_ids.shape[1] == 0:
        raise ValueError("this loss reads the teacher's top-k, but the targets hold none (K = 0)")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive")
    log_p = log_p.to(log_q.dtype).clamp_min(LOG_ZERO)
    return Distributions((log_p / temperature).log_softmax(1), (log_q / temperature).log_softmax(1))


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


def sampled(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """`-sum_d (count_d / N) log q(id_d)`, `N` the number of draws: random-sampling distillation.

    Value and gradient are unbiased for the full cross-entropy against the teacher
    (arXiv:2503.16870), so the gradient is unbiased for that of the full KL too. The
    value is larger than the KL by the teacher's entropy, which draws alone do not tell without
    bias. A token without draws adds zero.

    Raises:
        ValueError: the targets hold no draws.
    """
    if targets.sample_ids.shape[1] == 0:
        raise ValueError("this loss reads draws of the teacher, but the targets hold none (D = 0)")
    counts = targets.sample_counts.to(student.draws.dtype)
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1.0)
    # log q before the shares: large logits cancel in a difference, not in two weighted sums
    loss = (shares * (student.lse()[:, None] - student.draws)).sum(1)
    return sum_valid(loss, targets.mask)


def hard_ce(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """`F.cross_entropy` with the token that really follows; without a label a token adds zero."""
    loss = student.lse() - student.label[:, 0]
    return sum_valid(loss, targets.mask & (targets.labels != NO_LABEL))


Loss = Callable[..., Tensor]
"""`loss(student, targets, *, temperature) -> Tensor`: the sum over valid tokens, in nats."""

LOSSES: dict[str, Loss] = {
    "kl": tail,  # with a teacher beside, whose top-k is all words: the tail is empty
    "tail": tail,
    "sampled": sampled,
    "candidates": candidates,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "cakld": cakld,
    "hard_ce": hard_ce,
}
"""The formula of each name in `qat.losses.config.BUILT_IN`."""


def sums_by_name(
    student: Student, targets: Targets, terms: dict[str, float], temperature: float
) -> dict[str, Tensor]:
    """The sum of each loss over valid tokens, and their weighted sum as `"loss"`."""
    sums = {}
    for name in terms:
        loss = OWN[name].loss if name in OWN else LOSSES[name]
        sums[name] = loss(student, targets, temperature=temperature)
    sums["loss"] = cast(Tensor, sum(weight * sums[name] for name, weight in terms.items()))
    return sums


def loss_from_logits(
    logits: Tensor, targets: Targets, terms: dict[str, float], *, temperature: float = 1.0
) -> dict[str, Tensor]:
    """The sum of each loss over valid tokens, and their weighted sum as `"loss"`, all in nats.

    Computed in float32 (float64 stays) by ordinary autograd; masked rows reach neither value nor
    gradient.

    Args:
        logits: `(T, V)`, of any float dtype.
        targets: the teacher's word on the T tokens.
        terms: weight by name of loss, as `parse_losses` gives them.
        temperature: softmax temperature of the divergences, > 0.
    """
    targets = valid_rows(targets)
    return sums_by_name(student_of(logits, targets, terms), targets, terms, temperature)


def student_of(logits: Tensor, targets: Targets, names: Collection[str]) -> Student:
    """What the losses `names` read of the logits, beside targets as `valid_rows` gives them."""
    logits = wide(logits.masked_fill(~targets.mask[:, None], 0.0))
    words = WordsRead.of(targets, kinds_read(names))
    ids = words.ids()
    chosen = logits.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0)
    others_lse = None
    if reads_others(names) and words.topk.shape[1] < logits.shape[1]:
        others_lse = without(logits, words.topk, -torch.inf).logsumexp(1)
    return words.student(chosen, others_lse)
