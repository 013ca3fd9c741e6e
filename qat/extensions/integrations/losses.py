"""Losses for a user's own training loop, against a teacher cache or a running teacher.

Shapes: B sequences, S positions, T = B * S tokens, V words.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from qat.data.packing import NO_LABEL, Batch
from qat.errors import ConfigError
from qat.extensions.integrations.student import StudentOutput, unwrapped
from qat.kernels.head import named_words, wide
from qat.losses.config import (
    check_targets,
    check_with_teacher,
    fitting_loss,
    kinds_read,
    parse_losses,
)
from qat.losses.formulas import (
    Student,
    Targets,
    WordsRead,
    loss_from_logits,
    sums_by_name,
    to_targets,
    valid_rows,
)
from qat.losses.from_hidden import loss_from_hidden
from qat.losses.from_teacher import OnlineTargets, loss_from_teacher
from qat.nn.lut_embedding import TableHead


class Totals(NamedTuple):
    """The number of valid tokens and the named words of one step, over all ranks."""

    num_tokens: Tensor | float
    """Number of valid tokens, by which the sum of losses is divided."""
    named: Tensor | None = None
    """`(V,)` bool: the words that the step's targets name. A table that learns gets no gradient of
    others by its head: there is next to nothing that AdamW would not blow up."""


@torch.no_grad()
def totals(
    student: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: str | None = None,
    with_teacher: bool = False,
) -> Totals:
    """Return the totals of a step of several micro-batches or ranks, for `qat.loss`.

        whole = qat.totals(student, batches)
        for batch in batches:
            out = student(batch.input_ids, position_ids=batch.position_ids, with_logits=False)
            qat.loss(out, batch, totals=whole).backward()

    Ranks of a process group call it together, each with its own micro-batches.

    Args:
        student: a prepared student, wrapped or not.
        batches: the micro-batches of this rank, on any device.
        loss: as in `qat.loss`.
        with_teacher: whether losses are against a teacher that runs beside, which names all words.
    """
    language = unwrapped(student).prepared.language
    num_tokens = torch.stack([batch.mask.sum() for batch in batches]).sum().to(language.device)
    summed, head = [num_tokens], language.head
    if isinstance(head, TableHead) and head.table.learns() and not with_teacher:
        words = torch.cat([_words(to_targets(batch), _terms(batch, loss)) for batch in batches])
        summed.append(named_words(words.to(language.device), head.table.out_features))
    if dist.is_available() and dist.is_initialized():
        for tensor in summed:
            dist.all_reduce(tensor)
    num_tokens, *count = summed
    return Totals(num_tokens.clamp(min=1), count[0] > 0 if count else None)


def loss(
    student: Any,
    batch: Batch | None = None,
    *,
    teacher: Any = None,
    mask: Tensor | None = None,
    loss: str | None = None,
    temperature: float = 1.0,
    totals: Totals | None = None,
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
        totals: what `qat.totals` counts, for steps of several micro-batches or ranks; by default
            the valid tokens here, and the words that this batch names.

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
    if totals is None:
        totals = Totals(mask.sum().clamp(min=1))
    if teacher is None:
        terms = _terms(batch, loss)
        targets = to_targets(batch._replace(mask=mask))
        found = _against_cache(
            _naming(student, targets, terms, totals), targets, terms, temperature
        )
    else:
        labels = torch.full_like(mask, NO_LABEL, dtype=torch.long)
        labels = labels if batch is None else batch.labels
        terms = parse_losses(loss or "kl")
        check_with_teacher(terms)
        found = _against_teacher(student, teacher, (mask, labels), terms, temperature=temperature)
    return found["loss"] / totals.num_tokens


def _terms(batch: Batch, loss: str | None) -> dict[str, float]:
    """Return the weights of losses by name, which the targets of `batch` must serve."""
    top_k, draws = batch.topk_ids.shape[-1], batch.sample_ids.shape[-1]
    terms = parse_losses(loss or fitting_loss(top_k, draws))
    check_targets(terms, top_k, draws)
    return terms


def _words(targets: Targets, terms: dict[str, float]) -> Tensor:
    """Return the words that losses read of each token, flat; below 0 where there is none."""
    return WordsRead.of(valid_rows(targets), kinds_read(terms)).ids().flatten()


def _naming(student: Any, targets: Targets, terms: dict[str, float], totals: Totals) -> Any:
    """Return the student's output, whose head knows what the step names, if its table learns."""
    if not isinstance(student, StudentOutput) or student.head.take_gradient is None:
        return student
    named, V = totals.named, len(student.head.weight)  # which may be cut to fewer words
    named = named_words(_words(targets, terms), V) > 0 if named is None else named[:V]
    return student._replace(head=student.head._replace(named=named))


def _all_but_last(student: Any) -> Tensor:
    values = student.hidden if isinstance(student, StudentOutput) else student.logits
    mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    mask[:, -1] = False
    return mask


def _against_cache(
    student: Any, targets: Targets, terms: dict[str, float], temperature: float
) -> dict[str, Tensor]:
    if isinstance(student, StudentOutput):
        hidden = student.hidden.flatten(0, 1)
        return loss_from_hidden(hidden, student.head, targets, terms, temperature=temperature)
    return loss_from_logits(student.logits.flatten(0, 1), targets, terms, temperature=temperature)


def _against_teacher(
    student: Any,
    teacher: Any,
    known: tuple[Tensor, Tensor],
    terms: dict[str, float],
    *,
    temperature: float,
) -> dict[str, Tensor]:
    mask, labels = (each.flatten() for each in known)
    if isinstance(student, StudentOutput) and isinstance(teacher, StudentOutput):
        words, taught = (each.head.weight.shape[0] for each in (student, teacher))
        if words != taught:
            raise ConfigError(
                f"the student's head has {words} words and the teacher's {taught}, expected the "
                "same; cut the longer one: output._replace(head=output.head.words(0, WORDS))"
            )
        targets = OnlineTargets(mask, labels, teacher.hidden.flatten(0, 1), teacher.head)
        hidden = student.hidden.flatten(0, 1)
        return loss_from_teacher(hidden, student.head, targets, terms, temperature=temperature)
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
    return sums_by_name(given, targets, terms, temperature)


def _logits(output: Any) -> Tensor:
    """Return the logits of an output, `(T, V)`."""
    if isinstance(output, StudentOutput):
        return output.head.logits(output.hidden.flatten(0, 1))
    return output.logits.flatten(0, 1)
