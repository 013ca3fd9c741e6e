"""Teacher and student as distributions over the same few outcomes.

Shapes: T tokens, K teacher tokens kept, N outcomes (K, or K + 1 with the tail).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.losses.student import Student
from qat.losses.targets import Targets

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
