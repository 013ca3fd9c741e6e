"""Comparison of two models position by position: divergence, agreement, flips, perplexities.

Shapes: N tokens of a context, T positions that are judged, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

CHUNK = 32
"""Positions compared at once: 39 MB for each temporary in float64 at a vocabulary of 152,000."""


class Context(NamedTuple):
    """Tokens that a model reads at once, and the positions in it that count."""

    ids: list[int]
    places: Tensor
    """Positions whose prediction of the next token is judged, `(T,)` int64."""
    labels: Tensor
    """The next token at these positions, `(T,)` int64."""


class Position(NamedTuple):
    """Measurements of each judged position, `(T,)` each; in nats, or bool."""

    kl: Tensor  # KL(teacher || file) over the whole vocabulary
    nll: Tensor  # surprise of the file at the label
    teacher_nll: Tensor  # surprise of the teacher at the label
    is_same: Tensor  # the file's likeliest token is the teacher's
    is_right: Tensor  # the teacher's likeliest token is the label

    @classmethod
    def of(cls, logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> Self:
        """Compare logits `(T, V)` of a file with the teacher's, in float64."""
        log_q, log_p = logits.double().log_softmax(1), teacher_logits.double().log_softmax(1)
        top, right = teacher_logits.argmax(1), labels[:, None]
        return cls(
            kl=(log_p.exp() * (log_p - log_q)).sum(1),
            nll=-log_q.gather(1, right)[:, 0],
            teacher_nll=-log_p.gather(1, right)[:, 0],
            is_same=logits.argmax(1) == top,
            is_right=top == labels,
        )


class Judged(NamedTuple):
    """The distance of a file from its teacher, over all judged positions."""

    num_tokens: int  # number of judged positions
    kl_nats: float  # mean KL(teacher || file) over the whole vocabulary
    kl_stderr_nats: float | None
    """Standard error of that mean, taking positions as independent; None for a single one."""
    kl_p99_nats: float  # 99th percentile of the KL over positions
    top1_frac: float  # fraction of positions where file and teacher have the same likeliest token
    flips_frac: float | None
    """Of the positions where the teacher's likeliest token is the next token of the text, the
    fraction where the file's is another: right answers that became wrong, half of the flips of
    arXiv:2407.09141. None if the teacher is right nowhere."""
    ppl: float  # the file's perplexity
    teacher_ppl: float  # the teacher's perplexity

    @classmethod
    def of(cls, found: Position) -> Self:
        """Summarize the measurements of all positions."""
        T, right = len(found.kl), int(found.is_right.sum())
        flipped = int((found.is_right & ~found.is_same).sum())
        return cls(
            num_tokens=T,
            kl_nats=found.kl.mean().item(),
            kl_stderr_nats=found.kl.std().item() / math.sqrt(T) if T > 1 else None,
            kl_p99_nats=found.kl.quantile(0.99).item(),
            top1_frac=found.is_same.double().mean().item(),
            flips_frac=flipped / right if right else None,
            ppl=found.nll.mean().exp().item(),
            teacher_ppl=found.teacher_nll.mean().exp().item(),
        )


def text_contexts(tokens: Sequence[int], begin: int | None, length: int) -> Iterator[Context]:
    """Cut a text into contexts of `length` tokens, and judge the second half of each.

    This is what llama-perplexity does: the first token of each context gives way to `begin`, if
    there is one, and the last position has no next token within the context.
    """
    places = torch.arange(length // 2, length - 1)
    for start in range(0, len(tokens) - length + 1, length):
        ids = list(tokens[start : start + length])
        labels = torch.tensor(ids)[places + 1]
        yield Context(ids if begin is None else [begin, *ids[1:]], places, labels)
