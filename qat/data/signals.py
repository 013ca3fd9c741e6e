"""What is kept of the teacher's logits: its top K, and random draws.

Shapes: T tokens, V vocabulary, K teacher tokens kept, N draws.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.data.teacher import Teacher
from qat.errors import CacheError


class TopK(NamedTuple):
    """The K most likely tokens, most likely first, and how the rest of the vocabulary weighs."""

    ids: Tensor
    """`(T, K)` int64."""
    distances: Tensor
    """`(T, K)` float64, nats: log-probability of the first token minus that of this one."""
    log_sum_exp: Tensor
    """`(T,)` float32: of all logits, so that logit = log-prob + log_sum_exp."""
    tail_logprob: Tensor
    """`(T,)` float32: log of the mass outside the K tokens; -inf when K = V."""


def top_k(logits: Tensor, k: int) -> TopK:
    """The teacher's top `k` of `(T, V)` logits.

    The mass outside is summed over the other V - k logits, in float64: `1 - sum(top)` would lose
    a small tail, and a float32 sum would lose a small top.
    """
    top_TK, ids_TK = torch.topk(logits.float(), k, dim=-1)
    peak_T1 = top_TK[:, :1]
    weights_TV = (logits.float() - peak_T1).exp_()
    total_T = weights_TV.sum(-1, dtype=torch.float64).log()
    rest_T = weights_TV.scatter_(-1, ids_TK, 0.0).sum(-1, dtype=torch.float64).log()
    return TopK(
        ids=ids_TK,
        distances=(peak_T1 - top_TK).double(),
        log_sum_exp=(total_T + peak_T1[:, 0]).float(),
        tail_logprob=(rest_T - total_T).float(),
    )


def draw(logits: Tensor, num_draws: int, generator: torch.Generator) -> Tensor:
    """`(T, num_draws)` int64 tokens drawn with replacement from `(T, V)` logits, ascending."""
    probs_TV = torch.softmax(logits.float(), dim=-1)
    draws_TN = torch.multinomial(probs_TV, num_draws, replacement=True, generator=generator)
    return draws_TN.sort(dim=-1).values


class Request(NamedTuple):
    """What to ask the teacher for, and how many tokens at a time."""

    top_k: int
    draws: int
    chunk: int


class Signals(NamedTuple):
    """What the teacher said about every token of a batch; None for what was not asked."""

    top: TopK | None
    draws: Tensor | None
    """`(T, N)` int64, ascending."""


@torch.no_grad()
def ask(
    teacher: Teacher, tokens: Tensor, positions: Tensor, *, request: Request, seed: int
) -> Signals:
    """The teacher's signals for `(B, S)` tokens, flattened; `(B * S, V)` logits never exist.

    The draws depend on `seed`, the tokens and the request, on nothing that ran before.

    Raises:
        CacheError: a logit is NaN or +inf (-inf is a token that cannot be).
    """
    hidden = teacher.hidden(tokens.to(teacher.device), positions.to(teacher.device))
    tops, draws, generator = [], [], None
    for hidden_TD in hidden.flatten(0, 1).split(request.chunk):
        logits = teacher.logits(hidden_TD)
        _check_finite(logits)
        if request.top_k:
            tops.append(top_k(logits, request.top_k))
        if request.draws:
            generator = generator or torch.Generator(logits.device).manual_seed(seed)
            draws.append(draw(logits, request.draws, generator))
    return Signals(
        top=TopK(*map(torch.cat, zip(*tops, strict=True))) if tops else None,
        draws=torch.cat(draws) if draws else None,
    )


def _check_finite(logits: Tensor) -> None:
    if not bool(logits.amax(-1).isfinite().all()):  # NaN wins a maximum
        raise CacheError(
            "the teacher gave a logit that is NaN or infinite, expected finite ones; "
            "try --dtype fp32 or another teacher"
        )
