"""Teacher and student as distributions over the same few outcomes.

Shapes: T tokens, V vocabulary, K teacher tokens kept, N outcomes (K, or K + 1 with the tail).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.losses.targets import Targets

LOG_ZERO = -100.0
"""Teacher log-probabilities below this count as this: `exp(-100)` is zero in float32."""


class Distributions(NamedTuple):
    """Log-probabilities of teacher and student, both `(T, N)` and normalised over N."""

    log_p: Tensor
    log_q: Tensor


def valid_rows(logits: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
    """Logits in float32 (float64 stays) and targets, with zeros wherever the mask is false.

    Whatever stood in a masked row, even inf or nan, then reaches neither value nor gradient.
    """
    mask = targets.mask
    cleaned = {name: _zero_rows(value, mask) for name, value in targets._asdict().items()}
    logits = _zero_rows(logits, mask)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits, Targets(**{**cleaned, "mask": mask})


def sum_valid(loss: Tensor, mask: Tensor) -> Tensor:
    """The sum of `(T,)` losses over the tokens in `mask`."""
    return loss.masked_fill(~mask, 0.0).sum()


def with_tail(logits: Tensor, targets: Targets, temperature: float) -> Distributions:
    """The teacher's K tokens plus one outcome for all others; no such outcome when K = V.

    The tail of the teacher is the stored one, that of the student a log-sum-exp over its other
    V - K logits: neither is `1 - sum`, so both are right where they are tiny. Temperature softens
    the K + 1 outcomes.

    Args:
        logits: `(T, V)` float32 or float64, as `valid_rows` gives them.
        targets: with K > 0.
        temperature: > 0.
    """
    chosen = candidate_logits(logits, targets)
    log_p, log_q = targets.topk_logprobs, chosen
    if chosen.shape[1] < logits.shape[1]:
        others = logits.scatter(1, targets.topk_ids, -torch.inf)
        log_q = torch.cat([chosen, others.logsumexp(1, keepdim=True)], dim=1)
        log_p = torch.cat([log_p, targets.tail_logprob[:, None]], dim=1)
    return softened(log_p, log_q, temperature)


def candidate_logits(logits: Tensor, targets: Targets) -> Tensor:
    """The student's logits of the teacher's top-k tokens, `(T, K)`.

    Raises:
        ValueError: the targets hold no top-k.
    """
    if targets.topk_ids.shape[1] == 0:
        raise ValueError("this loss reads the teacher's top-k, but the targets hold none (K = 0)")
    return logits.gather(1, targets.topk_ids)


def softened(log_p: Tensor, log_q: Tensor, temperature: float) -> Distributions:
    """Both sides divided by `temperature` and normalised over the outcomes given.

    Raises:
        ValueError: `temperature` is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive")
    log_p = log_p.to(log_q.dtype).clamp_min(LOG_ZERO)
    return Distributions((log_p / temperature).log_softmax(1), (log_q / temperature).log_softmax(1))


def _zero_rows(values: Tensor, mask: Tensor) -> Tensor:
    rows = mask.view(-1, *(1,) * (values.dim() - 1))
    return values.masked_fill(~rows, 0)
