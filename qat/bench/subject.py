"""What a benchmark measures: anything that takes optimizer steps, ours first of all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from qat.backend.device import on
from qat.bench.config import MeasureConfig
from qat.data.packing import Batch
from qat.models.language_model import LanguageModel
from qat.nn.quant_linear import LutLinear
from qat.nn.swap import add_adapters, to_latent
from qat.ranks import ALONE, Ranks
from qat.train.config import StepConfig, TrainConfig
from qat.train.optim import Optimizer, learnable, linears_in_scope
from qat.train.step import StepResult, TrainingStep

FOREVER = 2**31


class Subject(Protocol):
    """One way to take a training step."""

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Take one optimizer step."""

    def compile_facts(self) -> dict[str, object]:
        """What the compiler did: compiled, graphs, recompiles, cuda_graph, fallback."""

    def close(self) -> None:
        """Let go of all memory that the next subject needs."""


class Ours:
    """A student ready to learn; every `subject()` is a fresh training step over it.

    Learning rates are zero, so all of them train the same student. Several `ranks` take each step
    together; with `is_sharded` each of them holds its rows of the latent weights.
    """

    def __init__(
        self,
        student: LanguageModel,
        config: MeasureConfig,
        *,
        ranks: Ranks = ALONE,
        is_sharded: bool = False,
    ) -> None:
        self.student = student
        self.config = config
        self.names = linears_in_scope(student.model, config.scope)
        if "weights" in config.kinds:
            frozen = [n for n in self.names if not _is_latent(student, n)]
            to_latent(student.model, frozen, ranks if is_sharded else ALONE)
        if "lora" in config.kinds:
            add_adapters(student.model, self.names, config.lora_rank, config.seed)
        by_kind = learnable(student.model, self.names, config.kinds)
        torch.manual_seed(config.seed)
        self.optimizer = Optimizer(student.model, by_kind, standing_still(config), ranks=ranks)
        self._make_moments()
        backend = on(student.device)
        state = self.optimizer.state().values()
        self._undo = backend.undoing(state) if backend.fixed_shapes() else None

    def subject(self) -> TrainingStep:
        """A training step that has compiled and recorded nothing yet."""
        self.forget_gradients()
        return TrainingStep(self.student, self.optimizer, self.config)

    def forget_gradients(self) -> None:
        """Drop the parameters' gradients."""
        for parameter in self.optimizer.parameters.values():
            parameter.grad = None

    @contextmanager
    def mended(self) -> Iterator[None]:
        """A block of steps that leaves no gradients and, if it fails, all as it was before.

        A compiled step that fails has given away what it would have replaced.
        """
        try:
            yield
        except (RuntimeError, MemoryError):
            if self._undo is not None:
                self._undo()
            raise
        finally:
            self.forget_gradients()

    def _make_moments(self) -> None:
        """Let the optimizer make its state now, so that the first step holds what all others do."""
        for parameter in self.optimizer.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step(0)


def standing_still(config: MeasureConfig) -> TrainConfig:
    """The settings of a training run with these steps, whose learning rates are zero."""
    shared = {name: getattr(config, name) for name in StepConfig.model_fields}
    rates = {name: 0.0 for name in TrainConfig.model_fields if f"{name}_".startswith("lr_")}
    cache_dir = config.cache_dir or Path("synthetic")
    return TrainConfig(
        cache_dir=cache_dir,
        max_steps=FOREVER,
        schedule="constant",
        warmup_steps=0,
        **rates,
        **shared,
    )


def _is_latent(student: LanguageModel, name: str) -> bool:
    return isinstance(student.model.get_submodule(name), LutLinear)
