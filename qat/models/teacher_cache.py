"""A teacher's cache from settings: loads the teacher, runs it fast, and builds."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qat.backend.device import select
from qat.data.build import build_cache
from qat.data.cache import Manifest, TeacherInfo
from qat.data.config import CacheConfig
from qat.data.sources import Source
from qat.errors import ConfigError
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher, load_tokenizer, model_identity
from qat.models.regions import Regions
from qat.ranks import ALONE, Ranks


def build_teacher_cache(
    config: CacheConfig, source: Source, out: Path, *, ranks: Ranks = ALONE
) -> Manifest:
    """Build the cache that `config` describes from `source`; goes on where it stopped.

    Each of `ranks` runs the teacher over its share, on a device of its own.

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
