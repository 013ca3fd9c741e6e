"""The checks that `qat run` makes before its first stage writes anything, and its forecast.

Each verb checks its own arguments again when it runs. Here the same checks run for all stages that
are still to come, the cheap ones first, so that a wrong argument costs no work and leaves no files.
"""

from collections.abc import Collection
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from qat.convert.config import ConvertConfig, check_asked
from qat.data.config import CacheConfig
from qat.errors import ConfigError, ExportError
from qat.evaluate.config import EvalConfig
from qat.export.config import TargetName
from qat.train.config import TrainConfig

if TYPE_CHECKING:
    from qat.convert.forecast import Forecast

SHARE_OF_PRODUCT = 0.3  # of a large product's speed, which a whole forward or backward reaches
STUDENT_BYTES = 20  # of a weight that learns: latent, gradient, two moments, formed weight


class Stages(NamedTuple):
    """The settings of every stage of `qat run` but export, as their verbs will read them."""

    cache: CacheConfig
    convert: ConvertConfig
    train: TrainConfig
    evaluate: EvalConfig


def check_teacher(teacher: str) -> None:
    """Refuse a teacher on a server, because students are judged against the model itself.

    Raises:
        ConfigError: it is an address.
    """
    if "://" in teacher:
        raise ConfigError(
            "--teacher is a server, but 'qat run' judges its students beside the teacher itself, "
            "expected a directory, a GGUF file or a hub id; or call 'qat cache', 'qat convert' and "
            "'qat train' yourself"
        )


def check_words(
    model: str, stages: Stages, *, calibration: str | None, done: Collection[str]
) -> None:
    """Refuse what costs least to see: a plan, a path, a loss, tasks without their library.

    Args:
        model: what becomes the student.
        stages: the settings of all stages.
        calibration: the text that is named in place of the cache.
        done: stages that have made what they make.

    Raises:
        QatError: the first thing that a stage to come would refuse.
    """
    from qat.cli.inputs import check_inputs
    from qat.data.sources import check_source
    from qat.losses.config import check_targets, check_with_teacher

    cache, convert, train, evaluate = stages
    if not cache.held_out:
        raise ConfigError(
            "held_out=0 keeps no document to judge the student by, expected a share of them; raise "
            "--held-out, or drop it"
        )
    if "convert" not in done:
        check_asked(convert)
        check_inputs(models=[convert.base], calibration=calibration)
    check_inputs(models=[model, cache.teacher])
    if "cache" not in done:
        check_source(cache.data, cache.format, cache.text_field)
    if "train" not in done:
        losses = train.losses
        _ = train.own_losses
        if not train.reads_cache:
            check_with_teacher(losses)
        elif "loss" in train.model_fields_set:
            check_targets(losses, cache.top_k, cache.draws)
        check_inputs(models=[train.teacher])
    if "eval" not in done and evaluate.tasks is not None:
        evaluate.check_named()


def check_machine(stages: Stages, done: Collection[str]) -> None:
    """Refuse a device that is not there, or a dtype that it cannot compute in.

    Raises:
        ConfigError: the first one that a stage to come would refuse.
    """
    from qat.backend.device import select
    from qat.train.start import check_dtype

    cache, convert, train, evaluate = stages
    for stage, config in (("cache", cache), ("eval", evaluate)):
        if stage not in done:
            select(config.device).dtype(config.dtype)
    if "convert" not in done:
        select(convert.device)
    if "train" not in done:
        check_dtype(train)


def check_models(model: str, stages: Stages, done: Collection[str]) -> None:
    """Refuse a teacher that cannot teach this student.

    Raises:
        CheckpointError: a model has no tokenizer or no readable configuration.
        ConfigError: the two have other words.
    """
    from qat.data.text import tokenizer_hash
    from qat.models.language_model import most_positions
    from qat.models.load import load_config, load_tokenizer

    cache = stages.cache
    trust = cache.trust_remote_code
    teacher = load_config(cache.teacher, trust_remote_code=trust).get_text_config()
    longest = most_positions(teacher)
    length = cache.sequence_length
    if "cache" not in done and length and longest and length > longest:
        raise ConfigError(
            f"sequence_length={length}, but {cache.teacher} reads at most {longest} positions; "
            "lower --sequence-length"
        )
    if cache.teacher == model or {"cache", "convert", "train"} <= {*done}:
        return
    hashes = [
        tokenizer_hash(load_tokenizer(each, trust_remote_code=trust))
        for each in (cache.teacher, model)
    ]
    if hashes[0] != hashes[1]:
        raise ConfigError(
            f"teacher={cache.teacher} has tokenizer {hashes[0]}, but {model} has {hashes[1]}, "
            "expected the same; choose a teacher of the same family, or drop --teacher"
        )


class TextFound(NamedTuple):
    """The number and the length of the training sequences that a text gives."""

    sequences: int  # training sequences, at most as many as were asked for
    sequence_length: int  # tokens in each


def check_text(config: CacheConfig) -> TextFound:
    """Refuse a text that is not there, holds nothing, or is too small to be judged by.

    The first blocks of rows are made of it, as the cache will be.

    Raises:
        DataError, ConfigError, CheckpointError: what `qat cache` would say.
    """
    from qat.data.sources import open_source
    from qat.data.stream import blocks
    from qat.models.load import load_tokenizer
    from qat.models.teacher_cache import with_length

    source = open_source(config.data, config.format, config.text_field)
    config, source = with_length(config, source)
    tokenizer = load_tokenizer(config.described_by, trust_remote_code=config.trust_remote_code)
    settings = config.settings(source.format)
    # one of each split at the most: a text that fills no whole block ends there
    begun = islice(blocks(source.rows, tokenizer, settings), 2)
    found = sum(len(block.packed.tokens) for block in begun if block.split == "train")
    wanted = settings.num_sequences or found
    return TextFound(found if found < config.shard_size else wanted, settings.sequence_length)


def foreseen(model: str, stages: Stages, targets: Collection[TargetName]) -> "Forecast":
    """Forecast the conversion, and refuse a plan or a target that does not fit.

    Raises:
        ConfigError, CheckpointError, ExportError: what `qat convert` or `qat export` would refuse.
    """
    from qat.convert.forecast import forecast
    from qat.export.targets import load_target, shipping_to

    found = forecast(model, stages.convert, shipping_to(targets))
    if "lora" in stages.train.kinds:
        for name in targets:
            if not load_target(name).HOLDS_ADAPTERS:
                raise ExportError(
                    f"{name} holds no adapters, but learn={stages.train.learn} adds some, expected "
                    "targets that do; use --for packed or dense, or another --learn"
                )
    return found


class RunForecast(NamedTuple):
    """The time and the memory that all stages together will take."""

    minutes: float
    memory_gib: float


def forecast_run(found: "Forecast", stages: Stages, text: TextFound) -> RunForecast:
    """An estimate for all stages: products are timed on the device, weights counted.

    Args:
        found: what the conversion will make and take.
        stages: the settings of all stages, `max_steps` and `batch_size` as they will be.
        text: what the cache will hold.
    """
    from qat.backend.base import GIB
    from qat.backend.device import select
    from qat.convert.forecast import product_flops
    from qat.models.cost import parameter_count

    cache, train = stages.cache, stages.train
    backend = select(train.device)
    speed = SHARE_OF_PRODUCT * product_flops(backend, backend.dtype(train.dtype))
    weights = parameter_count(found.model)
    held_out = text.sequences * cache.held_out / (1 - cache.held_out)
    judged = min(held_out, train.eval_sequences) * (2 + train.max_steps // train.eval_every)
    # a forward takes two operations a weight and token, a step three times that
    forwards = text.sequences + held_out + judged + 4 * held_out
    forwards += 3 * train.max_steps * train.sequences_per_step
    minutes = found.minutes + 2 * weights * text.sequence_length * forwards / speed / 60
    bytes_a_weight = STUDENT_BYTES if "weights" in train.kinds else 8
    return RunForecast(minutes, max(found.memory_gib, bytes_a_weight * weights / GIB))
