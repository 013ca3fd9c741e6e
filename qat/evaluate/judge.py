"""Everything that `qat eval` finds out about a student."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from qat.data.packing import Batch
from qat.data.reader import TeacherCache
from qat.data.remote import open_cache
from qat.evaluate.config import EvalConfig
from qat.evaluate.divergence import (
    CachedTeacher,
    Divergence,
    ExactDivergence,
    cached_divergence,
    cached_teacher,
    exact_divergence,
)
from qat.evaluate.judge_cache import check_fit, open_student, split_batches
from qat.evaluate.perplexity import Perplexity, check_context, text_perplexity
from qat.evaluate.tasks import Scores, Tasks
from qat.evaluate.text import Text, read_text, text_batches
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher


class Verdict(NamedTuple):
    """What was measured; None where the settings named nothing to measure by."""

    cached: Divergence | None
    """Against the cache."""
    cached_teacher: CachedTeacher | None
    """The teacher by what the cache holds of it."""
    exact: ExactDivergence | None
    """Against the teacher, on the cache's sequences, or on the text where there is no cache."""
    text: Perplexity | None
    """On the text."""
    teacher_text: Perplexity | None
    """The teacher on the text."""
    tasks: Scores | None
    """On tasks, by task and measure."""
    teacher_tasks: Scores | None
    """The teacher on the tasks."""

    def numbers(self) -> dict[str, float | Scores | None]:
        """All numbers by name, the same names always; None where nothing was measured.

        What cache and teacher both tell of the same tokens is the teacher's.
        """
        parts = [
            ("", Divergence, self.cached),
            ("", CachedTeacher, self.cached_teacher),
            ("", ExactDivergence, self.exact),
            ("text_", Perplexity, self.text),
            ("teacher_text_", Perplexity, self.teacher_text),
        ]
        numbers = {prefix + name: None for prefix, kind, _ in parts for name in kind._fields}
        numbers |= {"tasks": self.tasks, "teacher_tasks": self.teacher_tasks}
        for prefix, _, found in parts:
            fields = {} if found is None else found._asdict()
            numbers |= {prefix + k: value for k, value in fields.items() if value is not None}
        return numbers


def judge(source: str, config: EvalConfig) -> Verdict:
    """Measure the model that `source` names by all that `config` names.

    Raises:
        ConfigError: neither cache nor text is given, or the windows do not fit.
        CacheError, CheckpointError, DataError: what is named is missing, damaged or does not fit.
    """
    config.check_named()
    tasks = None if config.tasks is None else Tasks(config)
    cache = None if config.cache_dir is None else open_cache(config.cache_dir)
    student, tokenizer = open_student(source, device=config.device, dtype=config.dtype)
    text = None if config.text is None else read_text(config, tokenizer)
    if cache is not None:
        check_fit(cache, student, tokenizer)
    if text is not None:
        check_context(student, config.context)
    teacher = _teacher(config)
    has_texts = cache is not None or text is not None
    batches = _batches(config, cache, text)
    return Verdict(
        cached=None if cache is None else cached_divergence(student, batches()),
        cached_teacher=None if cache is None else cached_teacher(batches()),
        exact=None
        if teacher is None or not has_texts
        else exact_divergence(student, teacher, batches()),
        text=_on_text(student, text, config),
        teacher_text=_on_text(teacher, text, config),
        tasks=None if tasks is None else tasks.scores(student, tokenizer),
        teacher_tasks=(
            None if tasks is None or teacher is None else tasks.scores(teacher, tokenizer)
        ),
    )


def _teacher(config: EvalConfig) -> LanguageModel | None:
    if config.teacher is None:
        return None
    return load_teacher(config.teacher, device=config.device, dtype=config.dtype)


def _batches(
    config: EvalConfig, cache: TeacherCache | None, text: Text | None
) -> Callable[[], Iterator[Batch]]:
    """What divergences are measured on: each call starts anew."""
    if cache is not None:
        return lambda: split_batches(cache, config.split, config.batch_size, config.max_sequences)
    return lambda: text_batches(text, config.context, config.stride, config.batch_size)


def _on_text(
    model: LanguageModel | None, text: Text | None, config: EvalConfig
) -> Perplexity | None:
    if model is None or text is None:
        return None
    return text_perplexity(
        model, text, context=config.context, stride=config.stride, batch_size=config.batch_size
    )
