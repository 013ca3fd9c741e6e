"""Losses against a running teacher over the whole vocabulary, computed chunk by chunk.

The `(T, V)` logits never exist as a whole.

Shapes: T tokens, D model width of the student, E of the teacher, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.kernels.head import Head, before_softcap, wide
from qat.losses.formulas import NO_LABEL, Student, Targets, sums_by_name
from qat.losses.from_hidden import Gradients, Task, differentiated, sums_with_gradient

CHUNK_LOGITS = 2**26
"""Logits of either model that exist together: 0.25 GiB in float32, several times over."""


class OnlineTargets(NamedTuple):
    """The teacher's last hidden states on `T` tokens, and the head that turns them into logits."""

    mask: Tensor
    """`(T,)` bool: true where the token counts."""
    labels: Tensor
    """`(T,)` int64: the next token of the text, `NO_LABEL` where unknown."""
    hidden: Tensor
    """`(T, E)`: the teacher's last hidden states."""
    head: Head
    """The teacher's head, over the same words as the student's."""


def loss_from_teacher(
    hidden: Tensor,
    head: Head,
    targets: OnlineTargets,
    terms: dict[str, float],
    *,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Return the sum over valid tokens of each loss, and of their weighted sum as `"loss"`.

    In nats. `kl` is KL(teacher || student) over all V words; the others are what `loss_from_logits`
    returns when the teacher's top-k is the whole vocabulary, so none of them is approximate. `(T,
    V)` never exists. As in `loss_from_hidden`, the gradient of `"loss"` is computed in the forward
    pass, the sums by name have none, and nothing waits for the device; the teacher gets no
    gradient.

    `terms` are weights by names of `qat.losses.config.WITH_TEACHER`.

    Raises:
        ValueError: `temperature` is not positive, or the vocabularies differ in size.
    """
    V, teacher_V = head.weight.shape[0], targets.head.weight.shape[0]
    if V != teacher_V:
        raise ValueError(f"the student's head has {V} words and the teacher's {teacher_V}")

    def add_chunk(
        rows: slice, hidden: Tensor, head: Head, gradients: Gradients
    ) -> dict[str, Tensor]:
        hidden = hidden.masked_fill(~targets.mask[rows, None], 0.0)
        logits, cached = wide(head.logits(hidden)), _all_words(targets, rows)  # (t, V)

        def sums_of(logits: Tensor) -> dict[str, Tensor]:
            label = logits.gather(1, cached.labels.clamp_min(0)[:, None])
            student = Student(logits, logits[:, :0], label, others_lse=None)
            return sums_by_name(student, cached, terms, temperature)

        sums, slopes = differentiated(sums_of, [logits], gradients)
        if slopes:
            g_logits = before_softcap(slopes[0], logits, head.softcap)
            narrow = g_logits.to(hidden.dtype)  # matmuls compute in the dtype of hidden states
            if gradients.hidden is not None:
                gradients.hidden.copy_(narrow @ head.weight.to(hidden.dtype))
            if gradients.head is not None:
                gradients.head.add(narrow, hidden)
        return sums

    task = Task(head, terms, max(1, CHUNK_LOGITS // V), add_chunk)
    return sums_with_gradient(hidden, task)


@torch.no_grad()
def _all_words(targets: OnlineTargets, rows: slice) -> Targets:
    """Return the targets of a cache with K = V for some rows; masked ones name no word."""
    masked = ~targets.mask[rows]
    labels = targets.labels[rows].masked_fill(masked, NO_LABEL)
    hidden = targets.hidden[rows].masked_fill(masked[:, None], 0.0)
    log_p = wide(targets.head.logits(hidden)).log_softmax(1)
    return Targets(
        mask=targets.mask[rows],
        labels=labels,
        topk_ids=torch.arange(log_p.shape[1], device=log_p.device).expand_as(log_p),
        topk_logprobs=log_p,
        tail_logprob=torch.full_like(log_p[:, 0], -torch.inf),
        sample_ids=labels[:, None][:, :0],
        sample_counts=log_p[:, :0],
    )
