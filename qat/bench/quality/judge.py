"""Measures one student against its teacher, every student by the same texts and samples.

Shapes: B prompts, N tokens of a prompt.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.backend.device import seeded
from qat.bench.quality.plan import HELD_OUT, QualityRecipe, cache_config
from qat.data.config import chosen_targets
from qat.data.packing import Batch
from qat.data.reader import TeacherCache
from qat.data.sources import open_source
from qat.evaluate.divergence import cached_divergence, exact_divergence
from qat.evaluate.judge import split_batches
from qat.evaluate.text import packed_batches
from qat.generate.text import (
    distinct_frac,
    encode_prompt,
    repeated_frac,
    sample_continuations,
)
from qat.models.language_model import LanguageModel

BATCH = 32
NUM_PROMPTS, PROMPT_TOKENS = 8, 8
SAMPLE_SEED = 0

Numbers = dict[str, float | int | None]


@dataclass(frozen=True)
class Exam:
    """What every student of a recipe file is asked."""

    texts: dict[str, list[Batch]]
    """Batches of each text to judge on, without a teacher's word."""
    cache: TeacherCache
    """The file's own cache; KD is measured on its held-out split."""
    kd_sequences: int
    prompts: list[Tensor]
    """`(B, N)` each, N differing between them."""
    samples: int
    """Samples of each prompt."""
    sample_tokens: int


def make_exam(
    recipe: QualityRecipe, cache: TeacherCache, tokenizer: PreTrainedTokenizerBase
) -> Exam:
    """The exam of a recipe file.

    Raises:
        DataError, CacheError: a text cannot be read or holds nothing.
        ConfigError: a prompt holds no token.
    """
    texts = {
        name: _batches(recipe, text, cache, tokenizer) for name, text in recipe.texts.report.items()
    }
    return Exam(
        texts=texts,
        cache=cache,
        kd_sequences=recipe.kd_sequences,
        prompts=_prompts(recipe, next(iter(texts.values())), tokenizer),
        samples=recipe.generate_samples,
        sample_tokens=recipe.generate_tokens,
    )


def judge(student: LanguageModel, teacher: LanguageModel, exam: Exam) -> dict[str, Numbers]:
    """What the exam says of a student, by text; KD and samples are the same for all texts.

    Both should compute in float32, and quantized weights be formed.
    """
    batches = split_batches(exam.cache, "held_out", BATCH, exam.kd_sequences)
    common = {"kd_nats": cached_divergence(student, batches).kd_nats, **_samples(student, exam)}
    return {
        name: {**exact_divergence(student, teacher, text)._asdict(), **common}
        for name, text in exam.texts.items()
    }


def _samples(model: LanguageModel, exam: Exam) -> Numbers:
    """Repetition and variety of what the model writes, means over all samples."""
    with seeded(SAMPLE_SEED):
        written = [
            ids
            for prompts in exam.prompts
            for ids in sample_continuations(
                model,
                prompts.repeat_interleave(exam.samples, 0),
                max_new_tokens=exam.sample_tokens,
            )
        ]
    return {
        "repeated_frac": statistics.fmean(map(repeated_frac, written)),
        "distinct_frac": statistics.fmean(map(distinct_frac, written)),
        "sample_tokens": statistics.fmean(map(len, written)),
    }


def _batches(
    recipe: QualityRecipe, text: str, cache: TeacherCache, tokenizer: PreTrainedTokenizerBase
) -> list[Batch]:
    if text == HELD_OUT:
        return list(split_batches(cache, "held_out", BATCH, recipe.report_sequences))
    config, source = cache_config(recipe, recipe.cache), open_source(text)
    plain = source.format == "plain"
    return packed_batches(
        source.documents,
        tokenizer,
        length=recipe.sequence_length,
        max_sequences=recipe.report_sequences,
        batch_size=BATCH,
        thinking=config.thinking if tokenizer.chat_template else "none",
        targets="all" if plain else chosen_targets(config.targets, source.format, text),
    )


def _prompts(
    recipe: QualityRecipe, batches: list[Batch], tokenizer: PreTrainedTokenizerBase
) -> list[Tensor]:
    """The prompts named, those of equal length together; or beginnings of a text's sequences."""
    if not recipe.generate_prompts:
        return [batches[0].input_ids[:NUM_PROMPTS, :PROMPT_TOKENS]]
    by_length = defaultdict(list)
    for prompt in recipe.generate_prompts:
        ids = encode_prompt(tokenizer, prompt, raw=True)
        by_length[ids.shape[1]].append(ids)
    return [torch.cat(group) for _, group in sorted(by_length.items())]
