"""The parts of building a teacher cache that need the model: the teacher, and the row length."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from qat.backend.device import select
from qat.config import fingerprint
from qat.data.build import RemoteTeacher
from qat.data.cache import SERVED_AS, TeacherInfo
from qat.data.config import CacheConfig, DataFormat
from qat.data.documents import Document
from qat.data.sources import DataSource, Sourced
from qat.data.text import encode, render
from qat.errors import ConfigError, QatError
from qat.hooks import extension
from qat.models.language_model import LanguageModel, most_positions
from qat.models.load import load_config, load_teacher, load_tokenizer, model_identity
from qat.models.regions import Regions
from qat.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)

SAMPLE = 1000
"""Documents that determine the sequence length."""
USUAL = 0.95
"""Fraction of these documents that the sequence length must cover."""
UNIT = 64
"""Sequence lengths are multiples of this."""
LONGEST_CHAT, LONGEST_TEXT = 1024, 256
"""The longest default sequences: a chat is one unit, a plain text can be cut anywhere."""


def with_length(
    config: CacheConfig, source: DataSource, ranks: Ranks = ALONE
) -> tuple[CacheConfig, DataSource]:
    """Return the settings with a `sequence_length`: the given one, or one that suits the data.

    It is determined on the first rank from `SAMPLE` documents; the returned source still has them.

    Raises:
        CheckpointError: there is no such teacher, or it has no tokenizer.
    """
    if config.sequence_length is not None:
        return config, source
    rows, taken = iter(source.rows), []
    failures: list[QatError] = []

    def read_again() -> Iterator[Sourced]:
        yield from taken
        if failures:
            raise failures[0]
        yield from rows

    def needed() -> int:
        if not ranks.is_first:
            return 0
        try:
            for row in islice(rows, SAMPLE):
                taken.append(row)
        except QatError as error:  # raised only if the reader reaches the bad row
            failures.append(error)
        return suited_length(config, source.format, [row.document for row in taken])

    length = int(ranks.texts(str(ranks.sync_errors(needed)))[0])
    logger.info("sequence_length=%d follows the data; --sequence-length says otherwise", length)
    settled = config.model_copy(update={"sequence_length": length})
    return settled, source._replace(rows=read_again())


def suited_length(config: CacheConfig, data_format: DataFormat, documents: list[Document]) -> int:
    """Return the length that covers `USUAL` of the documents, in units, within sensible bounds.

    Raises:
        CheckpointError: there is no such teacher, or it has no tokenizer.
    """
    trust = config.trust_remote_code
    tokenizer = load_tokenizer(config.described_by, trust_remote_code=trust)
    model = load_config(config.described_by, trust_remote_code=trust).get_text_config()
    longest = LONGEST_TEXT if data_format == "plain" else LONGEST_CHAT
    longest = min(longest, most_positions(model) or longest)
    renderings = []
    with suppress(QatError):  # the build reports a bad chat when it reaches it
        for document in documents:
            begun = document[: 16 * longest] if isinstance(document, str) else document
            renderings += render(begun, tokenizer, config.thinking)
    lengths = [len(tokens.ids) for tokens in encode(renderings, tokenizer)]
    usual = int(np.quantile(lengths, USUAL, method="higher")) if lengths else UNIT
    return min(longest, -(-usual // UNIT) * UNIT)


class CacheTeacher(NamedTuple):
    """A teacher in the form that `build_cache` needs."""

    tokenizer: PreTrainedTokenizerBase
    teacher: LanguageModel | RemoteTeacher
    info: TeacherInfo


def cache_teacher(config: CacheConfig, ranks: Ranks = ALONE) -> CacheTeacher:
    """Open the teacher of `config`, one per rank and compiled, or check that a server has it.

    Raises:
        ConfigError: one teacher is to be spread over the devices of several ranks, or a server does
            not provide what the cache needs.
        CacheError: a server does not respond.
        CheckpointError: there is no such teacher, or it has no tokenizer.
    """
    if config.is_served:
        return ranks.sync_errors(partial(_served, config))
    if ranks.size > 1 and config.device_map not in (None, "disk"):
        raise ConfigError(
            f"device_map={config.device_map} spreads one teacher over the devices, but "
            f"{ranks.size} ranks run one each; drop --device-map or start a single process"
        )

    def opened() -> tuple[PreTrainedTokenizerBase, LanguageModel]:
        trust = config.trust_remote_code
        tokenizer = load_tokenizer(config.teacher, trust_remote_code=trust)
        teacher = load_teacher(
            config.teacher,
            device=config.device,
            dtype=config.dtype,
            device_map=config.device_map,
            trust_remote_code=trust,
        )
        return tokenizer, teacher

    tokenizer, teacher = ranks.sync_errors(opened)
    if select(config.device).compiles and config.device_map is None:
        Regions(teacher.model, is_compiled=True, recompute_every=None).install()
    info = TeacherInfo(
        name=config.teacher,
        identity=model_identity(config.teacher, trust_remote_code=config.trust_remote_code),
        vocab_size=teacher.head.out_features,
        max_positions=most_positions(teacher.config),
        dtype=str(teacher.dtype).removeprefix("torch."),
        remote_code=config.trust_remote_code,
    )
    return CacheTeacher(tokenizer, teacher, info)


def _served(config: CacheConfig) -> CacheTeacher:
    """Return the teacher behind a server; only its tokenizer and configuration are here."""
    trust, model = config.trust_remote_code, str(config.teacher_model)
    tokenizer = load_tokenizer(config.described_by, trust_remote_code=trust)
    described = load_config(config.described_by, trust_remote_code=trust).get_text_config()
    served = extension("qat.teachers", "server")
    teacher = served.ServedTeacher(config.teacher, model, described.vocab_size, config.batch_size)
    if config.top_k <= described.vocab_size:  # a larger top_k is reported by the build
        teacher.check(tokenizer, config.sequence_length or 0, config.top_k)
    info = TeacherInfo(
        name=model,
        identity=f"{SERVED_AS}{fingerprint([model, described.vocab_size])}",
        vocab_size=described.vocab_size,
        max_positions=most_positions(described),
        dtype="unknown",
        remote_code=trust,
    )
    return CacheTeacher(tokenizer, teacher, info)
