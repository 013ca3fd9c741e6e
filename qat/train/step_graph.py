"""Forward and backward of a micro-batch as one recorded graph of a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qat.backend.base import Backend
from qat.data.packing import Batch
from qat.train.optim import Optimizer


class StepGraph:
    """Forward and backward of one micro-batch, captured once and replayed on other data.

    `run` is given a batch, the number of valid tokens and `is_packed`; it returns the summed losses
    and leaves gradients in the parameters of `optimizer`.
    """

    def __init__(
        self,
        run: Callable[[Batch, Tensor, bool], Tensor],
        batch: Batch,
        valid: Tensor,
        *,
        is_packed: bool,
        optimizer: Optimizer,
        backend: Backend,
    ) -> None:
        # the graph reads its inputs from these tensors, whatever batch they hold
        self._batch = Batch(*(tensor.clone() for tensor in batch))
        self._valid = valid.clone()
        self._is_packed = is_packed
        backend.free_memory()
        self._replay, self._sums = backend.record(lambda: run(self._batch, self._valid, is_packed))
        every = optimizer.parameters.values()
        self._pairs = [(p, p.grad) for p in every if p.grad is not None]
        optimizer.forget_gradients()

    def fits(self, batches: Sequence[Batch], is_packed: bool) -> bool:
        """Return whether all batches match the captured shapes and packing.

        A graph captured for packed rows is valid for any rows, but not the reverse.
        """
        if is_packed and not self._is_packed:
            return False
        pairs = (pair for batch in batches for pair in zip(batch, self._batch, strict=True))
        return all(new.shape == old.shape for new, old in pairs)

    def run(self, batches: list[Batch], valid: Tensor) -> Tensor:
        """Return the losses summed over all micro-batches; gradients are left in the parameters."""
        self._valid.copy_(valid)
        replayed = [gradient for _, gradient in self._pairs]  # each replay overwrites them
        gradients = replayed
        sums: Any = 0
        for number, batch in enumerate(batches):
            for old, new in zip(self._batch, batch, strict=True):
                old.copy_(new)
            self._replay()
            sums = sums + self._sums
            if len(batches) == 1:
                break
            if number == 0:
                gradients = [gradient.clone() for gradient in replayed]
            else:
                torch._foreach_add_(gradients, replayed)
        for (parameter, _), gradient in zip(self._pairs, gradients, strict=True):
            parameter.grad = gradient
        return sums
