"""Cross-entropies against words rather than probabilities: the teacher's draws, the text itself.

As for the divergences: student and targets in, the SUM over valid tokens in nats out.
A drawn or written word is a fact at temperature 1, so `temperature`, which all losses accept,
changes nothing here.
"""

from torch import Tensor

from qat.losses.outcomes import sum_valid
from qat.losses.student import Student
from qat.losses.targets import NO_LABEL, Targets


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
