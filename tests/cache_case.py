"""A small cache that the tests of builder, reader and verb share."""

import random
from math import log, sqrt
from pathlib import Path

import torch
from tiny import VOCAB, tiny_model, tiny_tokenizer

from qat.data.build import build_cache
from qat.data.cache import MANIFEST, Manifest, Split, TeacherInfo
from qat.data.codec import M
from qat.data.config import CacheSettings
from qat.data.stream import blocks
from qat.models.language_model import LanguageModel
from qat.ranks import ALONE

WORDS = "the cat sat on mat and dog saw".split()


def texts(count: int = 45, seed: int = 3) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(3, 30))) for _ in range(count)]


def settings(**overrides: object) -> CacheSettings:
    values = {
        "data": "words",
        "format": "plain",
        "sequence_length": 16,
        "top_k": 5,
        "draws": 6,
        "held_out": 0.2,
        "shard_size": 10,
        **overrides,
    }
    return CacheSettings(**values)


def teacher(seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    model = tiny_model(seed=seed)
    model.lm_head.weight.data *= 20  # far from uniform
    return LanguageModel(model)


def info(**overrides: object) -> TeacherInfo:
    values = {
        "name": "tiny",
        "identity": "abc" * 10 + "de",
        "vocab_size": VOCAB,
        "max_positions": 128,
        "dtype": "float32",
        **overrides,
    }
    return TeacherInfo(**values)


TOKENIZER = tiny_tokenizer()


def build(out: Path, **overrides: object) -> Manifest:
    """Build the case's cache in `out`; overrides name parts of the build or settings."""
    parts = {
        "tokenizer": TOKENIZER,
        "teacher": teacher(),
        "info": info(),
        "documents": texts(),
        "batch_size": 4,
        "ranks": ALONE,
    }
    for name in parts:
        parts[name] = overrides.pop(name, parts[name])
    chosen = settings(**overrides)
    found = blocks(parts.pop("documents"), parts["tokenizer"], chosen)
    return build_cache(chosen, found=found, out=out, **parts)


def without_split(out: Path, split: Split) -> None:
    """Build the case's cache as an import or an earlier version may have left it."""
    manifest = build(out)
    shards = [shard for shard in manifest.shards if shard.split != split]
    (out / MANIFEST).write_bytes(manifest.model_copy(update={"shards": shards}).to_bytes())


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def max_error(value_range: float, k: int) -> float:
    """The largest error in nats of a decoded log-prob of a token with range `value_range`.

    `value_range` is the range as stored, up to 3.6 % above the largest distance. Log-probs more
    than 104 nats below the most likely one (probability 0 in float32) decode as 104 nats below it.
    """
    rounding = value_range / (2 * M**2)
    return value_range / M + sqrt(value_range * log(k)) / M + rounding
