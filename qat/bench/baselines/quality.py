"""The methods that our recipes are compared with, each from a teacher to a judgeable student."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from qat.bench.baselines.config import METHODS, PTQ, BaselineSettings
from qat.bench.baselines.reference import reference_lesson
from qat.bench.baselines.torchao_int2 import torchao_lesson
from qat.bench.baselines.training import (
    BaselineJob,
    Deployed,
    Lesson,
    dense_copy,
    distil,
    put_plain,
    rehearse,
)
from qat.bench.baselines.uniform import efficientqat_lesson, gptq, round_to_nearest, uniform_bits
from qat.bench.measure import compile_anew
from qat.convert.calibrate import QuantizeStage, StageInputs, TokenBatch, quantize_in_order
from qat.data.reader import TeacherCache
from qat.data.text import tokenizer_hash
from qat.errors import ConfigError
from qat.models.language_model import LanguageModel

LESSONS: dict[str, Callable[[BaselineJob], Lesson]] = {
    "reference": reference_lesson,
    "torchao_int2": torchao_lesson,
    "efficientqat": efficientqat_lesson,
}


class BaselineStudent(NamedTuple):
    """What a baseline made of a teacher."""

    model: LanguageModel
    """In float32; its linears hold exactly the weights that the method would deploy."""
    bits_per_weight: float
    """Over the quantized linears: codes, scales, zero points and codebooks."""
    steps: int
    """Optimizer steps, blocks' steps counted as parts of one; 0 where nothing is trained."""
    seconds: float
    """The training loop alone, or the quantization where nothing is trained."""
    peak_gib: float
    """Most memory held meanwhile."""


def train_baseline(
    method: str,
    teacher: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: TeacherCache,
    *,
    settings: BaselineSettings,
    calibration: Sequence[TokenBatch] = (),
) -> BaselineStudent:
    """Make a student of a float teacher; the teacher stays as it is.

    Sequences come in the order in which `qat train` takes them at the same seed and batch size.
    `gptq` alone reads the calibration batches.

    Raises:
        ConfigError: an unknown method, one that is not installed, or settings that do not fit it.
        CacheError: the cache is not one for this teacher.
        TrainingError: the loss is not a number any more.
    """
    _check(method, calibration)
    cache.check_student(tokenizer_hash(tokenizer), teacher.config.vocab_size, teacher.longest)
    compile_anew()
    if method in PTQ:
        return _quantize(method, BaselineJob.of(teacher, cache, settings, calibration))
    job = BaselineJob.of(teacher, cache, settings.filled(method))
    lesson = LESSONS[method](job)
    course = lesson.before.followed_by(distil(lesson, job))
    bits = put_plain(job.model, lesson.deploy())
    lesson.step.close()
    return BaselineStudent(_judgeable(job), bits, *course)


def time_step(
    method: str,
    teacher: LanguageModel,
    cache: TeacherCache,
    *,
    settings: BaselineSettings,
    steps: int,
) -> float:
    """Median seconds of an optimizer step; 0 for a method that takes none.

    For `efficientqat` a step of its second stage; one of its first costs as much over all blocks.
    """
    _check(method)
    if method in PTQ:
        return 0.0
    compile_anew()
    job = BaselineJob.of(
        teacher, cache, settings.filled(method).model_copy(update={"block_steps": 0})
    )
    lesson = LESSONS[method](job)
    rehearse(lesson.step, job)
    seconds = []
    for number in range(steps):
        batch = job.batch(number)
        job.backend.synchronize()
        began = time.perf_counter()
        lesson.step([batch], number)
        job.backend.synchronize()
        seconds.append(time.perf_counter() - began)
    lesson.step.close()
    return statistics.median(seconds)


def _check(method: str, calibration: Sequence[TokenBatch] | None = None) -> None:
    if method not in METHODS:
        raise ConfigError(f"method={method!r} is unknown; choose among {', '.join(METHODS)}")
    if method == "gptq" and calibration is not None and not calibration:
        raise ConfigError(
            "method=gptq, but there are no calibration batches; give a calibration text or leave "
            "the method out"
        )


@torch.no_grad()
def _quantize(method: str, job: BaselineJob) -> BaselineStudent:
    """Round all linears, one by one or in the order of their inputs."""
    settings, model = job.settings, job.model
    job.backend.reset_peak_memory()
    began = time.perf_counter()
    if method == "gptq":
        quantize_in_order(LanguageModel(model), job.calibration, job.names, _gptq_stage(job))
    else:
        for name in job.names:
            weight = model.get_submodule(name).weight
            weight.copy_(round_to_nearest(weight, settings.bits_of(name), settings.group_size))
    job.backend.synchronize()
    seconds = time.perf_counter() - began
    weights = {name: model.get_submodule(name).weight for name in job.names}
    size = settings.group_size
    deployed = {
        n: Deployed(w, uniform_bits(w, settings.bits_of(n), size)) for n, w in weights.items()
    }
    bits = put_plain(model, deployed)
    peak = job.backend.peak_memory_gib() or 0.0
    return BaselineStudent(_judgeable(job), bits, 0, seconds, peak)


def _gptq_stage(job: BaselineJob) -> QuantizeStage:
    """GPTQ as published: towards each weight itself, on the student's inputs."""
    settings = job.settings

    def quantize(names: list[str], inputs: StageInputs) -> None:
        for name in names:
            weight = job.model.get_submodule(name).weight
            bits, size = settings.bits_of(name), settings.group_size
            weight.copy_(gptq(weight, inputs.second_moment, bits, size))

    return quantize


def _judgeable(job: BaselineJob) -> LanguageModel:
    """The model without anything that compiled or recomputed its layers."""
    return LanguageModel(dense_copy(LanguageModel(job.model), torch.float32))
