"""From hidden states to losses without all logits at once, and their gradient in the same pass.

Shapes: T tokens, D model width, V vocabulary, N words that losses read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.kernels.head import (
    Head,
    LogitGradients,
    Others,
    add_head_gradient,
    before_softcap,
    chosen_logits,
    hidden_gradient,
    other_words,
)
from qat.losses.in_forward import Gradients, sums_with_gradient
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
    exists. The gradient of `"loss"` is computed along with it (see `sums_with_gradient`), and only
    `"loss"` has one. Nothing waits for the device.

    Args:
        hidden: `(T, D)` last hidden states. Under autocast they are used in its dtype.
        head: the output embedding; its weight and bias get gradients if they require them.
        targets: the teacher's word on the T tokens.
        terms: weight by name of loss, as `parse_losses` gives them.
        temperature: softmax temperature of the divergences, > 0.

    Raises:
        ValueError: `temperature` is not positive, or the targets lack what a loss reads.
    """
    return sums_with_gradient(hidden, head, _Task(head.softcap, targets, terms, temperature))


class _Task(NamedTuple):
    softcap: float | None
    targets: Targets
    terms: dict[str, float]
    temperature: float

    def chunk_tokens(self) -> int:
        return CHUNK_TOKENS

    def of_rows(self, rows: slice) -> "_Task":
        targets = Targets(*(value[rows] for value in self.targets))
        return self._replace(targets=valid_rows(targets))

    def add_chunk(self, hidden: Tensor, head: Head, gradients: Gradients) -> dict[str, Tensor]:
        return _add_chunk(hidden, head, self, gradients)


def _add_chunk(hidden: Tensor, head: Head, task: _Task, gradients: Gradients) -> dict[str, Tensor]:
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
