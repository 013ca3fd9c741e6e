"""From a typed config to a finished run: load, check, train, name the result."""

import json
import logging
import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.backend import device as backends
from qat.config import fingerprint
from qat.data.reader import TeacherCache
from qat.data.remote import open_cache
from qat.data.text import tokenizer_hash
from qat.errors import CheckpointError, ConfigError
from qat.lock import held
from qat.logs import FACTS
from qat.losses.config import check_targets, check_with_teacher
from qat.models.directory import atomic_directory
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_teacher, load_tokenizer, model_identity, state_identity
from qat.models.source import CHECKPOINTS
from qat.nn.quant_linear import FrozenLutLinear
from qat.nn.step import quant_linears
from qat.nn.swap import add_adapters, to_latent
from qat.quant.spec import role_of
from qat.ranks import ALONE, Ranks
from qat.train.config import TrainConfig, divide
from qat.train.judge import CODES_PREFIX, Judge, Judged
from qat.train.loop import Trainer
from qat.train.metrics import write_summary
from qat.train.optim import Optimizer, learnable, linears_in_scope, lr_share
from qat.train.resume import (
    Choice,
    best_of,
    cache_facts,
    choose,
    holds_more,
    load_training_state,
    same_judged,
)
from qat.train.run import RunDirectory, git_commit, versions
from qat.train.saver import not_finite
from qat.train.step import check_dtype, digest

# Makes ready who learns and who teaches: a student whose parameters may move, and its teacher.
#
# The teacher is a cache, and a float model beside it if the settings name one.


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


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainReport:
    """What a finished run leaves."""

    final: Path
    """The packed checkpoint to use: the best one on the held-out split."""
    steps: int
    best: float
    """Its held-out tail KL (or sampled cross-entropy), nats per token."""


def train_student(
    config: TrainConfig,
    student: str,
    out: Path,
    *,
    resume: bool,
    begins_anew: bool = False,
    forced: Sequence[str] = (),
    ranks: Ranks = ALONE,
    loaded: "Loaded | None" = None,
) -> TrainReport:
    """Train `student` (a packed checkpoint) against a cache; everything lands in `out`.

    What is `loaded` is trained instead, in place, and `student` only says what it is called; a run
    that goes on reads its checkpoint all the same.

    With `resume` a run that was stopped goes on from its latest checkpoint, bit for bit on a CPU.
    One that took steps and has no checkpoint is refused; with `begins_anew` it does what that says.
    `forced` are codes of findings that the user chose to go on in spite of, for `run.json`.

    Raises:
        ConfigError, CacheError, CheckpointError, TrainingError, Stopped: see their messages.
    """
    run = RunDirectory(out)
    config = ranks.together(lambda: run.inherited(config)) if resume else config
    with ExitStack() as stack:
        lock = held(out) if ranks.is_first else nullcontext()
        ranks.together(lambda: stack.enter_context(lock))
        choice = _chosen(config, student, run, resume=resume, begins_anew=begins_anew, ranks=ranks)
        opened = ranks.together(
            lambda: _open(config, student, run, choice=choice, ranks=ranks, loaded=loaded)
        )
        _check_ranks(opened, config, ranks)
        ranks.together(
            lambda: _begin_files(run, opened, ranks, config=config, student=student, forced=forced)
        )
        trainer = _trainer(opened, run, ranks)
        trainer.train()
        final = out / _final_name(opened.model.model, config, trainer)
        if ranks.is_first:
            _copy_packed(best_of(run), final)
            write_summary(out, final=final, best=trainer.best)
    return TrainReport(final, trainer.step, trainer.best)


def _chosen(
    config: TrainConfig,
    student: str,
    run: RunDirectory,
    *,
    resume: bool,
    begins_anew: bool,
    ranks: Ranks,
) -> Choice:
    """Where the run goes on, as the first rank finds it: the others go on there too."""
    nowhere = Choice(None, [], is_best_lost=False)

    def choose_alone() -> Choice:
        is_begun = ranks.is_first and run.is_begun(config, student, resume=resume)
        return choose(run, begins_anew=begins_anew) if is_begun else nowhere

    choice = ranks.together(choose_alone)
    name = choice.checkpoint.name if choice.checkpoint else ""
    name, skipped, is_lost = json.loads(ranks.texts(json.dumps([name, *choice[1:]]))[0])
    return Choice(run.path / CHECKPOINTS / name if name else None, skipped, is_lost)


class Loaded(NamedTuple):
    """A quantized model that is in memory, in float32 and where the settings say."""

    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase


def _check_ranks(opened: "_Opened", config: TrainConfig, ranks: Ranks) -> None:
    """Make sure that all ranks were given the same."""
    ranks.check_same(
        cache_content=str(opened.identity["cache_content"]),
        settings=config.fingerprint(),
        code=git_commit(),
        step=str(opened.begin.step),
        student_fingerprint=str(opened.identity["student_fingerprint"]),
        student=digest(opened.begin.optimizer.replicated()) if ranks.size > 1 else "",
    )


def _begin_files(
    run: RunDirectory,
    opened: "_Opened",
    ranks: Ranks,
    *,
    config: TrainConfig,
    student: str,
    forced: Sequence[str],
) -> None:
    """Write what the run is, and cut what it wrote after the step that it goes on from."""
    if not ranks.is_first:
        return
    choice, step = opened.choice, opened.begin.step
    old = run.begun_as(choice.checkpoint)
    resumed = old.get("resumed", [])
    if choice.checkpoint is None:
        run.begin(config, student)
        run.set_aside()
    else:
        source = choice.checkpoint.name
        entry = {"step": step, "from": source, "world_size": ranks.size, "skipped": choice.skipped}
        changed = run.changes(config, student)
        changed |= {k: (old[k], v) for k, v in versions().items() if old.get(k, v) != v}
        _say_changes(run, config, changed, opened)
        for name, value in opened.more.items():
            changed[name] = (old[name], value)
        if changed:
            entry["changed"] = {name: list(values) for name, values in changed.items()}
            run.begin(config, student)
        resumed = [*resumed, entry]
    run.remove_leavings()
    if choice.is_best_lost and choice.checkpoint is not None:
        run.point("best", choice.checkpoint)
    if choice.checkpoint is not None and not run.has_pointer("latest"):
        # killed between the first checkpoint and its pointers
        if not run.has_pointer("best") and math.isfinite(opened.begin.best):
            run.point("best", choice.checkpoint)
        run.point("latest", choice.checkpoint)
    run.forget_after(step)
    facts = _facts(config, student, opened, ranks)
    forced = list(dict.fromkeys([*old.get("forced", []), *forced]))
    run.write_facts(**facts, **opened.identity, forced=forced, resumed=resumed)


def _say_changes(
    run: RunDirectory,
    config: TrainConfig,
    changed: dict[str, tuple[object, object]],
    opened: "_Opened",
) -> None:
    """Say with what else the run goes on, and what more steps do to the rates."""
    if opened.more and opened.judged is not None:
        logger.info(
            "%s goes on with %d training sequences instead of %d, judged by the same %d",
            run.path,
            opened.more["cache_sequences"]["train"],
            run.facts()["cache_sequences"]["train"],
            len(opened.judged.marks),
        )
    if not run.facts():
        logger.warning(
            "%s is gone: what it said is taken from %s, or found out anew",
            run.path / FACTS,
            opened.choice.checkpoint,
        )
    for name, (old, new) in changed.items():
        logger.info("%s goes on with %s=%s instead of %s", run.path, name, new, old)
    is_constant = config.schedule == "constant"
    if "max_steps" in changed and not is_constant and opened.begin.step < config.max_steps:
        step, before = opened.begin.step, run.begun_with()[0].max_steps
        shares = [
            lr_share(
                at,
                of,
                schedule=config.schedule,
                warmup_steps=config.warmup_steps,
                min_ratio=config.min_lr_ratio,
            )
            for at, of in ((max(0, step - 1), before), (step, config.max_steps))
        ]
        logger.info(
            "from here on the rates follow the %s schedule of %d steps: they were at %.2g of their "
            "peak and go on at %.2g",
            config.schedule,
            config.max_steps,
            *shares,
        )


class _Opened(NamedTuple):
    """What a rank has read before anything is written."""

    cache: TeacherCache
    choice: Choice
    """The checkpoint that the run goes on from."""
    identity: dict[str, Any]
    """What the run is made of: it goes on with nothing else."""
    more: dict[str, Any]
    """By name in `run.json`, what is new of a cache that has more sequences than it had."""
    judged: Judged | None
    """What the student is judged by, on the first rank."""
    tokenizer: PreTrainedTokenizerBase
    model: LanguageModel
    config: TrainConfig
    """The settings as they are on this rank and device."""
    teacher: LanguageModel | None
    begin: "_Begin"


def _open(
    config: TrainConfig,
    student: str,
    run: RunDirectory,
    *,
    choice: Choice,
    ranks: Ranks,
    loaded: Loaded | None,
) -> _Opened:
    """Read everything, and refuse what does not fit."""
    divided = divide(config, ranks.size)
    cache = open_cache(config.cache_dir)
    check_losses(config, cache)
    check_batch(divided, cache)
    if cache.num_sequences("train") == 0 or cache.num_sequences("held_out") == 0:
        raise ConfigError(
            f"{config.cache_dir} has {cache.num_sequences('train')} training and "
            f"{cache.num_sequences('held_out')} held-out sequences, expected some of both; "
            "rebuild it from more documents or with a higher --held-out"
        )
    source = str(choice.checkpoint or student)
    begins_with = loaded if choice.checkpoint is None else None
    tokenizer = begins_with.tokenizer if begins_with else load_tokenizer(source)
    # what changes when the student does; None for one that is gone, of a run that goes on
    now = state_identity(loaded.model.model) if loaded else None
    if loaded is None and (choice.checkpoint is None or Path(student).is_dir()):
        now = model_identity(student)
    identity: dict[str, Any] = {
        "cache_content": fingerprint([shard.sha256 for shard in cache.manifest.shards]),
        "student_fingerprint": now,
        "tokenizer": tokenizer_hash(tokenizer),
        "sequences_per_step": divided.sequences_per_step * ranks.size,
    }
    more: dict[str, Any] = {}
    if holds_more(cache, identity["cache_content"], run):
        more = {"cache_content": identity["cache_content"], **cache_facts(cache)}
        more.pop("cache_settings")
    unchanged = {**identity, **dict.fromkeys(more.keys() & identity.keys())}
    run.check_identity(choice.checkpoint, **unchanged)
    begun = run.begun_as(choice.checkpoint)
    identity["student_fingerprint"] = begun.get(
        "student_fingerprint", identity["student_fingerprint"]
    )
    run.identity = {
        **versions(),
        **identity,
        "world_size": ranks.size,
        "config_fingerprint": config.fingerprint(),
    }
    judged = same_judged(cache, config.eval_sequences, run) if ranks.is_first else None
    # masters are float32 always; the compute dtype is autocast's and the formed weights'
    model = (
        begins_with.model if begins_with else load_model(source, device=config.device, dtype="fp32")
    )
    if not tokenizer(config.sample_prompt)["input_ids"]:
        raise ConfigError(
            f"sample_prompt={config.sample_prompt!r} holds no token; expected something to "
            "continue; use --sample-prompt TEXT"
        )
    cache.check_student(identity["tokenizer"], model.config.vocab_size, model.longest)
    resolved = check_dtype(divided)
    teacher = open_teacher(resolved, cache)
    begin = _prepare(model, resolved, choice.checkpoint, ranks)
    if begin.step > config.max_steps:
        raise ConfigError(
            f"max_steps={config.max_steps}, but the run in {run.path} has taken {begin.step} "
            "already, expected as many or more; raise --max-steps"
        )
    if choice.is_best_lost:
        begin = begin._replace(best=math.inf)
    numbers = {**model.model.state_dict(keep_vars=True), **begin.optimizer.moving()}
    if which := not_finite(numbers):
        raise CheckpointError(
            f"{source}: {which}, expected numbers; make it anew, or train another student"
        )
    return _Opened(
        cache, choice, identity, more, judged, tokenizer, model, resolved, teacher, begin
    )


def _trainer(opened: _Opened, run: RunDirectory, ranks: Ranks) -> Trainer:
    """The loop over what was opened, from where the run stands."""
    begin = opened.begin
    judge = Judge(opened.model, opened.tokenizer, opened.cache, opened.config, judged=opened.judged)
    trainer = Trainer(
        opened.model,
        opened.cache,
        begin.optimizer,
        judge,
        run=run,
        config=opened.config,
        teacher=opened.teacher,
        ranks=ranks,
    )
    trainer.step, trainer.best = begin.step, begin.best
    trainer.skipped = opened.choice.skipped
    trainer.codes.load(begin.codes)
    return trainer


class _Begin(NamedTuple):
    """Where a run begins or goes on."""

    optimizer: Optimizer
    step: int
    best: float
    """The best score so far."""
    codes: dict[str, Tensor]
    """What a `CodeWatch` remembered."""


def _prepare(
    model: LanguageModel, config: TrainConfig, checkpoint: Path | None, ranks: Ranks
) -> _Begin:
    """Make the wished parameters learn, and find out where the run stands."""
    if checkpoint is None:
        optimizer = make_trainable(model.model, config, ranks=ranks)
        if config.has_short_warm_up():
            logger.info(
                "warm-up: %d %s, a tenth of %d (--warmup-steps sets another)",
                config.warmup_steps,
                "step" if config.warmup_steps == 1 else "steps",
                config.max_steps,
            )
        return _Begin(optimizer, 0, math.inf, {})
    tensors, facts = load_training_state(checkpoint)
    optimizer = make_trainable(model.model, config, ranks=ranks, state=tensors)
    generators = {n.removeprefix("rng."): t for n, t in tensors.items() if n.startswith("rng.")}
    backends.select(config.device).set_rng_state(generators)
    logger.info("going on from %s", checkpoint)
    codes = {name: tensor for name, tensor in tensors.items() if name.startswith(CODES_PREFIX)}
    return _Begin(optimizer, facts["step"], facts["best"], codes)


def _facts(config: TrainConfig, student: str, opened: _Opened, ranks: Ranks) -> dict[str, object]:
    """What `run.json` says beside the versions and the identity."""
    backend = backends.select(config.device)
    manifest = opened.cache.manifest
    return {
        "student": student,
        "cache": str(config.cache_dir),
        "cache_fingerprint": manifest.fingerprint,
        **cache_facts(opened.cache),
        "judged": opened.judged.marks if opened.judged else [],
        "teacher": manifest.teacher.name,
        "trust_remote_code": config.trust_remote_code,
        "config_fingerprint": config.fingerprint(),
        "world_size": ranks.size,
        "device": backend.name(),
        "dtype": backend.dtype_name(config.dtype),
        "learnable": opened.begin.optimizer.num_learnable(),
    }


def _final_name(model: nn.Module, config: TrainConfig, trainer: Trainer) -> str:
    """`{quant}_{scope}_{loss}_{dtype}`, such as `q2a4_mlp_0.58_bf16` or `q2.4a3_e2e_0.0036_bf16`.

    `quant` holds the mean bits of an index, in the MLPs and in the attention.
    """
    quant = ""
    for letter, role in (("q", "mlp"), ("a", "attention")):
        linears = [m for name, m in quant_linears(model).items() if role_of(name) == role]
        weights = sum(m.out_features * m.in_features for m in linears)
        bits = sum(m.spec.bits * m.out_features * m.in_features for m in linears)
        quant += f"{letter}{bits / weights:.2g}" if linears else ""
    return f"{quant or 'float'}_{config.scope}_{_two_digits(trainer.best)}_{trainer.config.dtype}"


def _two_digits(loss: float) -> str:
    """A loss with two decimals, or with so many that two digits of it are seen: 0.58, 0.0036."""
    is_small = 0 < abs(loss) < 1
    return f"{loss:.{1 - math.floor(math.log10(abs(loss))) if is_small else 2}f}"


def _copy_packed(checkpoint: Path, final: Path) -> None:
    """Copy a step's checkpoint without the trainer's state, whole or not at all."""
    with atomic_directory(final, replace=True) as partial:
        ignore = shutil.ignore_patterns("trainer")
        try:
            shutil.copytree(checkpoint, partial, ignore=ignore, dirs_exist_ok=True)
        except shutil.Error as error:  # which lists every file: one is enough to know why
            raise OSError(error.args[0][0][2]) from error
