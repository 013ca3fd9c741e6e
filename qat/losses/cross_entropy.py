"""Cross-entropies against words rather than probabilities: the teacher's draws, the text itself.

As for the divergences: `(T, V)` logits in, the SUM over valid tokens in nats out, maths in float32.
A drawn or written word is a fact at temperature 1, so `temperature`, which all losses accept,
changes nothing here.

Shapes: T tokens, V vocabulary, D distinct draws (padded).
"""

import torch
from torch import Tensor

from qat.losses.buckets import sum_valid, valid_rows
from qat.losses.targets import NO_LABEL, Targets


def sampled(logits: Tensor, targets: Targets, *, temperature: float = 1.0) -> Tensor:
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
    logits, targets = valid_rows(logits, targets)
    counts = targets.sample_counts.to(logits.dtype)
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1.0)
    drawn = logits.gather(1, targets.sample_ids)
    # sum of shares first: the log-sum-exp over V is formed once and never broadcast to (T, V)
    loss = shares.sum(1) * logits.logsumexp(1) - (shares * drawn).sum(1)
    return sum_valid(loss, targets.mask)


def hard_ce(logits: Tensor, targets: Targets, *, temperature: float = 1.0) -> Tensor:
    """`F.cross_entropy` with the token that really follows; without a label a token adds zero."""
    logits, targets = valid_rows(logits, targets)
    has_label = targets.labels != NO_LABEL
    chosen = logits.gather(1, torch.where(has_label, targets.labels, 0)[:, None])[:, 0]
    return sum_valid(logits.logsumexp(1) - chosen, targets.mask & has_label)
