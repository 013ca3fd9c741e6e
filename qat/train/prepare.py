"""Makes ready who learns and who teaches: a student whose parameters may move, and its teacher.

The teacher is a cache, and a float model beside it if the settings name one.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.losses.config import check_targets, check_with_teacher
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher, model_identity
from qat.nn.quant_linear import FrozenLutLinear
from qat.nn.step import quant_linears
from qat.nn.swap import add_adapters, to_latent
from qat.ranks import ALONE, Ranks
from qat.train.config import TrainConfig
from qat.train.optim import Optimizer, learnable, linears_in_scope


def make_trainable(
    model: PreTrainedModel,
    config: TrainConfig,
    *,
    ranks: Ranks = ALONE,
    state: dict[str, Tensor] | None = None,
) -> Optimizer:
    """Let the parameters that the settings name learn, all others stand; gives what moves them.

    Frozen codes in scope become latent weights where weights learn, and get an adapter where `lora`
    does; neither changes the function. With `shard_latents` each of the `ranks`, or of the devices
    of one process, holds some rows of the latent weights.

    Args:
        model: a packed student, in float32.
        config: the run's, with its dtype resolved.
        ranks: who takes each step together.
        state: the tensors of a checkpoint's trainer (`load_training_state`) to go on from; without
            them the generators of random numbers begin at the settings' seed.

    Raises:
        ConfigError: nothing in scope can learn what the settings name.
        CheckpointError: two levels of a codebook are too close for a latent weight.
    """
    names = linears_in_scope(model, config.scope, config.kinds)
    if "weights" in config.kinds:
        sharers = ranks if config.shard_latents else ALONE
        to_latent(model, names, sharers, is_spread=config.shard_latents)
    if "lora" in config.kinds:
        add_adapters(model, names, config.lora_rank, config.seed)
    by_kind = learnable(model, names, config.kinds)
    if state is None:
        torch.manual_seed(config.seed)
        return Optimizer(model, by_kind, config, ranks=ranks)
    for name, linear in quant_linears(model).items():
        codebook = state.get(f"parameter.{name}.codebook")
        if codebook is not None and isinstance(linear, FrozenLutLinear):
            linear.index_by_(codebook)
    return Optimizer(model, by_kind, config, state, ranks=ranks)


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
