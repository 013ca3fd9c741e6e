"""From hidden states to losses without all logits at once, and their gradient in the same pass.

Shapes: T tokens, D model width, V vocabulary, N words that losses read.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qat.kernels.head import (
    Head,
    LogitGradients,
    Others,
    add_head_gradient,
    before_softcap,
    chosen_logits,
    hidden_gradient,
    other_words,
    wide,
)
from qat.losses.registry import needs_of, reads_others, sums_by_name
from qat.losses.student import WordsRead
from qat.losses.targets import Targets, valid_rows

CHUNK_TOKENS = 32768
"""Tokens whose `(t, N)` tensors and float32 `(t, D)` gradient exist together."""


def loss_from_hidden(
    hidden: Tensor,
    head: Head,
    targets: Targets,
    terms: dict[str, float],
    *,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """The sum of each loss over valid tokens, and their weighted sum as `"loss"`, all in nats.

    Equal to `loss_from_logits(head.logits(hidden), ...)`, but neither `(T, V)` nor `(T, N, D)` ever
    exists. The gradient of `"loss"` is computed along with it, so backward is one multiplication
    and may run once; the sums by name carry no gradient. Nothing waits for the device.

    The stored gradient has the dtype of `hidden` and is that of a sum over tokens: each token's is
    of the size of a head's weights, which float16 holds without loss scaling. Backward multiplies
    it in float32.

    Args:
        hidden: `(T, D)` last hidden states. Under autocast they are used in its dtype.
        head: the output embedding; its weight and bias get gradients if they require them.
        targets: the teacher's word on the T tokens.
        terms: weight by name of loss, as `parse_losses` gives them.
        temperature: softmax temperature of the divergences, > 0.

    Raises:
        ValueError: `temperature` is not positive, or the targets lack what a loss reads.
    """
    task = _Task(head.softcap, targets, terms, temperature, torch.is_grad_enabled())
    total, *sums = _LossFromHidden.apply(hidden, task, head.weight, head.bias)
    return {**dict(zip(terms, sums, strict=True)), "loss": total}


class _Task(NamedTuple):
    """What is to be computed, beside the tensors that may get gradients."""

    softcap: float | None
    targets: Targets
    terms: dict[str, float]
    temperature: float
    may_need_gradient: bool

    def of_rows(self, rows: slice) -> "_Task":
        """The task for some of the tokens; masked ones say nothing."""
        targets = Targets(*(value[rows] for value in self.targets))
        return self._replace(targets=valid_rows(targets))


class _Gradients(NamedTuple):
    """Gradients of the loss, complete when all chunks are done; None where not wanted."""

    hidden: Tensor | None
    """`(T, D)`, in the dtype of the hidden states."""
    weight: Tensor | None
    """`(V, D)`, float32 or wider."""
    bias: Tensor | None
    """`(V,)`, float32 or wider."""

    def of_rows(self, rows: slice) -> "_Gradients":
        """The hidden states' gradient for some of the tokens; the head's whole."""
        return self if self.hidden is None else self._replace(hidden=self.hidden[rows])


class _LossFromHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, task: _Task, *learnable: Tensor | None) -> tuple:
        head = Head(*learnable, task.softcap)
        gradients = _begin_gradients(hidden, head, task, ctx.needs_input_grad)
        dtype = _compute_dtype(hidden)
        sums = {name: wide(hidden.new_zeros(())) for name in (*task.terms, "loss")}
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], CHUNK_TOKENS):
                rows = slice(start, start + CHUNK_TOKENS)
                into = gradients.of_rows(rows)
                part = _add_chunk(hidden[rows].to(dtype), head, task.of_rows(rows), into)
                sums = {name: total + part[name] for name, total in sums.items()}
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if p is None else p.dtype for p in (hidden, *learnable)]
        by_name = [sums[name] for name in task.terms]
        ctx.mark_non_differentiable(*by_name)
        return sums["loss"], *by_name

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_total: Tensor, *_: Tensor) -> tuple:  # noqa: ANN401
        stored = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = (None if g is None else _scale_(g, g_total).to(dtype) for g, dtype in stored)
        of_hidden, *of_head = scaled
        return of_hidden, None, *of_head


def _begin_gradients(
    hidden: Tensor, head: Head, task: _Task, needs: tuple[bool, ...]
) -> _Gradients:
    """Where the gradients go that `needs` names, in the order of `_LossFromHidden.apply`."""
    of_hidden = of_weight = of_bias = None
    if task.may_need_gradient and needs[0]:
        of_hidden = hidden.new_empty(hidden.shape)
    if task.may_need_gradient and any(needs[1:]):
        of_weight = wide(torch.zeros_like(head.weight))
        of_bias = None if head.bias is None else wide(torch.zeros_like(head.bias))
    return _Gradients(of_hidden, of_weight, of_bias)


def _add_chunk(hidden: Tensor, head: Head, task: _Task, gradients: _Gradients) -> dict[str, Tensor]:
    """The sums over some tokens; writes and adds what they give to `gradients`."""
    targets = task.targets
    hidden = hidden.masked_fill(~targets.mask[:, None], 0.0)
    words = WordsRead.of(targets, needs_of(task.terms))
    ids, K = words.ids(), words.topk.shape[1]
    chosen, others = chosen_logits(hidden, head, ids), Others(None, None)
    if reads_others(task.terms) and K < head.weight.shape[0]:
        want_slope = gradients.hidden is not None
        others = other_words(hidden, head, words.topk, want_slope=want_slope)

    def sums_of(chosen: Tensor, lse: Tensor | None = None) -> dict[str, Tensor]:
        student = words.student(chosen, lse)
        return sums_by_name(student, targets, task.terms, task.temperature)

    read = (chosen,) if others.lse is None else (chosen, others.lse)
    if all(gradient is None for gradient in gradients):
        return sums_of(*read)
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in read]
        sums = sums_of(*leaves)
        g_chosen, *g_others = torch.autograd.grad(sums["loss"], leaves)
    g_chosen = before_softcap(g_chosen, chosen, head.softcap)
    g_logits = LogitGradients(ids, g_chosen, K, others.lse, *g_others)
    if gradients.hidden is not None:
        hidden_gradient(g_logits, others.slope, head.weight, out=gradients.hidden)
    if gradients.weight is not None:
        add_head_gradient(hidden, head, g_logits, out=Head(gradients.weight, gradients.bias))
    return {name: value.detach() for name, value in sums.items()}


def _scale_(stored: Tensor, factor: Tensor) -> Tensor:
    """Multiply in place, in float32 also where `stored` is narrower: `factor` would round in it."""
    for part in stored.split(CHUNK_TOKENS):
        part.copy_(wide(part) * factor)
    return stored


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """What a matmul would compute in here: autocast's dtype, which leaves float64 alone."""
    kind = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
