"""Train a student from its settings: open and check everything, train, name the result."""

import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.backend import device as backends
from qat.backend.base import DTYPES, GIB
from qat.config import fingerprint
from qat.data.opening import open_cache
from qat.data.reader import TeacherCache
from qat.data.text import tokenizer_hash
from qat.errors import CheckpointError, ConfigError
from qat.files import held
from qat.hooks import extension
from qat.losses.config import check_targets, check_with_teacher
from qat.models.attention import kv_spec
from qat.models.decoding import ROLLOUTS, load_decoding
from qat.models.directory import atomic_directory, is_path
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_teacher, load_tokenizer, model_identity, state_identity
from qat.models.step_memory import step_bytes
from qat.models.stored_state import activation_counts, quantized_modules
from qat.nn.latent import add_adapters, to_latent
from qat.nn.quant_linear import quant_linears
from qat.nn.quant_weight import PackedWeight
from qat.process import available_gib
from qat.quant.spec import SUFFIX_OF, role_of
from qat.quant.weight import pack
from qat.ranks import ALONE, Ranks
from qat.train.config import TrainConfig
from qat.train.finite import not_finite
from qat.train.judge import CODES_PREFIX, Judge
from qat.train.learnable import learnable, weights_in_scope
from qat.train.loop import Trainer
from qat.train.metrics import write_summary
from qat.train.optim import Optimizer
from qat.train.resume import (
    Choice,
    best_of,
    cache_facts,
    check_identity,
    choose,
    choose_together,
    load_training_state,
    record_beginning,
    same_judged,
)
from qat.train.run import RunDirectory, git_commit, resolved, step_of, versions
from qat.train.saver import digest
from qat.train.step_config import MOST_WARM_UP, OptimConfig, StepConfig

logger = logging.getLogger(__name__)
StepSettings = TypeVar("StepSettings", bound=StepConfig)


@dataclass(frozen=True)
class TrainReport:
    """Result of a finished run."""

    final: Path
    """The packed checkpoint to use: the best one on the held-out split."""
    steps: int
    """Number of steps that the run took."""
    best: float
    """The held-out tail KL (or sampled cross-entropy) of `final`, nats per token."""
    best_step: int
    """The step of `final`; 0 if no step made the student better."""


class Loaded(NamedTuple):
    """A student's model in float32 on the chosen device (None before it is read), and tokenizer."""

    model: LanguageModel | None
    tokenizer: PreTrainedTokenizerBase


def train_student(
    config: TrainConfig,
    student: str,
    out: Path,
    *,
    resume: bool,
    begins_anew: bool = False,
    ranks: Ranks = ALONE,
    loaded: Loaded | None = None,
) -> TrainReport:
    """Open the run in `out` (see `opened`), train to its end, and name its best student."""
    with opened(
        config, student, out, resume=resume, begins_anew=begins_anew, ranks=ranks, loaded=loaded
    ) as trainer:
        trainer.train()
        return finished(trainer)


@contextmanager
def opened(
    config: TrainConfig,
    student: str,
    out: Path,
    *,
    resume: bool,
    begins_anew: bool = False,
    forced: Sequence[str] = (),
    ranks: Ranks = ALONE,
    loaded: Loaded | None = None,
) -> Iterator[Trainer]:
    """Open the run in `out` to train `student`, a packed checkpoint; lock it during the block.

    If a model is `loaded`, that is trained instead, in place, and `student` is only its name; a
    tokenizer alone spares reading the student's again. A resumed run reads its checkpoint all the
    same.

    With `resume` a stopped run continues from its latest checkpoint, bit for bit on a CPU. One that
    took steps but has no checkpoint is refused; with `begins_anew` it starts again. `forced` are
    codes of findings that the user has overridden, for `run.json`.

    Raises:
        ConfigError, CacheError, CheckpointError, TrainingError, Stopped: see their messages.
    """
    run = RunDirectory(out)
    if resume and "warmup_steps" not in config.model_fields_set:
        warmup_steps = ranks.sync_errors(run.original_warmup)
        if warmup_steps is not None:
            config = config.model_copy(update={"warmup_steps": warmup_steps})
    recipe, fingerprint = resolved(config, student), config.fingerprint()
    with ExitStack() as stack:
        lock = held(out) if ranks.is_first else nullcontext()
        ranks.sync_errors(lambda: stack.enter_context(lock))
        choice = choose_together(run, recipe, resume=resume, begins_anew=begins_anew, ranks=ranks)
        whole = ranks.sync_errors(
            lambda: _open(config, student, run, choice=choice, ranks=ranks, loaded=loaded)
        )
        ranks.check_same(
            cache_content=str(whole.identity["cache_content"]),
            settings=fingerprint,
            code=git_commit(),
            step=str(whole.choice.step),
            student_fingerprint=str(whole.identity["student_fingerprint"]),
            student=digest(whole.optimizer.replicated()) if ranks.size > 1 else "",
        )

        def record() -> None:
            if ranks.is_first:
                facts = _facts(student, fingerprint, whole, ranks)
                record_beginning(run, recipe, choice=whole.choice, facts=facts, forced=forced)

        ranks.sync_errors(record)
        yield _trainer(whole, run, ranks)


def reopened(run: RunDirectory, config: TrainConfig, student: str) -> Trainer:
    """Open a run as it began, for steps of which nothing is written; see `opened` for errors.

    Where the student that it began with is gone, its newest checkpoint is opened.
    """
    is_there = Path(student).exists() or not is_path(student)
    choice = Choice(None, [], False) if is_there else choose(run, begins_anew=True)
    whole = _open(config, student, run, choice=choice, ranks=ALONE, loaded=None)
    return _trainer(whole, run, ALONE)


def _trainer(whole: "_Opened", run: RunDirectory, ranks: Ranks) -> Trainer:
    trainer = Trainer(
        whole.optimizer,
        whole.judge,
        run=run,
        config=whole.config,
        teacher=whole.teacher,
        ranks=ranks,
    )
    trainer.step, trainer.best = whole.choice.step, whole.choice.best
    trainer.skipped = whole.choice.skipped
    # at step 0 the untrained student is evaluated again, as if for the first time
    if trainer.step > 0:
        trainer.codes.load(whole.remembered)
    if trainer.rollouts is not None:
        trainer.rollouts.load(whole.remembered)
    return trainer


def finished(trainer: Trainer) -> TrainReport:
    """Copy the best student of a finished run to a directory named after its properties."""
    out = trainer.run.path
    final = out / _final_name(trainer.student.model, trainer)
    best_step = 0
    if trainer.ranks.is_first:
        best = best_of(trainer.run)
        best_step = step_of(best)
        with atomic_directory(final, replace=True) as partial:
            ignore = shutil.ignore_patterns("trainer")
            shutil.copytree(best, partial, ignore=ignore, dirs_exist_ok=True)
        write_summary(out, final=final, best=trainer.best, best_step=best_step)
    return TrainReport(final, trainer.step, trainer.best, best_step)


class _Opened(NamedTuple):
    """Everything that a rank reads before anything is written."""

    optimizer: Optimizer
    judge: Judge
    teacher: LanguageModel | None
    config: TrainConfig
    """The settings as resolved on this rank and device."""
    choice: Choice
    identity: dict[str, Any]
    """Facts that must be the same when the run is resumed."""
    remembered: dict[str, Tensor]
    """State of `CodeWatch` and `Rollouts` in the checkpoint."""


def _open(
    config: TrainConfig,
    student: str,
    run: RunDirectory,
    *,
    choice: Choice,
    ranks: Ranks,
    loaded: Loaded | None,
) -> _Opened:
    divided = config.divided(ranks.size)
    buckets, order = config.bucket_lengths, config.order
    cache = training_cache(config.cache_dir, order, config.eval_sequences, buckets)
    check_losses(config.losses, cache, with_teacher=not config.reads_cache)
    check_rollouts(config.on_policy, config.rollout_tokens, cache, config.device)
    check_batch(config.batch_size, cache)
    if cache.num_sequences("train") == 0 or cache.num_sequences("held_out") == 0:
        raise ConfigError(
            f"{config.cache_dir} has {cache.num_sequences('train')} training and "
            f"{cache.num_sequences('held_out')} held-out sequences, expected some of both; "
            "rebuild it from more documents or with a higher --held-out"
        )
    source = str(choice.checkpoint or student)
    begins_with = loaded if choice.checkpoint is None else None
    tokenizer = begins_with.tokenizer if begins_with else load_tokenizer(source)
    now = _identity(student, loaded, choice)
    identity: dict[str, Any] = {
        "cache_content": fingerprint([shard.sha256 for shard in cache.manifest.shards]),
        "student_fingerprint": now,
        "tokenizer": tokenizer_hash(tokenizer),
        "sequences_per_step": divided.sequences_per_step * ranks.size,
    }
    begun = run.begun_as(choice.checkpoint)
    choice = choice._replace(begun=begun, grown=check_identity(run, begun, cache, identity))
    identity["student_fingerprint"] = begun.get("student_fingerprint", now)
    run.identity = {
        **versions(),
        **identity,
        "world_size": ranks.size,
        "config_fingerprint": config.fingerprint(),
    }
    judges = ranks.is_first or config.shard_latents
    judged = same_judged(cache, config.eval_sequences, run) if judges else None
    # latent weights are loaded in float32; the compute dtype is that of autocast and formed weights
    model = begins_with.model if begins_with else None
    model = model or load_model(source, device=config.device, dtype="fp32")
    if not tokenizer(config.sample_prompt)["input_ids"]:
        raise ConfigError(
            f"sample_prompt={config.sample_prompt!r} holds no token; expected something to "
            "continue; use --sample-prompt TEXT"
        )
    vocab_size = model.config.vocab_size
    model.num_words = cache.check_student(identity["tokenizer"], vocab_size, model.longest)
    config = check_dtype(divided)
    teacher = open_teacher(config, cache)
    state, choice = _state_of(choice)
    optimizer = make_trainable(
        model.model,
        config.part(OptimConfig),
        shards_latents=config.shard_latents,
        ranks=ranks,
        state=state,
    )
    remembered = _restore_generators(choice, state, device=config.device)
    is_usual = "warmup_steps" not in config.model_fields_set
    if choice.checkpoint is None and is_usual and config.warmup_steps < MOST_WARM_UP:
        logger.info(
            "warm-up: %d %s, a tenth of %d (--warmup-steps sets another)",
            config.warmup_steps,
            "step" if config.warmup_steps == 1 else "steps",
            config.max_steps,
        )
    if choice.step > config.max_steps:
        raise ConfigError(
            f"max_steps={config.max_steps}, but the run in {run.path} has taken {choice.step} "
            "already, expected as many or more; raise --max-steps"
        )
    numbers = {**model.model.state_dict(keep_vars=True), **optimizer.moving()}
    if which := not_finite(numbers):
        raise CheckpointError(
            f"{source}: {which}, expected numbers; make it anew, or train another student"
        )
    judge = Judge(model, tokenizer, cache, config, judged=judged)
    return _Opened(optimizer, judge, teacher, config, choice, identity, remembered)


def _identity(student: str, loaded: Loaded | None, choice: Choice) -> str | None:
    """Return what changes with the student; None where a resumed run's no longer exists."""
    if loaded is not None and loaded.model is not None:
        return state_identity(loaded.model.model)
    is_there = choice.checkpoint is None or Path(student).is_dir()
    return model_identity(student) if is_there else None


def _state_of(choice: Choice) -> tuple[dict[str, Tensor], Choice]:
    """Return the trainer's tensors in the checkpoint, if any, and the choice with its progress."""
    if choice.checkpoint is None:
        return {}, choice
    state, facts = load_training_state(choice.checkpoint)
    best = math.inf if choice.is_best_lost else facts["best"]
    return state, choice._replace(step=facts["step"], best=best)


def _restore_generators(
    choice: Choice, state: dict[str, Tensor], *, device: str
) -> dict[str, Tensor]:
    """Restore the random number generators of a resumed run; return the rest of its state."""
    if choice.checkpoint is None:
        return {}
    for name, generator in backends.select(device).generators().items():
        if f"rng.{name}" in state:  # a run that began on a CPU has no state of a GPU
            generator.set_state(state[f"rng.{name}"])
    logger.info("going on from %s", choice.checkpoint)
    kept = (CODES_PREFIX, ROLLOUTS)
    return {name: tensor for name, tensor in state.items() if name.startswith(kept)}


def make_trainable(
    model: PreTrainedModel,
    config: OptimConfig,
    *,
    shards_latents: bool = False,
    ranks: Ranks = ALONE,
    state: dict[str, Tensor] | None = None,
) -> Optimizer:
    """Make the parameters that the settings name learn and freeze all others; return the optimizer.

    Frozen codes in scope become latent weights if weights learn, and get an adapter if `lora`
    learns; neither changes the function. With `shards_latents` each of the `ranks`, or of the
    devices of one process, holds some rows of the latent weights.

    Args:
        model: a packed student, in float32.
        config: settings with the dtype resolved.
        shards_latents: whether latent weights are divided.
        ranks: the ranks that take each step together.
        state: the tensors of a checkpoint's trainer (`load_training_state`) to resume from; without
            them the random number generators start from the settings' seed.

    Raises:
        ConfigError: nothing in scope can learn what the settings name, or the host has no room for
            what is offloaded.
        CheckpointError: two levels of a codebook are too close for a latent weight.
    """
    names = weights_in_scope(model, config.scope, config.kinds)
    if "weights" in config.kinds:
        sharers = ranks if shards_latents else ALONE
        if config.offload != "none":
            dtype = backends.select(config.device).dtype(config.dtype)
            held = step_bytes(model, names, config, dtype, parts=sharers.size)
            _check_host(config.offload, held.pinned)
        to_latent(
            model,
            names,
            sharers,
            dtype=DTYPES[config.latent_dtype],
            is_spread=shards_latents,
            is_hosted=config.offload == "latents",
        )
    if "lora" in config.kinds:
        linears = [name for name in names if name in quant_linears(model)]
        add_adapters(model, linears, config.lora_rank, config.seed)
    by_kind = learnable(model, names, config.kinds)
    if not state:
        torch.manual_seed(config.seed)
        state = {}
    for name, module in quantized_modules(model).items():
        codebook = state.get(f"parameter.{name}.codebook")
        # Training may change the order of levels, and a checkpoint sorts them: indices are renamed
        # to the order in the optimizer's state (codewords are stored in their order).
        if codebook is not None and codebook.dim() == 1 and isinstance(module, PackedWeight):
            order = codebook.argsort(stable=True).to(module.packed.device, torch.uint8)
            module.packed.copy_(pack(order[module.indices().int()], module.spec.bits))
    return Optimizer(model, by_kind, config, state, ranks=ranks, is_spread=shards_latents)


def _check_host(offload: str, pinned_bytes: int) -> None:
    """Check that the host has enough memory to pin; otherwise the system would kill the process."""
    needed, free = pinned_bytes / GIB, available_gib()
    if free is not None and needed > free:
        raise ConfigError(
            f"offload={offload} pins {needed:.3g} GiB of host memory, but {free:.3g} GiB "
            "are free there, expected as much; use a larger host, or offload less"
        )


def check_dtype(config: StepSettings) -> StepSettings:
    """Return the settings with `dtype=auto` resolved for their device.

    Raises:
        ConfigError: the device is missing, lacks the dtype or does not support `form` or the
            optimizer.
    """
    backend = backends.select(config.device)
    backend.tracing.check_optimizer(config.optimizer, config.latent_dtype)
    if config.form == "layer" and backend.is_traced:
        raise ConfigError(
            f"form=layer, but device={config.device} compiles a step as a whole, expected a device "
            "that runs layer by layer; use --form whole, with --shard-latents for several devices"
        )
    return config.model_copy(update={"dtype": backend.dtype_name(config.dtype)})


def training_cache(
    directory: str, order: str, eval_sequences: int, bucket_lengths: str
) -> TeacherCache:
    """Open the cache of a run, in the order that the settings name.

    Raises:
        ConfigError, CacheError: see `qat.data.opening.open_cache`, or the buckets do not fit.
    """
    if order == "arrival":
        opener: Any = extension("qat.caches", "arrival")
        return opener(directory, eval_sequences)
    cache = open_cache(directory)
    if not bucket_lengths:
        return cache
    buckets: Any = extension("qat.caches", "buckets")
    return buckets(cache, bucket_lengths)


def check_batch(size: int, cache: TeacherCache) -> None:
    """Check that no forward repeats a sequence, unless the batch is no larger than the default.

    Raises:
        ConfigError: the micro-batch has more sequences than the cache, and than the default has.
    """
    count, usual = cache.num_sequences("train"), StepConfig.model_fields["batch_size"].default
    if size > max(count, usual):
        raise ConfigError(
            f"batch_size={size}, but {cache.directory} has {count} training "
            f"sequences, expected no more in one forward; use --batch-size {count} or less, with "
            "--grad-accum-steps for larger steps"
        )


def check_rollouts(share: float, tokens: int, cache: TeacherCache, device: str) -> None:
    """Check that prompt and generated tokens fit in a row, and that the device can generate.

    Raises:
        ConfigError: the extension that generates is not installed, there is no room for a prompt,
            or the device compiles for each shape.
    """
    if not share:
        return
    load_decoding()
    if tokens >= cache.sequence_length:
        raise ConfigError(
            f"rollout_tokens={tokens}, but the sequences of {cache.directory} have "
            f"{cache.sequence_length} positions, expected room for a prompt too; use "
            f"--rollout-tokens {cache.sequence_length - 1} or fewer"
        )
    if backends.select(device).is_traced:
        raise ConfigError(
            f"on_policy={share}, but a device that compiles for each shape ({device}) reads the "
            "whole row anew for every word of it; train on a GPU, or on what the teacher said with "
            "'qat sample' and 'qat cache'"
        )


def check_losses(losses: dict[str, float], cache: TeacherCache, *, with_teacher: bool) -> None:
    """Check that the teacher, cached or running, provides what the losses read."""
    if with_teacher:
        check_with_teacher(losses)
        return
    settings, has_tail = cache.manifest.settings, cache.manifest.has_tail
    check_targets(losses, settings.top_k, settings.draws, has_tail=has_tail)


def open_teacher(config: TrainConfig, cache: TeacherCache) -> LanguageModel | None:
    """Load the teacher in the compute dtype, without gradients; None if only the cache is used.

    Raises:
        CheckpointError: there is no such model.
        ConfigError: it is not the model whose words the cache holds and the student is judged by.
    """
    if config.teacher is None:
        return None
    known, trust = cache.manifest.teacher, config.trust_remote_code
    identity = model_identity(config.teacher, trust_remote_code=trust)
    if identity != known.identity:
        raise ConfigError(
            f"teacher={config.teacher} is model {identity}, but {config.cache_dir} holds the words "
            f"of {known.name}, {known.identity}; name that teacher, or build a cache of this one"
        )
    teacher = load_teacher(
        config.teacher, device=config.device, dtype=config.dtype, trust_remote_code=trust
    )
    teacher.num_words = cache.num_words
    return teacher


def _facts(student: str, fingerprint: str, whole: _Opened, ranks: Ranks) -> dict[str, object]:
    """Return the facts of `run.json` except versions and the history of the run."""
    config, cache = whole.config, whole.judge.cache
    backend = backends.select(config.device)
    manifest, judged = cache.manifest, whole.judge.judged
    return {
        "student": student,
        "cache": str(config.cache_dir),
        "cache_fingerprint": manifest.fingerprint,
        **cache_facts(cache),
        "judged": judged.marks if judged else [],
        "teacher": manifest.teacher.name,
        "trust_remote_code": config.trust_remote_code,
        "config_fingerprint": fingerprint,
        "world_size": ranks.size,
        "device": backend.name(),
        "dtype": backend.dtype_name(config.dtype),
        "learnable": whole.optimizer.num_learnable(),
        **whole.identity,
    }


def _final_name(model: nn.Module, trainer: Trainer) -> str:
    """Return `{quant}_{scope}_{loss}_{dtype}`: `q2a4_mlp_0.58_bf16`, `q2.4a3_e2e_0.0036_bf16`.

    `quant` holds the mean bits per index in the MLPs (after a v if those are vectors) and in the
    attention, and how inputs, keys and values are quantized, if they are: `q2a4_a8kv8`.
    """
    quant, config = "", trainer.config
    for letter, role in (("q", "mlp"), ("a", "attention")):
        linears = [m for name, m in quant_linears(model).items() if role_of(name) == role]
        if linears and letter == "q":
            letter = min(m.spec.letter for m in linears)  # v if all are vectors
        weights = sum(m.out_features * m.in_features for m in linears)
        bits = sum(m.spec.index_bits * m.out_features * m.in_features for m in linears)
        quant += f"{letter}{bits / weights:.2g}" if linears else ""
    quant += "".join(f"_{SUFFIX_OF[kind]}" for kind in activation_counts(model))
    kept = kv_spec(trainer.student.config)
    if kept is not None:
        quant += f"{'' if activation_counts(model) else '_'}kv{kept.bits}"
    return f"{quant or 'float'}_{config.scope}_{_two_digits(trainer.best)}_{config.dtype}"


def _two_digits(loss: float) -> str:
    """Format a loss with two decimals, or as many as show two digits of it: 0.58, 0.0036."""
    is_small = 0 < abs(loss) < 1
    return f"{loss:.{1 - math.floor(math.log10(abs(loss))) if is_small else 2}f}"
