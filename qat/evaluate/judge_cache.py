"""Judges a model, by its name, on the split of a cache that training never sees."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from qat.data.packing import Batch
from qat.data.reader import TeacherCache
from qat.data.text import tokenizer_hash
from qat.errors import CacheError
from qat.evaluate.divergence import Divergence, cached_divergence
from qat.logs import progress
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.nn.step import form_weights


def held_out_divergence(
    source: str, cache_dir: Path, *, device: str = "auto", dtype: str = "auto", batch_size: int = 8
) -> Divergence:
    """What a cache's held-out split says of the model that `source` names.

    Raises:
        CacheError: no such cache, or one for another tokenizer or vocabulary, or without the split.
        CheckpointError: no such model.
    """
    cache = TeacherCache.open(cache_dir)
    student, tokenizer = open_student(source, device=device, dtype=dtype)
    check_fit(cache, student, tokenizer)
    return cached_divergence(student, split_batches(cache, "held_out", batch_size))


def open_student(
    source: str, *, device: str, dtype: str
) -> tuple[LanguageModel, PreTrainedTokenizerBase]:
    """A model ready for many forwards, its quantized weights formed once, and its tokenizer.

    Raises:
        CheckpointError: no such model or tokenizer.
        ConfigError: the device is not there or cannot compute in `dtype`.
    """
    student = load_model(source, device=device, dtype=dtype)
    form_weights(student.model, student.dtype)
    return student, load_tokenizer(source)


def check_fit(
    cache: TeacherCache, student: LanguageModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Make sure that the cache speaks of this student's words and lengths.

    Raises:
        CacheError: its tokenizer or vocabulary differ, or its sequences are too long.
    """
    cache.check_student(tokenizer_hash(tokenizer), student.config.vocab_size, student.longest)


def split_batches(
    cache: TeacherCache,
    split: Literal["held_out", "train"],
    batch_size: int,
    max_sequences: int = 0,
) -> Iterator[Batch]:
    """The first `max_sequences` sequences of a split (0: all) in order, with a progress bar.

    Raises:
        CacheError: the split is empty.
    """
    count = cache.num_sequences(split)
    if count == 0:
        raise CacheError(
            f"{cache.directory} has no {split} sequences; expected some to judge by; choose "
            "another --split or rebuild the cache with more data"
        )
    count = min(count, max_sequences or count)
    with progress("judging on the cache", count, "sequences") as ticker:
        for start in range(0, count, batch_size):
            indices = range(start, min(start + batch_size, count))
            yield cache.batch(indices, split=split)
            ticker.advance(len(indices))
