"""Losses against a running teacher over the whole vocabulary, computed chunk by chunk.

The `(T, V)` logits never exist as a whole.

Shapes: T tokens, D model width of the student, E of the teacher, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.backend.device import on
from qat.kernels.head import Head, before_softcap, wide
from qat.kernels.kl_of_logits import Scale, kl_of_logits
from qat.losses.formulas import NO_LABEL, Student, Targets, sums_by_name
from qat.losses.from_hidden import Gradients, Task, differentiated, sums_with_gradient

PLAIN_KL = frozenset({"kl", "tail"})
"""Losses that are the KL divergence over all words when the teacher's top-k is all of them."""

CHUNK_LOGITS = 2**26
"""Logits of either model that exist together: 0.25 GiB in float32, several times over."""
LEARNING_PART = 8
"""The divisor of `logits_at_once` that gives the logits of a chunk where `kl` trains a head.

With the gradient these are 10 bytes a logit, 2 % of a GPU's memory. Every chunk reads and writes
the whole gradient of the head: at 152,000 words, 441 tokens took 101 ms a step, 883 took 86 (one
H200, 32,768 tokens, Qwen2.5-0.5B's head).
"""


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
    gradient. `kl` alone is computed by `kl_of_logits`, other losses by autograd.

    `terms` are weights by names of `qat.losses.config.WITH_TEACHER`.

    Raises:
        ValueError: `temperature` is not positive, or the vocabularies differ in size.
    """
    V, teacher_V = head.weight.shape[0], targets.head.weight.shape[0]
    if V != teacher_V:
        raise ValueError(f"the student's head has {V} words and the teacher's {teacher_V}")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive")
    asked = _Asked(targets, terms, temperature, head.softcap)
    is_plain = len(terms) == 1 and PLAIN_KL.issuperset(terms)
    sums_of_rows = _plain_kl if is_plain else _by_autograd

    def add_chunk(
        rows: slice, hidden: Tensor, head: Head, gradients: Gradients
    ) -> dict[str, Tensor]:
        hidden = hidden.masked_fill(~targets.mask[rows, None], 0.0)
        dtype = hidden.dtype if gradients.are_wanted else None  # matmuls compute in it
        sums, g_logits = sums_of_rows(asked, rows, _logits(hidden, head), dtype)
        if g_logits is not None and gradients.hidden is not None:
            gradients.hidden.copy_(g_logits @ head.weight.to(dtype))
        if g_logits is not None and gradients.head is not None:
            gradients.head.add(g_logits, hidden)
        return sums

    size = CHUNK_LOGITS
    if is_plain and head.learns and torch.is_grad_enabled():
        size = max(size, on(hidden.device).logits_at_once() // LEARNING_PART)
    return sums_with_gradient(hidden, Task(head, terms, max(1, size // V), add_chunk))


class _Asked(NamedTuple):
    """The targets and settings that all chunks share."""

    targets: OnlineTargets
    terms: dict[str, float]
    temperature: float
    softcap: float | None
    """The soft cap of the student's head."""


def _plain_kl(
    asked: _Asked, rows: slice, logits: Tensor, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the sums of `kl` alone, and the gradient of the logits in `dtype` if it is given."""
    ((name, weight),) = asked.terms.items()
    taught = _teacher_logits(asked.targets, rows)
    scale = Scale(asked.temperature, weight, asked.softcap)
    kl, slope = kl_of_logits(taught, logits, asked.targets.mask[rows], scale, slope=dtype)
    return {name: kl.sum(), "loss": weight * kl.sum()}, slope


def _by_autograd(
    asked: _Asked, rows: slice, logits: Tensor, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Do the same for any losses."""
    cached = _all_words(asked.targets, rows)

    def sums_of(logits: Tensor) -> dict[str, Tensor]:
        label = logits.gather(1, cached.labels.clamp_min(0)[:, None])
        student = Student(logits, logits[:, :0], label, others_lse=None)
        return sums_by_name(student, cached, asked.terms, asked.temperature)

    if dtype is None:
        return sums_of(logits), None
    sums, (slope,) = differentiated(sums_of, [logits])
    return sums, before_softcap(slope, logits, asked.softcap).to(dtype)


@torch.no_grad()
def _all_words(targets: OnlineTargets, rows: slice) -> Targets:
    """Return the targets of a cache with K = V for some rows; masked ones name no word."""
    labels = targets.labels[rows].masked_fill(~targets.mask[rows], NO_LABEL)
    log_p = _teacher_logits(targets, rows).log_softmax(1)
    return Targets(
        mask=targets.mask[rows],
        labels=labels,
        topk_ids=torch.arange(log_p.shape[1], device=log_p.device).expand_as(log_p),
        topk_logprobs=log_p,
        tail_logprob=torch.full_like(log_p[:, 0], -torch.inf),
        sample_ids=labels[:, None][:, :0],
        sample_counts=log_p[:, :0],
    )


@torch.no_grad()
def _teacher_logits(targets: OnlineTargets, rows: slice) -> Tensor:
    """Return the teacher's logits for some rows, `(t, V)`; those of masked ones are the bias."""
    hidden = targets.hidden[rows].masked_fill(~targets.mask[rows, None], 0.0)
    return _logits(hidden, targets.head)


def _logits(hidden: Tensor, head: Head) -> Tensor:
    """Return logits in the dtype of losses; sums of halves are not rounded on CUDA."""
    if hidden.is_cuda and hidden.dtype in (torch.float16, torch.bfloat16):
        return head._replace(weight=head.weight.to(hidden.dtype)).exact_logits(hidden)
    return wide(head.logits(hidden))
