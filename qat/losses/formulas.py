"""The formulas of the losses, by name, and their weighted sum.

Every loss takes a student and targets as returned by `valid_rows`, and returns the SUM over the
tokens in `targets.mask`, in nats; the trainer divides once. Divergences are multiplied by
`temperature` squared, so that the size of gradients does not depend on it (arXiv:1503.02531,
section 2); a `temperature` that is not positive, or targets without a top-k, raise ValueError.
Cross-entropies accept `temperature` but ignore it: their targets are drawn or written words, which
are observations at temperature 1.

Shapes: T tokens, V vocabulary, K teacher tokens kept, D distinct draws (padded), N outcomes (K, or
K + 1 with the tail).
"""

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from qat.backend.device import on
from qat.kernels.head import wide, without
from qat.losses.config import OWN, kinds_read, reads_others

if TYPE_CHECKING:  # rooms beside each other import none of the other
    from qat.data.packing import Batch

NO_LABEL = -100
"""Label of a token whose next token is unknown; the default `ignore_index` of PyTorch."""


class Targets(NamedTuple):
    """The teacher's targets for `T` tokens."""

    mask: Tensor
    """`(T,)` bool: true where the token counts."""
    labels: Tensor
    """`(T,)` int64: the next token of the text, `NO_LABEL` where unknown."""
    topk_ids: Tensor
    """`(T, K)` int64, distinct, most likely first."""
    topk_logprobs: Tensor
    """`(T, K)` float32, nats, normalised over the whole vocabulary at temperature 1."""
    tail_logprob: Tensor
    """`(T,)` float32: log of the teacher's mass outside its top K."""
    sample_ids: Tensor
    """`(T, D)` int64: distinct tokens drawn from the teacher."""
    sample_counts: Tensor
    """`(T, D)` float32: the number of times each was drawn; 0 where padded."""


def to_targets(batch: "Batch") -> Targets:
    """Return a batch's targets, `(B, S)` flattened to `(T,)`: views if the batch is contiguous."""
    return Targets(**{name: getattr(batch, name).flatten(0, 1) for name in Targets._fields})


def valid_rows(targets: Targets) -> Targets:
    """Return the targets with no word and log-probability 0 wherever the mask is false.

    Masked values, even inf or nan, then reach neither the loss nor its gradient.
    """
    masked = ~targets.mask
    return Targets(
        mask=targets.mask,
        labels=targets.labels.masked_fill(masked, NO_LABEL),
        topk_ids=targets.topk_ids.masked_fill(masked[:, None], -1),
        topk_logprobs=targets.topk_logprobs.masked_fill(masked[:, None], 0.0),
        tail_logprob=targets.tail_logprob.masked_fill(masked, 0.0),
        sample_ids=targets.sample_ids.masked_fill(masked[:, None], -1),
        sample_counts=targets.sample_counts.masked_fill(masked[:, None], 0.0),
    )


class Student(NamedTuple):
    """The student's logits of the words that losses read; a part that is not read has width 0."""

    topk: Tensor
    """`(T, K)`: logits of the teacher's top-k tokens."""
    draws: Tensor
    """`(T, D)`: logits of the tokens drawn from the teacher; 0 where padded."""
    label: Tensor
    """`(T, 1)`: the logit of the next token of the text; 0 where unknown."""
    others_lse: Tensor | None
    """`(T,)`: log-sum-exp over all words outside `topk`; None if K = V or no loss reads it."""

    def lse(self) -> Tensor:
        """Return the log-sum-exp over the whole vocabulary, `(T,)`."""
        if self.topk.shape[1] == 0:
            return cast(Tensor, self.others_lse)  # without a top-k: the whole vocabulary
        topk = self.topk.logsumexp(1)
        return topk if self.others_lse is None else log_add(topk, self.others_lse)


class WordsRead(NamedTuple):
    """Ids of the words whose logits the losses read, per token; -1 where there is none."""

    topk: Tensor
    """`(T, K)` int64: the teacher's top-k tokens."""
    draws: Tensor
    """`(T, D)` int64: the tokens drawn from the teacher."""
    label: Tensor
    """`(T, 1)` int64: the next token of the text."""

    @classmethod
    def of(cls, targets: Targets, needs: Collection[str]) -> "WordsRead":
        """Return the ids for the kinds in `needs`: `topk`, `draws`, `labels`.

        The other kinds have width 0.
        """
        draws = torch.where(targets.sample_counts > 0, targets.sample_ids, -1)
        label = torch.where(targets.labels == NO_LABEL, -1, targets.labels)[:, None]
        parts = {"topk": targets.topk_ids, "draws": draws, "labels": label}
        return cls(*(ids if name in needs else ids[:, :0] for name, ids in parts.items()))

    def ids(self) -> Tensor:
        """Return all ids, `(T, N)`, the top-k first."""
        return torch.cat(self, dim=1)

    def student(self, chosen: Tensor, others_lse: Tensor | None) -> Student:
        """Split `chosen`, the logits of `ids()`, into the parts of a `Student`."""
        topk, draws, label = chosen.split([part.shape[1] for part in self], dim=1)
        # a word of the teacher alone has no mass; finite, since 0 times infinity is no number
        return Student(topk.masked_fill(self.topk < 0, NO_LOGIT), draws, label, others_lse)


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """Return `torch.logaddexp(a, b)`, also on devices that lack the operator."""
    if on(a.device).is_traced:
        return torch.stack([a, b]).logsumexp(0)
    return torch.logaddexp(a, b)


NO_LOGIT = -1e9
"""Logit of an absent word of the top-k: `exp` of its distance to any other logit is zero."""
LOG_ZERO = -100.0
"""Floor of the teacher's log-probabilities: `exp(-100)` is zero in float32."""


def sum_valid(loss: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `(T,)` losses over the tokens in `mask`."""
    return loss.masked_fill(~mask, 0.0).sum()


def with_tail(student: Student, targets: Targets, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the teacher's K tokens plus one outcome for all others.

    Those of the teacher come first; both are `(T, N)` and normalised over N. There is no extra
    outcome when K = V. The tail of the teacher is the stored one, that of the student a log-sum-exp
    over its other V - K logits: neither is computed as `1 - sum`, so both are accurate where they
    are tiny. Temperature softens the K + 1 outcomes.
    """
    log_p, log_q = targets.topk_logprobs, student.topk
    if student.others_lse is not None:
        log_q = torch.cat([log_q, student.others_lse[:, None]], dim=1)
        log_p = torch.cat([log_p, targets.tail_logprob[:, None]], dim=1)
    return _softened(log_p, log_q, targets, temperature)


def _softened(
    log_p: Tensor, log_q: Tensor, targets: Targets, temperature: float
) -> tuple[Tensor, Tensor]:
    if targets.topk_ids.shape[1] == 0:
        raise ValueError("this loss reads the teacher's top-k, but the targets hold none (K = 0)")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive")
    log_p = log_p.to(log_q.dtype).clamp_min(LOG_ZERO)
    return (log_p / temperature).log_softmax(1), (log_q / temperature).log_softmax(1)


def tail(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) over the teacher's K tokens plus one outcome for all others.

    The extra outcome keeps the probability that top-k drops: without it the student could put any
    mass on the V - K unseen tokens. At temperature 1 a lower bound on the full KL; equal to it when
    K = V, at every temperature. A sum of nats over valid tokens.
    """
    log_p, log_q = with_tail(student, targets, temperature)
    return temperature**2 * sum_valid(_kl(log_p, log_q), targets.mask)


def candidates(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) with both sides renormalised over the K tokens; ignores the tail.

    `T^2 * F.kl_div(log_softmax(z[ids] / T), softmax(log_p / T))`: the distillation loss of
    Anemll/qwen3_apple_style_2bit_qat_lora at b1eaee5, whose published KD numbers are this loss at
    temperature 2 (a mean there, a sum over valid tokens here).
    """
    log_p, log_q = _softened(targets.topk_logprobs, student.topk, targets, temperature)
    return temperature**2 * sum_valid(_kl(log_p, log_q), targets.mask)


def reverse_kl(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """KL(student || teacher) over the teacher's K tokens plus one outcome for all others.

    Approximate with a cache: the tail is one outcome, so the loss does not see mass that the
    student puts on tail tokens which the teacher finds unlikely. A lower bound on the full reverse
    KL at temperature 1.
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

    Confidence-aware KL (BitDistiller, arXiv:2402.10631): mode-seeking where the teacher is
    confident, mode-covering where it is not. `c` is the probability that the teacher expects of its
    own next word, `sum p^2` over its top K at temperature 1. The paper takes one mean over the data
    instead; a `c` per token keeps the loss additive over micro-batches. Approximate with a cache,
    as `reverse_kl` is.
    """
    log_p, log_q = with_tail(student, targets, temperature)
    confidence = (2 * targets.topk_logprobs.to(log_q.dtype)).exp().sum(1)
    mixed = confidence * _kl(log_q, log_p) + (1 - confidence) * _kl(log_p, log_q)
    return temperature**2 * sum_valid(mixed, targets.mask)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return KL(a || b) of each row, `(T, N)` to `(T,)`."""
    return (log_a.exp() * (log_a - log_b)).sum(1)


def sampled(student: Student, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """`-sum_d (count_d / N) log q(id_d)`, `N` the number of draws: random-sampling distillation.

    Value and gradient are unbiased for the full cross-entropy against the teacher
    (arXiv:2503.16870), so the gradient is unbiased for that of the full KL too. The value exceeds
    the KL by the teacher's entropy, which cannot be estimated from draws alone without bias. A
    token without draws adds zero.

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
    """`F.cross_entropy` with the next token of the text; a token without a label adds zero."""
    loss = student.lse() - student.label[:, 0]
    return sum_valid(loss, targets.mask & (targets.labels != NO_LABEL))


Loss = Callable[..., Tensor]
"""A loss function `loss(student, targets, *, temperature)`: the sum over valid tokens, in nats."""

LOSSES: dict[str, Loss] = {
    "kl": tail,  # with a running teacher the top-k is the whole vocabulary and the tail is empty
    "tail": tail,
    "sampled": sampled,
    "candidates": candidates,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "cakld": cakld,
    "hard_ce": hard_ce,
}
"""Formula of each name in `qat.losses.config.BUILT_IN`."""


def sums_by_name(
    student: Student, targets: Targets, terms: dict[str, float], temperature: float
) -> dict[str, Tensor]:
    """Return the sum of each loss over valid tokens, and their weighted sum as `"loss"`."""
    sums = {}
    for name in terms:
        loss = OWN[name].loss if name in OWN else LOSSES[name]
        sums[name] = loss(student, targets, temperature=temperature)
    sums["loss"] = cast(Tensor, sum(weight * sums[name] for name, weight in terms.items()))
    return sums


def loss_from_logits(
    logits: Tensor, targets: Targets, terms: dict[str, float], *, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Return the sum over valid tokens of each loss, and of their weighted sum as `"loss"`.

    In nats, computed in float32 (float64 stays) by ordinary autograd; masked rows reach neither
    value nor gradient.

    `logits` are `(T, V)` of any float dtype; `terms` are weights by name, as `parse_losses` returns
    them.
    """
    targets = valid_rows(targets)
    return sums_by_name(student_of(logits, targets, terms), targets, terms, temperature)


def student_of(logits: Tensor, targets: Targets, names: Collection[str]) -> Student:
    """Pick what the losses `names` read of the logits; `targets` come from `valid_rows`."""
    logits = wide(logits.masked_fill(~targets.mask[:, None], 0.0))
    words = WordsRead.of(targets, kinds_read(names))
    ids = words.ids()
    chosen = logits.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0)
    others_lse = None
    if reads_others(names) and words.topk.shape[1] < logits.shape[1]:
        others_lse = without(logits, words.topk, -torch.inf).logsumexp(1)
    return words.student(chosen, others_lse)
