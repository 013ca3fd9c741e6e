"""A teacher's cache from settings: loads the teacher, runs it fast, and builds."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from qat.backend.device import select
from qat.data.build import build_cache
from qat.data.cache import Manifest, TeacherInfo
from qat.data.config import CacheConfig, DataFormat
from qat.data.sources import DataSource, Document
from qat.data.text import encode, render
from qat.errors import ConfigError, QatError
from qat.models.language_model import LanguageModel
from qat.models.load import load_config, load_teacher, load_tokenizer, model_identity
from qat.models.regions import Regions
from qat.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)

SAMPLE = 1000
"""Documents that the length of sequences follows."""
USUAL = 0.95
"""Share of them that is no longer."""
UNIT = 64
"""Lengths are multiples of it."""
LONGEST_CHAT, LONGEST_TEXT = 1024, 256
"""The longest sequences that nobody asked for: a chat is one thing, a text is cut anywhere."""


def with_length(
    config: CacheConfig, source: DataSource, ranks: Ranks = ALONE
) -> tuple[CacheConfig, DataSource]:
    """The settings with a `sequence_length`: theirs, or else what the data on the first rank needs.

    `SAMPLE` documents are read for it; the source that comes back still has them.

    Raises:
        CheckpointError: there is no such teacher, or it has no tokenizer.
    """
    if config.sequence_length is not None:
        return config, source
    documents, taken = iter(source.documents), []
    troubles: list[QatError] = []

    def read_again() -> Iterator[Document]:
        yield from taken
        if troubles:
            raise troubles[0]
        yield from documents

    def needed() -> int:
        if not ranks.is_first:
            return 0
        try:
            for document in islice(documents, SAMPLE):
                taken.append(document)
        except QatError as error:  # who has enough before the bad row never sees it
            troubles.append(error)
        return suited_length(config, source.format, taken)

    length = int(ranks.texts(str(ranks.together(needed)))[0])
    logger.info("sequence_length=%d follows the data; --sequence-length says otherwise", length)
    settled = config.model_copy(update={"sequence_length": length})
    return settled, source._replace(documents=read_again())


def suited_length(config: CacheConfig, data_format: DataFormat, documents: list[Document]) -> int:
    """Tokens that `USUAL` of the documents have at most, in units, within what is sensible.

    Raises:
        CheckpointError: there is no such teacher, or it has no tokenizer.
    """
    trust = config.trust_remote_code
    tokenizer = load_tokenizer(config.teacher, trust_remote_code=trust)
    model = load_config(config.teacher, trust_remote_code=trust).get_text_config()
    longest = LONGEST_TEXT if data_format == "plain" else LONGEST_CHAT
    longest = min(longest, getattr(model, "max_position_embeddings", longest))
    renderings = []
    with suppress(QatError):  # the build says what is wrong with a chat when it comes to it
        for document in documents:
            begun = document[: 16 * longest] if isinstance(document, str) else document
            renderings += render(begun, tokenizer, config.thinking)
    lengths = [len(tokens.ids) for tokens in encode(renderings, tokenizer)]
    usual = int(np.quantile(lengths, USUAL, method="higher")) if lengths else UNIT
    return min(longest, -(-usual // UNIT) * UNIT)


def build_teacher_cache(
    config: CacheConfig, source: DataSource, out: Path, *, ranks: Ranks = ALONE
) -> Manifest:
    """Build the cache that `config` describes from `source`; goes on where it stopped.

    Its `sequence_length` is settled (`with_length`). Each of `ranks` runs the teacher over its
    share, on a device of its own.

    Raises:
        ConfigError, DataError, CacheError, CheckpointError: see their messages.
    """
    if ranks.size > 1 and config.device_map is not None:
        raise ConfigError(
            f"device_map={config.device_map} spreads one teacher over the devices, but "
            f"{ranks.size} ranks run one each; drop --device-map or start a single process"
        )
    settings = config.settings(source.format)
    tokenizer, teacher = ranks.together(lambda: _open_teacher(config))
    if select(config.device).compiles() and config.device_map is None:
        Regions(teacher.model, is_compiled=True, recompute_every=None).install()
    return build_cache(
        settings,
        tokenizer=tokenizer,
        teacher=teacher,
        info=_describe_teacher(config, teacher),
        documents=source.documents,
        out=out,
        batch_size=config.batch_size,
        ranks=ranks,
    )


def _open_teacher(config: CacheConfig) -> tuple[PreTrainedTokenizerBase, LanguageModel]:
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


def _describe_teacher(config: CacheConfig, teacher: LanguageModel) -> TeacherInfo:
    return TeacherInfo(
        name=config.teacher,
        identity=model_identity(config.teacher, trust_remote_code=config.trust_remote_code),
        vocab_size=teacher.head.out_features,
        max_positions=getattr(teacher.config, "max_position_embeddings", None),
        dtype=str(teacher.dtype).removeprefix("torch."),
        remote_code=config.trust_remote_code,
    )
