"""Trains a baseline on a teacher cache: the same sequences, schedule and clock for every method."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from qat.backend.base import Backend
from qat.backend.device import select
from qat.bench.baselines.config import BaselineSettings
from qat.bench.baselines.training import (
    ChunkedLoss,
    Deployed,
    HiddenLoss,
    PlainStep,
    check_losses,
    chunked_loss,
    dense_copy,
)
from qat.convert.calibrate import TokenBatch
from qat.data.packing import Batch
from qat.data.pipeline import computed_ahead
from qat.data.reader import TeacherCache
from qat.data.sampler import sequence_indices
from qat.errors import TrainingError
from qat.logs import progress
from qat.losses.config import parse_losses, targets_read
from qat.models.language_model import LanguageModel
from qat.nn.swap import linear_names
from qat.train.optim import lr_share

logger = logging.getLogger(__name__)

REHEARSALS = 2
"""Forwards and backwards before the clock starts: the compiler works in the first."""


@dataclass(frozen=True)
class BaselineJob:
    """A float copy of the teacher that is to become a quantized student, and what it learns from.

    `settings` leave nothing open that the method has a value of its own for.
    """

    model: PreTrainedModel
    """In float32, with transformers' own attention."""
    names: list[str]
    """Its linears, all of them to be quantized."""
    cache: TeacherCache
    settings: BaselineSettings
    backend: Backend
    dtype: torch.dtype
    """What matmuls compute in."""
    calibration: Sequence[TokenBatch]

    @classmethod
    def of(
        cls,
        teacher: LanguageModel,
        cache: TeacherCache,
        settings: BaselineSettings,
        calibration: Sequence[TokenBatch] = (),
    ) -> "BaselineJob":
        """The job of making a student of `teacher` on the settings' device."""
        backend = select(settings.device)
        dtype = backend.dtype(settings.dtype)
        model = dense_copy(teacher, torch.float32).to(backend.device)
        return cls(
            model=model,
            names=linear_names(model),
            cache=cache,
            settings=settings,
            backend=backend,
            # fp16, which `auto` means on old GPUs, would need its loss scaled
            dtype=torch.float32 if dtype == torch.float16 else dtype,
            calibration=calibration,
        )

    def batch(self, step: int) -> Batch:
        """The sequences of a step, on the host: those that `qat train` takes."""
        settings, total = self.settings, self.cache.num_sequences("train")
        indices = sequence_indices(settings.seed, step, settings.batch_size, total)
        # the reference reads the top K whatever `loss` says
        targets = {"topk"} | targets_read(parse_losses(settings.loss))
        return Batch(*map(self.backend.pinned, self.cache.batch(indices, targets=targets)))

    def rate(self, peak: float, step: int, steps: int) -> float:
        """The learning rate of step `step` of `steps`."""
        share = lr_share(
            step,
            steps,
            schedule="cosine",
            warmup_steps=self.settings.warmup_steps,
            min_ratio=self.settings.min_lr_ratio,
        )
        return peak * share

    def step(
        self,
        learning: Sequence[nn.Parameter],
        loss: HiddenLoss,
        *,
        steps: int,
        is_compiled: bool = True,
        is_checkpointed: bool = False,
    ) -> PlainStep:
        """A step that trains `learning` over a run of `steps`, compiled where that pays."""
        return PlainStep(
            self.model,
            learning,
            loss,
            is_compiled=is_compiled and self.backend.compiles(),
            is_checkpointed=is_checkpointed,
            lr=lambda step: self.rate(self.settings.lr, step, steps),
            autocast=self.dtype,
        )

    def kd_loss(self) -> ChunkedLoss:
        """The settings' distillation loss at temperature 1.

        Raises:
            ConfigError: the baselines do not write it out.
        """
        terms = parse_losses(self.settings.loss)
        check_losses(terms)
        loss = chunked_loss(self.model, terms, 1.0, dtype=self.dtype)
        if self.backend.compiles():
            loss.compile()
        return loss


class Course(NamedTuple):
    """What a stretch of training cost."""

    steps: int = 0
    seconds: float = 0.0
    peak_gib: float = 0.0

    def followed_by(self, other: "Course") -> "Course":
        """Both stretches as one."""
        return Course(
            self.steps + other.steps,
            self.seconds + other.seconds,
            max(self.peak_gib, other.peak_gib),
        )


class Lesson(NamedTuple):
    """A student in the middle of becoming one: the step it takes, and what is left at the end."""

    step: PlainStep
    deploy: Callable[[], dict[str, Deployed]]
    """The quantized linears by name, once the training is over."""
    steps: int
    """Steps still to take."""
    before: Course = Course()
    """What was done already."""


def distil(lesson: Lesson, job: BaselineJob) -> Course:
    """Take the steps of a lesson; data goes on after what `lesson.before` has used.

    Raises:
        TrainingError: the loss at the end is not a number.
    """
    first, backend = lesson.before.steps, job.backend
    rehearse(lesson.step, job)
    backend.reset_peak_memory()
    began = time.perf_counter()
    with progress("training a baseline", lesson.steps, "steps") as ticker:
        numbers = range(first, first + lesson.steps)
        with closing(computed_ahead(job.batch, numbers, backend.batches_ahead())) as stream:
            for step, batch in enumerate(stream):
                result = lesson.step([batch], step)
                ticker.advance()
    backend.synchronize()
    seconds = time.perf_counter() - began
    loss = result.sums["loss"].item() / max(int(result.valid_tokens), 1)
    if not math.isfinite(loss):
        raise TrainingError(
            f"the baseline's loss is {loss} after {lesson.steps} steps, expected a number; lower "
            f"lr={job.settings.lr}"
        )
    return Course(lesson.steps, seconds, backend.peak_memory_gib() or 0.0)


def rehearse(step: PlainStep, job: BaselineJob) -> None:
    """Let compiler and allocator see everything once; the student stays as it is."""

    def run() -> None:
        for number in range(REHEARSALS):
            step.add_gradients([job.batch(number)])
            step.forget_gradients()

    run_or_uncompile(run, step.run_eagerly)
    job.backend.synchronize()


def run_or_uncompile(run: Callable[[], None], uncompile: Callable[[], None]) -> None:
    """Run what compiles; where the compiler fails, `uncompile` and run again."""
    try:
        run()
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        logger.warning("the baseline cannot be compiled (%s): it runs eagerly", reason)
        uncompile()
        run()
