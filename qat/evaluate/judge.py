"""Evaluate a student with all metrics of `qat eval`."""

from collections.abc import Iterator
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from qat.data.opening import open_cache
from qat.data.packing import Batch
from qat.data.reader import TeacherCache
from qat.data.text import tokenizer_hash
from qat.errors import CacheError
from qat.evaluate.config import EvalConfig
from qat.evaluate.divergence import (
    CachedTeacher,
    Divergence,
    ExactDivergence,
    cached_teacher,
    divergence_by_source,
    exact_divergence,
    sequences_by_source,
)
from qat.evaluate.tasks import Scores, load_harness
from qat.evaluate.text import (
    Perplexity,
    check_context,
    read_text,
    text_batches,
    text_perplexity,
)
from qat.logs import progress
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_teacher, load_tokenizer
from qat.nn.step import form_weights


def open_student(
    source: str, *, device: str, dtype: str
) -> tuple[LanguageModel, PreTrainedTokenizerBase]:
    """Load a model for many forwards, with its quantized weights formed once, and its tokenizer.

    Raises:
        CheckpointError: no such model or tokenizer.
        ConfigError: the device is missing or cannot compute in `dtype`.
    """
    student = load_model(source, device=device, dtype=dtype)
    form_weights(student.model, student.dtype)
    return student, load_tokenizer(source)


def split_batches(
    cache: TeacherCache,
    split: Literal["held_out", "train"],
    batch_size: int,
    max_sequences: int = 0,
) -> dict[str, Iterator[Batch]]:
    """Return the first `max_sequences` sequences of a split (0: all) by source, as batches.

    Raises:
        CacheError: the split is empty.
    """

    def batches(rows: np.ndarray) -> Iterator[Batch]:
        with progress("judging on the cache", len(rows), "sequences") as ticker:
            for start in range(0, len(rows), batch_size):
                indices = rows[start : start + batch_size]
                yield cache.batch(indices, split=split)
                ticker.advance(len(indices))

    if cache.num_sequences(split) == 0:
        raise CacheError(
            f"{cache.directory} has no {split} sequences; expected some to judge by; choose "
            "another --split or rebuild the cache with more data"
        )
    return {
        name: batches(rows)
        for name, rows in sequences_by_source(cache, split, max_sequences).items()
    }


class Verdict(NamedTuple):
    """All measurements; None if the settings did not request one."""

    cached: Divergence | None  # the student against the cache
    by_source: dict[str, float]  # the same for each of several sources of text
    cached_teacher: CachedTeacher | None  # the teacher, as far as the cache describes it
    exact: ExactDivergence | None
    """The student against the loaded teacher, on the cache's sequences or, without a cache, on the
    text."""
    text: Perplexity | None  # the student's perplexity on the text
    teacher_text: Perplexity | None  # the teacher's perplexity on the text
    tasks: Scores | None  # the student's scores by task and measure
    teacher_tasks: Scores | None  # the teacher's scores by task and measure

    def numbers(self) -> dict[str, float | Scores | None]:
        """Return all numbers by name; None where nothing was measured.

        Numbers that both the cache and the teacher provide are those of the teacher.
        """
        parts = [
            ("", Divergence, self.cached),
            ("", CachedTeacher, self.cached_teacher),
            ("", ExactDivergence, self.exact),
            ("text_", Perplexity, self.text),
            ("teacher_text_", Perplexity, self.teacher_text),
        ]
        numbers = {prefix + name: None for prefix, kind, _ in parts for name in kind._fields}
        numbers |= {"tasks": self.tasks, "teacher_tasks": self.teacher_tasks, **self.by_source}
        for prefix, _, found in parts:
            fields = {} if found is None else found._asdict()
            numbers |= {prefix + k: value for k, value in fields.items() if value is not None}
        return numbers


def judge(source: str, config: EvalConfig) -> Verdict:
    """Measure the model `source` with everything that `config` names.

    Raises:
        ConfigError: no cache, text or tasks are given, or the windows do not fit.
        CacheError, CheckpointError, DataError: a source is missing, damaged or does not fit.
    """
    config.check_named()
    tasks = None if config.tasks is None else load_harness().open_tasks(config)
    cache = None if config.cache_dir is None else open_cache(config.cache_dir)
    student, tokenizer = open_student(source, device=config.device, dtype=config.dtype)
    text = None if config.text is None else read_text(config, tokenizer)
    own_words, known = student.config.vocab_size, tokenizer_hash(tokenizer)
    if cache is not None:
        student.num_words = cache.check_student(known, own_words, student.longest)
    if text is not None:
        check_context(student, config.context)
    teacher = None
    if config.teacher is not None:
        teacher = load_teacher(config.teacher, device=config.device, dtype=config.dtype)
        words = own_words, teacher.config.vocab_size, student.num_words
        is_padded = min(words) < max(words[:2])
        if is_padded and known == tokenizer_hash(load_tokenizer(config.teacher)):
            student.num_words = teacher.num_words = min(words)
    size = config.batch_size

    def by_source() -> dict[str, Iterator[Batch]]:
        return split_batches(cache, config.split, size, config.max_sequences)

    def batches() -> Iterator[Batch]:
        """Return a new iterator over the batches for divergences."""
        if cache is not None:
            return chain.from_iterable(by_source().values())
        return text_batches(text, config.context, config.stride, size)

    def on_text(model: LanguageModel | None) -> Perplexity | None:
        if model is None or text is None:
            return None
        windows = {"context": config.context, "stride": config.stride, "batch_size": size}
        return text_perplexity(model, text, **windows)

    has_texts = cache is not None or text is not None
    judged = (None, {}) if cache is None else divergence_by_source(student, by_source())
    return Verdict(
        *judged,
        cached_teacher=None if cache is None else cached_teacher(batches()),
        exact=(exact_divergence(student, teacher, batches()) if teacher and has_texts else None),
        text=on_text(student),
        teacher_text=on_text(teacher),
        tasks=None if tasks is None else tasks.scores(student, tokenizer),
        teacher_tasks=tasks.scores(teacher, tokenizer) if tasks and teacher else None,
    )
