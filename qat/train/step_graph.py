"""Forward and backward of a micro-batch as one recorded graph of a GPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qat.data.packing import Batch

if TYPE_CHECKING:
    from qat.train.step import TrainingStep


class StepGraph:
    """Forward and backward of one micro-batch, captured once and replayed on other data."""

    def __init__(self, step: "TrainingStep", batch: Batch, valid: Tensor, is_packed: bool) -> None:
        self._batch = Batch(*(tensor.clone() for tensor in batch))
        self._valid = valid.clone()
        self._is_packed = is_packed
        step.backend.free_memory()
        self._replay, self._sums = step.backend.record(
            lambda: step.run_micro_step(self._batch, self._valid, is_packed)
        )
        every = step.optimizer.parameters.values()
        pairs = [(p, p.grad) for p in every if p.grad is not None]
        self._parameters = [parameter for parameter, _ in pairs]
        self._gradients = [gradient for _, gradient in pairs]
        step.optimizer.forget_gradients()

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
        gradients = self._gradients
        sums: Any = 0
        for number, batch in enumerate(batches):
            for old, new in zip(self._batch, batch, strict=True):
                old.copy_(new)
            self._replay()
            sums = sums + self._sums
            if len(batches) == 1:
                break
            if number == 0:
                gradients = [gradient.clone() for gradient in self._gradients]
            else:
                torch._foreach_add_(gradients, self._gradients)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return sums
