"""What is kept of the teacher's logits: its top K, and systematic draws.

Shapes: T tokens, V vocabulary, K teacher tokens kept, N draws.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.backend.device import on
from qat.data.noise import uniforms
from qat.data.teacher import Teacher
from qat.kernels.draw import draw_tokens
from qat.kernels.topk import (
    Selection,
    log_sum_exp,
    summarize,
    top_k_of_blocks,
    top_k_of_logits,
)


class TopK(NamedTuple):
    """The K most likely tokens, most likely first, and how the rest of the vocabulary weighs."""

    ids: Tensor
    """`(T, K)` int64; equally likely ones in ascending order."""
    distances: Tensor
    """`(T, K)` float64, nats: log-probability of the first token minus that of this one."""
    log_sum_exp: Tensor
    """`(T,)` float32: of all logits, so that logit = log-prob + log_sum_exp."""
    tail_logprob: Tensor
    """`(T,)` float32: log of the mass outside the K tokens; -inf when K = V."""


def top_k(logits: Tensor, k: int) -> TopK:
    """The teacher's top `k` of `(T, V)` logits.

    The mass outside is summed over the other V - k logits: `1 - sum(top)` would lose a small tail.
    """
    return _distances(top_k_of_logits(logits, k))


def _distances(selection: Selection) -> TopK:
    values_TK, ids_TK, log_sum_exp_T, tail_T = selection
    distances_TK = (values_TK[:, :1] - values_TK).double()
    return TopK(ids_TK, distances_TK, log_sum_exp_T, tail_T)


def draw(logits: Tensor, uniforms: Tensor, count: int) -> Tensor:
    """`(T, count)` int64 systematic draws from `(T, V)` logits, ascending.

    `uniforms` `(T,)`, float64 in [0, 1), decides which.
    """
    return draw_tokens(logits, summarize(logits), uniforms, count)


class Request(NamedTuple):
    """What to ask the teacher for, and how many tokens at a time."""

    top_k: int
    draws: int
    chunk: int
    stream: int
    """Of random numbers (`qat.data.noise`), for the draws."""


class Signals(NamedTuple):
    """What the teacher said about every token of a batch; None for what was not asked."""

    next_logprob: Tensor
    """`(T,)` float32, nats: of the token that follows in the sequence; at its end, of its first."""

    top: TopK | None
    draws: Tensor | None
    """`(T, N)` int64, ascending."""
    is_sound: Tensor
    """`()` bool: no logit is NaN or +inf, and no token has only -inf."""


@torch.no_grad()
def ask(
    teacher: Teacher, tokens: Tensor, positions: Tensor, *, request: Request, first_place: int
) -> Signals:
    """The teacher's signals for `(B, S)` tokens on the host, flattened; never waits for the device.

    Logits exist for `request.chunk` tokens at a time. The draws of the i-th token depend on its
    logits, the request's stream and `first_place + i`, on nothing that ran before.
    """
    backend = on(teacher.device)
    following = tokens.roll(-1, dims=1)
    ids, places, next_ids = (
        backend.divided(backend.to_device(each)) for each in (tokens, positions, following)
    )
    hidden = teacher.hidden(ids, places)
    # not as a number: XLA takes equal numbers for one, which makes another graph
    first = backend.to_device(torch.tensor([first_place]))
    tops, draws, is_sound, next_logprobs, place = [], [], [], [], 0
    chunks = (each.flatten(0, 1).split(request.chunk) for each in (hidden, next_ids))
    for hidden_TD, next_T in zip(*chunks, strict=True):
        logits = teacher.logits(hidden_TD)
        blocks = summarize(logits)
        if request.top_k:
            tops.append(_distances(top_k_of_blocks(logits, request.top_k, blocks)))
        total_T = tops[-1].log_sum_exp if request.top_k else log_sum_exp(blocks)
        is_sound.append(total_T.isfinite().all())
        next_logprobs.append(logits.gather(-1, next_T[:, None])[:, 0].float() - total_T)
        if request.draws:
            places_T = torch.arange(place, place + len(logits), device=logits.device) + first
            numbers_T = uniforms(request.stream, places_T, 1)[:, 0]
            draws.append(draw_tokens(logits, blocks, numbers_T, request.draws))
        place += len(logits)
    return Signals(
        next_logprob=torch.cat(next_logprobs),
        top=TopK(*map(torch.cat, zip(*tops, strict=True))) if tops else None,
        draws=torch.cat(draws) if draws else None,
        is_sound=torch.stack(is_sound).all(),
    )
