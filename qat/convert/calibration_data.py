"""Calibration sequences: drawn from a teacher cache, a text, a data set, or token ids."""

import heapq
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.convert.calibrate import TokenBatch
from qat.convert.config import ConvertConfig
from qat.data.cache import MANIFEST
from qat.data.documents import Document
from qat.data.packing import Packer, position_ids
from qat.data.reader import TeacherCache
from qat.data.sources import open_source
from qat.data.text import (
    check_vocabulary,
    encode,
    end_token,
    num_characters,
    render,
    special_tokens,
    tokenizer_hash,
)
from qat.errors import ConfigError
from qat.files import import_command
from qat.models.language_model import LanguageModel

BATCH = 16
"""Sequences of a calibration batch."""
CHARACTERS_A_TOKEN = 64
"""Characters drawn from a text for each calibration token, sixteen times the need of English."""
MOST_CHARACTERS = 2**28
"""Characters that are read at most of a longer text, or of a data set over a network."""


Calibration = str | Path | TeacherCache | Sequence[str] | Sequence[Tensor]
"""Calibration tokens: a cache or its directory, a text file, texts, or token ids."""


def calibration_batches(
    calibration: Calibration,
    config: ConvertConfig,
    student: LanguageModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[TokenBatch]:
    """Return calibration sequences from a cache's training split, a file, texts or token ids.

    At most `calibration_sequences` are drawn from all there are, by `calibration_seed`, because
    neighbours in a file are much alike. From texts, a surplus of documents is drawn first and then
    sequences from these. Token ids are `(S,)` or `(N, S)` each and need no `tokenizer`; rows of
    equal length form batches.

    Raises:
        CacheError, DataError: it cannot be read, or a cache is of another tokenizer.
        ConfigError: there is no whole sequence, sequences are too long for the model, or the
            calibration is text and there is no tokenizer.
    """
    is_path = isinstance(calibration, str | Path)
    if is_path and ((Path(calibration) / MANIFEST).exists() or import_command(Path(calibration))):
        calibration = TeacherCache.open(calibration)
    if isinstance(calibration, TeacherCache):
        tokens = [_cached_tokens(calibration, config, student, tokenizer)]
    elif is_path:
        documents = open_source(str(calibration), setting="calibration").documents
        tokens = [_packed_text(documents, config, student, tokenizer)]
    elif any(isinstance(each, Tensor) for each in calibration):
        tokens = _own_tokens(calibration, config, student)
    else:
        tokens = [_packed_text(calibration, config, student, tokenizer)]
    pieces = (zip(*(ids.split(BATCH) for ids in each), strict=True) for each in tokens)
    return [TokenBatch(*pair) for pairs in pieces for pair in pairs]


def _cached_tokens(
    cache: TeacherCache,
    config: ConvertConfig,
    student: LanguageModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> TokenBatch:
    known = cache.manifest.tokenizer if tokenizer is None else tokenizer_hash(tokenizer)
    cache.check_student(known, student.config.vocab_size, student.longest)
    if cache.num_sequences("train") == 0:
        raise ConfigError(
            f"calibration={cache.directory} has no training sequences, expected some; rebuild it "
            "from more documents or choose another"
        )
    batch = cache.batch(_draw(cache.num_sequences("train"), config))
    return TokenBatch(batch.input_ids, batch.position_ids)


def _own_tokens(
    rows: Sequence[Tensor], config: ConvertConfig, student: LanguageModel
) -> list[TokenBatch]:
    by_length: dict[int, list[Tensor]] = {}
    singles = [row for each in rows for row in torch.atleast_2d(each)]
    for number in _draw(len(singles), config):
        row = singles[number]
        by_length.setdefault(len(row), []).append(row.long().cpu())
    longest, limit = max(by_length, default=0), student.longest
    if longest < 2 or longest > limit:
        raise ConfigError(
            f"calibration holds rows of up to {longest} tokens, expected 2 to {limit}, which is "
            "what the model reads; cut them"
        )
    batches = map(torch.stack, by_length.values())
    return [TokenBatch(ids, torch.arange(ids.shape[1]).expand_as(ids)) for ids in batches]


def _packed_text(
    documents: Iterable[Document],
    config: ConvertConfig,
    student: LanguageModel,
    tokenizer: PreTrainedTokenizerBase | None,
) -> TokenBatch:
    if tokenizer is None:
        raise ConfigError(
            "calibration is text, but the model was not loaded from a directory with a tokenizer; "
            "give tokenizer=, or token ids"
        )
    limit = student.longest
    if config.calibration_length > limit:
        raise ConfigError(
            f"calibration_length={config.calibration_length}, but the model reads at most {limit} "
            "positions; lower --calibration-length"
        )
    packer = Packer(config.calibration_length, end_token(tokenizer), special_tokens(tokenizer))
    wished = config.calibration_sequences * config.calibration_length * CHARACTERS_A_TOKEN
    for document in _drawn_documents(documents, wished, config.calibration_seed):
        for ids, _ in encode(render(document, tokenizer, "none"), tokenizer):
            packer.push(ids)
    packer.finish()
    packed = packer.take(packer.num_full) if packer.num_full else None
    if packed is None or packed.num_tokens < config.calibration_length:
        raise ConfigError(
            f"calibration={config.calibration} holds less than one sequence of "
            f"{config.calibration_length} tokens; give more text or lower --calibration-length"
        )
    check_vocabulary(int(packed.tokens.max()), student.config.vocab_size)
    drawn = _draw(len(packed.tokens), config)
    starts = torch.from_numpy(packed.starts[drawn])
    return TokenBatch(torch.from_numpy(packed.tokens[drawn]).long(), position_ids(starts))


def _draw(count: int, config: ConvertConfig) -> np.ndarray:
    """Return `calibration_sequences` numbers below `count`, or all of them, in random order."""
    generator = np.random.default_rng(config.calibration_seed)
    return generator.permutation(count)[: config.calibration_sequences]


def _drawn_documents(documents: Iterable[Document], wished: int, seed: int) -> list[Document]:
    """Return documents in random order, just enough of them to hold `wished` characters.

    Each document is equally likely to come first. Documents that are not drawn are dropped as they
    are read.
    """
    generator = np.random.default_rng(seed)
    kept: list[tuple[float, int, int, Document]] = []
    held = read = 0
    for number, document in enumerate(documents):
        size = num_characters(document)
        heapq.heappush(kept, (-generator.random(), number, size, document))
        held, read = held + size, read + size
        while held - kept[0][2] >= wished:
            held -= heapq.heappop(kept)[2]
        if read >= MOST_CHARACTERS:
            break
    return [document for *_, document in sorted(kept, reverse=True)]
