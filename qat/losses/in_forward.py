"""Losses whose gradient is computed along with their value, some tokens at a time.

Shapes: T tokens, D model width, V vocabulary.
"""

from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qat.kernels.head import Head, wide

SCALED_TOKENS = 32768
"""Rows of a stored gradient that are multiplied in float32 at a time."""


class Gradients(NamedTuple):
    """Gradients of the loss, complete when all chunks are done; None where not wanted."""

    hidden: Tensor | None
    """`(T, D)`, in the dtype of the hidden states."""
    weight: Tensor | None
    """`(V, D)`, float32 or wider."""
    bias: Tensor | None
    """`(V,)`, float32 or wider."""

    def of_rows(self, rows: slice) -> "Gradients":
        """The hidden states' gradient for some of the tokens; the head's whole."""
        return self if self.hidden is None else self._replace(hidden=self.hidden[rows])


class Task(Protocol):
    """What is to be computed, beside the tensors that may get gradients."""

    softcap: float | None
    """The head's."""
    terms: dict[str, float]
    """Weight by name of loss."""

    def chunk_tokens(self) -> int:
        """Tokens to look at together."""

    def of_rows(self, rows: slice) -> Self:
        """The task for some of the tokens; masked ones say nothing."""

    def add_chunk(self, hidden: Tensor, head: Head, gradients: Gradients) -> dict[str, Tensor]:
        """The sums over all its tokens; writes and adds what they give to `gradients`."""


def sums_with_gradient(hidden: Tensor, head: Head, task: Task) -> dict[str, Tensor]:
    """The sum of each loss of `task`, and their weighted sum as `"loss"`, in nats.

    Backward of `"loss"` is one multiplication and may run once; the sums by name carry no gradient.
    The stored gradient of `hidden` has its dtype and is that of a sum over tokens: each token's is
    of the size of a head's weights, which float16 holds without loss scaling. Backward multiplies
    it in float32.

    Args:
        hidden: `(T, D)` last hidden states. Under autocast they are used in its dtype.
        head: the output embedding; its weight and bias get gradients if they require them.
        task: computes the sums and gradients of some tokens.
    """
    is_wanted = torch.is_grad_enabled()
    total, *sums = _LossInForward.apply(hidden, task, is_wanted, head.weight, head.bias)
    return {**dict(zip(task.terms, sums, strict=True)), "loss": total}


class _LossInForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, task: Task, is_wanted: bool, *learnable: Tensor | None
    ) -> tuple:
        head = Head(*learnable, task.softcap)
        needs = ctx.needs_input_grad if is_wanted else [False]
        gradients = _begin_gradients(hidden, head, needs)
        dtype, size = _compute_dtype(hidden), task.chunk_tokens()
        sums = {name: wide(hidden.new_zeros(())) for name in (*task.terms, "loss")}
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], size):
                rows = slice(start, start + size)
                into = gradients.of_rows(rows)
                part = task.of_rows(rows).add_chunk(hidden[rows].to(dtype), head, into)
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
        return of_hidden, None, None, *of_head


def _begin_gradients(hidden: Tensor, head: Head, needs: tuple[bool, ...]) -> Gradients:
    """Where the gradients go that `needs` names, the hidden states' first, the head's last."""
    of_hidden = of_weight = of_bias = None
    if needs[0]:
        of_hidden = hidden.new_empty(hidden.shape)
    if any(needs[1:]):
        of_weight = wide(torch.zeros_like(head.weight))
        of_bias = None if head.bias is None else wide(torch.zeros_like(head.bias))
    return Gradients(of_hidden, of_weight, of_bias)


def _scale_(stored: Tensor, factor: Tensor) -> Tensor:
    """Multiply in place, in float32 also where `stored` is narrower: `factor` would round in it."""
    for part in stored.split(SCALED_TOKENS):
        part.copy_(wide(part) * factor)
    return stored


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """What a matmul would compute in here: autocast's dtype, which leaves float64 alone."""
    kind = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
