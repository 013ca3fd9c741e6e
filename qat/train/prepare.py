"""What a student is taught by: a cache, and a float teacher beside it if the settings name one."""

from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.losses.config import check_targets, check_with_teacher
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher, model_identity
from qat.train.config import TrainConfig


def check_batch(config: TrainConfig, cache: TeacherCache) -> None:
    """Make sure that one forward repeats no sequence, unless nobody asked for so large a batch.

    Raises:
        ConfigError: the micro-batch has more sequences than the cache, and than the default has.
    """
    count, usual = cache.num_sequences("train"), TrainConfig.model_fields["batch_size"].default
    if config.batch_size > max(count, usual):
        raise ConfigError(
            f"batch_size={config.batch_size}, but {cache.directory} has {count} training "
            f"sequences, expected no more in one forward; use --batch-size {count} or less, with "
            "--grad-accum-steps for larger steps"
        )


def check_losses(config: TrainConfig, cache: TeacherCache) -> None:
    """Make sure that whoever teaches can tell what the losses ask.

    Raises:
        ConfigError: the cache does not hold it, or the teacher that runs beside is not asked so.
    """
    if config.teacher is not None:
        check_with_teacher(config.losses)
        return
    manifest = cache.manifest
    settings, has_tail = manifest.settings, manifest.has_tail
    check_targets(config.losses, settings.top_k, settings.draws, has_tail=has_tail)


def open_teacher(config: TrainConfig, cache: TeacherCache) -> LanguageModel | None:
    """The teacher in the compute dtype, without gradients; None where the cache alone teaches.

    Raises:
        CheckpointError: there is no such model.
        ConfigError: it is not the model whose words the cache holds and the student is judged by.
    """
    if config.teacher is None:
        return None
    trust, known = config.trust_remote_code, cache.manifest.teacher
    identity = model_identity(config.teacher, trust_remote_code=trust)
    if identity != known.identity:
        raise ConfigError(
            f"teacher={config.teacher} is model {identity}, but {config.cache_dir} holds the words "
            f"of {known.name}, {known.identity}; name that teacher, or build a cache of this one"
        )
    return load_teacher(
        config.teacher, device=config.device, dtype=config.dtype, trust_remote_code=trust
    )
