"""Losses of a loop of one's own: against a cache, or against a teacher that runs beside.

Shapes: B sequences, S positions, T = B * S tokens, V words.
"""

from typing import Any

import torch
from torch import Tensor

from qat.data.packing import NO_LABEL, Batch
from qat.errors import ConfigError
from qat.extensions.integrations.student import StudentOutput
from qat.kernels.head import wide
from qat.losses.config import check_targets, check_with_teacher, fitting_loss, parse_losses
from qat.losses.formulas import (
    Student,
    Targets,
    loss_from_logits,
    sums_by_name,
    to_targets,
    valid_rows,
)
from qat.losses.from_hidden import loss_from_hidden
from qat.losses.from_teacher import OnlineTargets, loss_from_teacher


def loss(
    student: Any,
    batch: Batch | None = None,
    *,
    teacher: Any = None,
    mask: Tensor | None = None,
    loss: str | None = None,
    temperature: float = 1.0,
    num_tokens: Tensor | float | None = None,
) -> Tensor:
    """Return the mean loss over the valid tokens, in nats per token.

        loss = qat.loss(student(batch.input_ids, position_ids=batch.position_ids), batch)
        loss = qat.loss(student(ids), teacher=teacher(ids))

    Args:
        student: output of a prepared student, with logits `(B, S, V)`, or without (then the bits
            are those of 'qat train').
        batch: rows of a teacher cache, on the student's device.
        teacher: output of a teacher on the same tokens; the loss is then against all its words.
            Both outputs have logits, or neither has (`qat.as_teacher`).
        mask: `(B, S)`, true where the prediction of the next token counts; by default the batch's,
            or all but the last token of each row.
        loss: as the flag of 'qat train', such as `tail:1,hard_ce:0.1`; by default what the cache
            has targets for, `kl` with a teacher.
        temperature: softmax temperature of the divergences.
        num_tokens: what the sum is divided by, for steps of several micro-batches or ranks; by
            default the number of valid tokens here.

    Raises:
        ConfigError: the loss reads what neither the batch nor the teacher gives.
    """
    if batch is None and teacher is None:
        raise ConfigError(
            "qat.loss has neither a batch of a cache nor a teacher's output, expected one of them; "
            "give batch or teacher="
        )
    if mask is None:
        mask = batch.mask if batch is not None else _all_but_last(student)
    if teacher is None:
        total = _against_cache(student, batch._replace(mask=mask), loss, temperature)
    else:
        labels = torch.full_like(mask, NO_LABEL, dtype=torch.long)
        labels = labels if batch is None else batch.labels
        total = _against_teacher(
            student, teacher, (mask, labels), loss=loss or "kl", temperature=temperature
        )
    if num_tokens is None:
        num_tokens = mask.sum().clamp(min=1)
    return total / num_tokens


def _all_but_last(student: Any) -> Tensor:
    values = student.hidden if isinstance(student, StudentOutput) else student.logits
    mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    mask[:, -1] = False
    return mask


def _against_cache(student: Any, batch: Batch, loss: str | None, temperature: float) -> Tensor:
    top_k, draws = batch.topk_ids.shape[-1], batch.sample_ids.shape[-1]
    terms = parse_losses(loss or fitting_loss(top_k, draws))
    check_targets(terms, top_k, draws)
    targets = to_targets(batch)
    if isinstance(student, StudentOutput):
        hidden = student.hidden.flatten(0, 1)
        found = loss_from_hidden(hidden, student.head, targets, terms, temperature=temperature)
    else:
        logits = student.logits.flatten(0, 1)
        found = loss_from_logits(logits, targets, terms, temperature=temperature)
    return found["loss"]


def _against_teacher(
    student: Any,
    teacher: Any,
    known: tuple[Tensor, Tensor],
    *,
    loss: str,
    temperature: float,
) -> Tensor:
    terms = parse_losses(loss)
    check_with_teacher(terms)
    mask, labels = (each.flatten() for each in known)
    if isinstance(student, StudentOutput) and isinstance(teacher, StudentOutput):
        targets = OnlineTargets(mask, labels, teacher.hidden.flatten(0, 1), teacher.head)
        hidden = student.hidden.flatten(0, 1)
        return loss_from_teacher(hidden, student.head, targets, terms, temperature=temperature)[
            "loss"
        ]
    logits, log_p = wide(_logits(student)), wide(_logits(teacher).detach()).log_softmax(1)
    if logits.shape != log_p.shape:
        raise ConfigError(
            f"the student's logits are {tuple(logits.shape)} and the teacher's "
            f"{tuple(log_p.shape)}, expected the same tokens and words; run both on the same rows"
        )
    words = torch.arange(log_p.shape[1], device=log_p.device).expand_as(log_p)
    targets = Targets(
        mask=mask,
        labels=labels,
        topk_ids=words,
        topk_logprobs=log_p,
        tail_logprob=torch.full_like(log_p[:, 0], -torch.inf),
        sample_ids=labels[:, None][:, :0],
        sample_counts=log_p[:, :0],
    )
    logits, targets = logits.masked_fill(~mask[:, None], 0.0), valid_rows(targets)
    label = logits.gather(1, targets.labels.clamp_min(0)[:, None])
    given = Student(logits, logits[:, :0], label, others_lse=None)
    return sums_by_name(given, targets, terms, temperature)["loss"]


def _logits(output: Any) -> Tensor:
    """Return the logits of an output, `(T, V)`."""
    if isinstance(output, StudentOutput):
        return output.head.logits(output.hidden.flatten(0, 1))
    return output.logits.flatten(0, 1)
