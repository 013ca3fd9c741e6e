"""Losses and their gradient from hidden states in one pass, without all logits at once.

The T tokens are cut into chunks. For each, the kernels of `qat.kernels.head` compute the few logits
that the losses read and the log-sum-exp of all others; `qat.losses.formulas` turns these into sums,
which autograd differentiates with respect to those few numbers alone; and the kernels carry that
gradient to hidden states and head.

Shapes: T tokens, D model width, V vocabulary, N words that losses read.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qat.kernels.head import (
    Head,
    HeadSums,
    LogitGradients,
    Others,
    add_gradients,
    before_softcap,
    chosen_logits,
    gathered,
    hidden_gradient,
    kept_tokens,
    other_words,
    wide,
)
from qat.losses.config import kinds_read, reads_others
from qat.losses.formulas import Targets, WordsRead, sums_by_name, valid_rows

CHUNK_TOKENS = 32768  # whose `(t, N)` tensors and float32 `(t, D)` gradient exist together
SCALED_TOKENS = 32768  # rows of a gradient scaled in float32 at a time: 0.13 GB at D = 1024


class Gradients(NamedTuple):
    """The gradients that chunks write; None where none is required."""

    hidden: Tensor | None
    """`(T, D)`, in the dtype of the hidden states."""
    head: HeadSums | None

    @property
    def are_wanted(self) -> bool:
        """True if any is required."""
        return any(gradient is not None for gradient in self)


class Task(NamedTuple):
    """A sum of losses to compute."""

    head: Head
    """The output embedding."""
    terms: dict[str, float]
    """Weight of each loss by name."""
    chunk_tokens: int
    """Tokens per chunk."""
    add_chunk: Callable[[slice, Tensor, Head, Gradients], dict[str, Tensor]]
    """Returns the sums over some rows, by name and as `"loss"`, for their hidden states `(t, D)`.

    It writes their gradient and adds that of the head.
    """


def sums_with_gradient(hidden: Tensor, task: Task) -> dict[str, Tensor]:
    """Return the sum of each loss of `task`, and their weighted sum as `"loss"`, in nats.

    The backward pass of `"loss"` may run once; the sums by name carry no gradient. The gradient of
    `hidden` is stored in its dtype and is that of a sum over tokens: each token's has the magnitude
    of the head's weights, which float16 holds without loss scaling. The backward pass scales it in
    float32.

    Under autocast `hidden` `(T, D)` is cast to autocast's dtype. The head's weight and bias get
    gradients if they require them. `head.take_gradient` takes that of the weight in the backward
    pass, if it is given, and autograd gets none.
    """
    is_wanted = torch.is_grad_enabled()
    seen = task.head.weight, task.head.bias  # autograd sees tensors among the arguments only
    total, *sums = _LossInForward.apply(hidden, task, is_wanted, *seen)
    return {**dict(zip(task.terms, sums, strict=True)), "loss": total}


class _LossInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, task: Task, is_wanted: bool, *_: Tensor | None) -> tuple:
        needs_hidden, *others = ctx.needs_input_grad if is_wanted else [False]
        gradients = Gradients(
            hidden.new_empty(hidden.shape) if needs_hidden else None,
            HeadSums(task.head) if any(others) else None,
        )
        dtype, kind = hidden.dtype, hidden.device.type
        if dtype != torch.float64 and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        sums = {name: wide(hidden.new_zeros(())) for name in (*task.terms, "loss")}
        with torch.autocast(kind, enabled=False):
            for start in range(0, hidden.shape[0], task.chunk_tokens):
                rows, into = slice(start, start + task.chunk_tokens), gradients
                if into.hidden is not None:
                    into = into._replace(hidden=into.hidden[rows])
                part = task.add_chunk(rows, hidden[rows].to(dtype), task.head, into)
                sums = {name: total + part[name] for name, total in sums.items()}
        ctx.save_for_backward(gradients.hidden)
        ctx.head, ctx.of_head, ctx.has_run = task.head, gradients.head, False
        by_name = [sums[name] for name in task.terms]
        ctx.mark_non_differentiable(*by_name)
        return sums["loss"], *by_name

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_total: Tensor, *_: Tensor) -> tuple:  # noqa: ANN401
        if ctx.has_run:  # the gradients are used up
            raise RuntimeError("the backward pass of a loss may run once; compute the loss again")
        ctx.has_run = True
        (of_hidden,) = ctx.saved_tensors
        of_head: tuple[Tensor | None, ...] = (None, None)
        if ctx.of_head is not None:
            with torch.autocast(g_total.device.type, enabled=False):
                of_head = gathered(ctx.head, ctx.of_head, g_total)
            ctx.of_head = None
        # in place, but multiplied in float32: a narrower dtype would round the factor
        for part in () if of_hidden is None else of_hidden.split(SCALED_TOKENS):
            part.copy_(wide(part) * g_total)
        return of_hidden, None, None, *of_head


def differentiated(
    sums_of: Callable[..., dict[str, Tensor]], read: Sequence[Tensor]
) -> tuple[dict[str, Tensor], Sequence[Tensor]]:
    """Return `sums_of(*read)`, and the gradients of its `"loss"` with respect to `read`."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in read]
        sums = sums_of(*leaves)
        slopes = torch.autograd.grad(sums["loss"], leaves)
    return {name: value.detach() for name, value in sums.items()}, slopes


def loss_from_hidden(
    hidden: Tensor,
    head: Head,
    targets: Targets,
    terms: dict[str, float],
    *,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Return the sum over valid tokens of each loss, and of their weighted sum as `"loss"`.

    In nats. Equal to `loss_from_logits(head.logits(hidden), ...)` for the last hidden states `(T,
    D)`, but neither `(T, V)` nor `(T, N, D)` ever exists. The gradient of `"loss"` is computed in
    the same pass (see `sums_with_gradient`), and only `"loss"` has one. Nothing waits for the
    device.

    `terms` are weights by name of loss, as `parse_losses` returns them.

    Raises:
        ValueError: `temperature` is not positive, or the targets lack what a loss reads.
    """

    def add_chunk(
        rows: slice, hidden: Tensor, head: Head, gradients: Gradients
    ) -> dict[str, Tensor]:
        valid = valid_rows(Targets(*(value[rows] for value in targets)))
        hidden = hidden.masked_fill(~valid.mask[:, None], 0.0)
        words = WordsRead.of(valid, kinds_read(terms))
        ids, K = words.ids(), words.topk.shape[1]  # (t, N)
        chosen, others = chosen_logits(hidden, head, ids), Others(None, None)
        learns = gradients.head is not None
        if reads_others(terms) and K < head.weight.shape[0]:
            want_slope = gradients.hidden is not None and not learns
            others = other_words(hidden, head, words.topk, want_slope=want_slope, keep=learns)

        def sums_of(chosen: Tensor, lse: Tensor | None = None) -> dict[str, Tensor]:
            return sums_by_name(words.student(chosen, lse), valid, terms, temperature)

        read = (chosen,) if others.lse is None else (chosen, others.lse)
        if not gradients.are_wanted:
            return sums_of(*read)
        sums, (g_chosen, *g_others) = differentiated(sums_of, read)
        g_chosen = before_softcap(g_chosen, chosen, head.softcap)
        g_logits, out = LogitGradients(ids, g_chosen, K, others.lse, *g_others), gradients.hidden
        if gradients.head is not None:
            add_gradients(hidden, head, g_logits, others, gradients.head, out=out)
        else:
            hidden_gradient(g_logits, others.slope, head.weight, out=cast(Tensor, out))
        return sums

    learns = torch.is_grad_enabled() and head.learns
    chunk_tokens = kept_tokens(hidden) if learns else CHUNK_TOKENS
    return sums_with_gradient(hidden, Task(head, terms, chunk_tokens, add_chunk))
