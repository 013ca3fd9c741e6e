"""Checks before a run: findings ordered by severity.

`Preflight` computes findings from the settings and a `RunPlan`; `examine` collects that plan and
takes a few steps to measure time and memory; `refuse` stops a run that has errors.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from qat.backend import device as backends
from qat.data.reader import TeacherCache
from qat.data.remote import open_cache
from qat.data.text import tokenizer_hash
from qat.errors import ConfigError, QatError
from qat.extensions.decode.rollout import Rollouts, check_rollouts
from qat.models.attention import sparse_attention
from qat.models.devices import device_called
from qat.models.directory import resolve
from qat.models.flops import token_flops
from qat.models.language_model import LanguageModel, most_positions
from qat.models.load import load_config, load_model, load_tokenizer
from qat.models.opening import auto_class
from qat.models.step_memory import step_bytes
from qat.models.stored_state import packed_state_dict
from qat.nn.step import form_weights
from qat.nn.swap import linear_names
from qat.process import GIB, is_out_of_memory
from qat.ranks import ALONE, Ranks, SimulatedRanks
from qat.train.config import OptimConfig, RolloutConfig, StepConfig, TrainConfig, rate_of
from qat.train.judge import CodeWatch, Judge
from qat.train.learnable import linears_in_scope
from qat.train.start import check_batch, check_dtype, check_losses, make_trainable, open_teacher
from qat.train.step import EAGER_STEPS, OwnRows, StepResult, TrainingStep, rank_indices

# A prediction of a run's time, memory and disk space from two measured steps. All objects used are
# discarded: a run that follows has the same results, bit for bit.

WARM_STEPS, MEASURED_STEPS = EAGER_STEPS + 1, 2
"""Steps before the measured ones, of which the last captures the graph, and measured steps."""


class RunPrediction(NamedTuple):
    """Predictions for a run, from two steps and two partial evaluations on one device."""

    step_s: float
    """Seconds per optimizer step, without evaluations and saving."""
    tokens_per_s: float
    """Positions per second, including padding."""
    eval_s: float
    """Seconds of one evaluation with all its sequences."""
    peak_gib: float | None
    """Peak memory of steps, evaluations and a checkpoint's tensors; None where it is not
    counted."""
    pinned_gib: float
    """Host memory that offloaded tensors pin."""
    checkpoint_bytes: int
    """Bytes of one checkpoint with the trainer's state."""
    final_bytes: int
    """Bytes of the packed model alone."""
    attention: str
    """`tile`, our kernel for packed documents, or `sdpa`; empty on devices that compile each
    shape."""
    fallback: str | None
    """Reason why layers that should be compiled run uncompiled; None if there is none."""


def predict(
    config: TrainConfig, student: str, cache: TeacherCache, *, world: int = 1
) -> RunPrediction:
    """Take a few steps like the run's on one device, free their memory, return predictions.

    `config` has its dtype resolved and is that of one of `world` ranks; its share of the work is
    measured without communication.

    Raises:
        RuntimeError: device memory ran out (see `qat.process.is_out_of_memory`).
        ConfigError, CacheError, CheckpointError: see `train_student`.
    """
    backend = backends.select(config.device)
    try:
        with backends.seeded(config.seed):
            shares = config.shard_latents and world > 1
            ranks = SimulatedRanks(0, world, backend.device) if shares else ALONE
            return _measure(config, student, cache, ranks)
    finally:
        backend.free_memory()
        backend.reset_peak_memory()


def _measure(config: TrainConfig, student: str, cache: TeacherCache, ranks: Ranks) -> RunPrediction:
    backend = backends.select(config.device)
    dtype = backend.dtype(config.dtype)
    model = load_model(student, device=config.device, dtype="fp32")
    optimizer = make_trainable(
        model.model, config.part(OptimConfig), shards_latents=config.shard_latents, ranks=ranks
    )
    tokenizer, settings = load_tokenizer(student), config.part(StepConfig)
    rollouts = own = None
    if config.on_policy:
        own = OwnRows(config.own_rows, config.own_losses, config.reads_cache)
        every = config.part(RolloutConfig).model_copy(update={"rollout_every": 1})  # costs most
        rollouts = Rollouts(model, cache, every, settings, end=tokenizer.eos_token_id)
    teacher = open_teacher(
        config.teacher,
        cache,
        where=config.cache_dir,
        device=config.device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    take_step = TrainingStep(model, optimizer, settings, teacher, own=own)

    def taken(step: int) -> StepResult:
        order = rank_indices(settings, step, cache.num_sequences("train"), ALONE)
        batches = [cache.batch(part) for part in order]
        return take_step(batches if rollouts is None else rollouts.into(batches, step), step)

    try:
        backend.reset_peak_memory()
        for step in range(WARM_STEPS):
            result = taken(step)
        begun = backend.mark(result.grad_norm)
        for step in range(WARM_STEPS, WARM_STEPS + MEASURED_STEPS):
            result = taken(step)
        ended = backend.mark(result.grad_norm)
        step_s = backend.seconds_between(begun, ended) / MEASURED_STEPS
        judge = Judge(
            model,
            tokenizer,
            cache,
            num_sequences=config.eval_sequences,
            batch_size=config.batch_size,
            prompt=config.sample_prompt,
        )
        eval_s = _evaluation_s(judge, dtype)
        packed = packed_state_dict(model.model)
        peak_gib = backend.memory_use().peak_gib
    finally:
        take_step.close()
    state_bytes = optimizer.state_bytes() + _bytes(CodeWatch(model.model).state())
    beside = Path(resolve(student))  # a local student's tokenizer and configuration are there
    files = [path for path in beside.iterdir() if path.is_file()] if beside.is_dir() else []
    around = sum(path.stat().st_size for path in files if path.suffix != ".safetensors")
    learning = linears_in_scope(model.model, config.scope, config.kinds)
    return RunPrediction(
        step_s=step_s,
        tokens_per_s=result.positions / ranks.size / step_s,
        eval_s=eval_s,
        peak_gib=peak_gib,
        pinned_gib=step_bytes(model.model, learning, settings, dtype).pinned / GIB,
        checkpoint_bytes=_bytes(packed) + state_bytes + around,
        final_bytes=_bytes(packed) + around,
        attention="" if backend.is_traced else model.attention(cache.sequence_length, dtype),
        fallback=take_step.fallback,
    )


def _evaluation_s(judge: Judge, dtype: torch.dtype) -> float:
    """Return the seconds of a whole evaluation, extrapolated from one and two batches."""
    backend = backends.on(judge.student.device)
    total = min(judge.num_sequences, judge.cache.num_sequences("held_out"))
    size = min(judge.batch_size, total)
    seconds = []
    for batches in (1, 1, 2):  # the first one compiles
        judge.num_sequences = min(total, batches * size)
        begun = backend.mark()
        form_weights(judge.student.model, dtype)
        judge.verdict(dtype)
        seconds.append(backend.seconds_between(begun, backend.mark()))
    _, one, two = seconds
    return one + max(0.0, two - one) * (-(-total // size) - 1)


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


Severity = Literal["error", "warning", "note"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note")

LONG_STEPS, LONG_H = 5000, 1.0
"""Steps and hours from which a run counts as long."""
LOST_ERROR_H, LOST_WARNING_H = 1.0, 1 / 3
"""Hours of work lost between two checkpoints that are an error, and a warning."""
LEAST_HELD_OUT = 64
"""Held-out sequences below which noise decides which checkpoint is best."""
LEAST_LENGTH, LEAST_TOKENS, LEAST_WIDTH = 32, 2048, 256
"""Lengths, tokens per step and widths below these suggest the settings of a test."""
MOST_EVALUATION, MOST_WARM_UP, MOST_PASSES = 0.1, 0.2, 20
"""Warning thresholds: share of time in evaluations, share of steps in warm-up, and passes."""
FAR_TOO_MANY_PASSES = 1000
"""Passes over the data long after which nothing more is learned from it."""
DISK_WARNING, MEMORY_WARNING = 0.8, 0.92
"""Shares of the free disk space and of device memory above which there is a warning."""
FAR_RATE, MOST_RATE = 10.0, 1.0
"""Largest factor between a rate and its default, and the largest rate: a step at 1 moves a tensor
by its own size, because rates are relative.
"""
LESS_MEMORY = "lower --batch-size and raise --grad-accum-steps, or add --gradient-checkpointing"
USUAL_SHARE = 1 / 3
"""Usual share of a device's peak, for a first estimate of a run's time."""
REFUSED = {"cache", "eval_split"}
"""Codes of errors that --force does not override."""


class RunFinding(NamedTuple):
    """A problem or fact about a run, with its severity and remedy."""

    code: str
    severity: Severity
    found: str
    reason: str
    mend: str

    def line(self) -> str:
        """Return the finding as one line."""
        return f"{self.code}: {self.found}, {self.reason}; {self.mend}"


class RunPlan(NamedTuple):
    """Facts about a run, collected before it starts."""

    device: str
    """The device's name; `cpu` for any CPU."""
    has_bf16: bool
    memory_gib: float | None
    """Memory that the device can provide; None where it is not counted."""
    free_bytes: int
    """Bytes free on the disk of the run's directory."""
    train_sequences: int
    held_out_sequences: int
    sequence_length: int
    width: int
    """Width of the student's hidden states."""
    world: int = 1
    """Number of devices that train."""
    prediction: RunPrediction | None = None
    has_run_out: bool = False
    """True if memory ran out while predicting."""
    problems: tuple[str, ...] = ()
    """Messages of errors that would stop the run before its first step."""
    attention: tuple[RunFinding, ...] = ()
    """Findings of the extension that computes attention; empty where attention is dense."""


def is_long(max_steps: int, hours: float | None) -> bool:
    """Return whether a run is long enough for the whole preflight; `hours` may be unknown."""
    return max_steps >= LONG_STEPS or (hours or 0.0) >= LONG_H


@dataclass(frozen=True)
class Preflight:
    """The checks of one run."""

    config: TrainConfig
    """The run's settings, with the dtype resolved."""
    plan: RunPlan

    def hours(self) -> float | None:
        """Return the predicted hours of the whole run; saves run in the background."""
        prediction = self.plan.prediction
        if prediction is None:
            return None
        steps_h = self.config.max_steps * prediction.step_s / 3600
        return steps_h + self._evaluation_h(prediction)

    def disk_bytes(self) -> int | None:
        """Return the most bytes that a run's checkpoints are predicted to take at any time.

        They are those kept, milestones, the best one, the one being written, and the final model.
        """
        config, prediction = self.config, self.plan.prediction
        if prediction is None:
            return None
        saves = -(-config.max_steps // config.save_every) if config.save_every else 1
        milestones = config.max_steps // config.milestone_every if config.milestone_every else 0
        held = min(saves, config.keep) + milestones + 2
        return held * prediction.checkpoint_bytes + prediction.final_bytes

    def suggested_save_every(self) -> int:
        """Return the steps of about ten minutes if steps were timed, else a hundredth of all."""
        steps, prediction = self.config.max_steps, self.plan.prediction
        if prediction is None:
            return max(1, steps // 100)
        return max(1, min(steps, round(600 / prediction.step_s)))

    def findings(self) -> list[RunFinding]:
        """Return all findings, errors first."""
        checks = (
            self._precision,
            self._saving,
            self._data,
            self._rates,
            self._shape,
            self._measured,
        )
        why = "the run would stop before its first step"
        problems = (problem.rpartition("; ") for problem in self.plan.problems)
        found = [RunFinding("cache", "error", what, why, mend) for what, _, mend in problems]
        found += [*self.plan.attention, *(finding for check in checks for finding in check())]
        return sorted(found, key=lambda finding: ORDER.index(finding.severity))

    def _is_long(self) -> bool:
        return is_long(self.config.max_steps, self.hours())

    def _evaluation_h(self, prediction: RunPrediction) -> float:
        """Return the hours of all evaluations: of the untrained student, periodic, and last."""
        steps, every = self.config.max_steps, self.config.eval_every
        return (1 + -(-steps // every)) * prediction.eval_s / 3600

    def _precision(self) -> Iterator[RunFinding]:
        config, plan = self.config, self.plan
        found = f"dtype={config.dtype}"
        if config.dtype in {"fp32", "fp16"} and plan.has_bf16:
            reason = {
                "fp32": f"and {plan.device} computes many times faster in bf16",
                "fp16": f"and {plan.device} has bf16, whose gradients do not overflow",
            }[config.dtype]
            is_dear = config.dtype == "fp32" and self._is_long()
            yield RunFinding(
                "dtype", "error" if is_dear else "warning", found, reason, "use --dtype bf16"
            )
        if config.dtype == "tf32":
            reason = "exact to 10 bits; bf16 is faster and what students are trained in"
            yield RunFinding("dtype", "note", found, reason, "nothing, or --dtype bf16")

    def _saving(self) -> Iterator[RunFinding]:
        config, plan = self.config, self.plan
        prediction = plan.prediction
        if config.save_every == 0:
            if self._is_long():
                yield RunFinding(
                    "save_every_off",
                    "error",
                    f"save_every=0 in a run of {config.max_steps:,} steps",
                    "a stop would cost all work since the last best evaluation",
                    f"use --save-every {self.suggested_save_every()}",
                )
            return
        if prediction is None:
            return
        lost_h = min(config.save_every, config.max_steps) * prediction.step_s / 3600
        if lost_h > LOST_WARNING_H:
            yield RunFinding(
                "save_sparse",
                "error" if lost_h > LOST_ERROR_H else "warning",
                f"save_every={config.save_every}, one checkpoint in {lost_h * 60:.0f} minutes",
                "a stop costs as much work",
                f"use --save-every {self.suggested_save_every()}",
            )

    def _data(self) -> Iterator[RunFinding]:
        config, plan = self.config, self.plan
        judged = min(plan.held_out_sequences, config.eval_sequences)
        if judged < LEAST_HELD_OUT:
            is_here = plan.held_out_sequences >= LEAST_HELD_OUT
            yield RunFinding(
                "eval_split",
                "warning" if judged else "error",
                f"{judged} held-out sequences judge the student",
                f"fewer than {LEAST_HELD_OUT} choose the best checkpoint by noise",
                "raise --eval-sequences"
                if is_here
                else "rebuild the cache with a higher --held-out",
            )
        if not plan.train_sequences:
            return
        passes = config.max_steps * config.sequences_per_step * plan.world / plan.train_sequences
        is_many = passes > MOST_PASSES
        is_error = passes > FAR_TOO_MANY_PASSES and self._is_long()
        yield RunFinding(
            "epochs",
            "error" if is_error else "warning" if is_many else "note",
            f"{passes:,.1f} passes over {plan.train_sequences:,} sequences",
            "a student begins to learn them by heart" if is_many else "how often each one is seen",
            "build a larger cache, or lower --max-steps" if is_many else "nothing",
        )

    def _rates(self) -> Iterator[RunFinding]:
        config = self.config
        for kind in config.kinds:
            name, rate = rate_of(kind), config.rates[kind]
            usual = OptimConfig.model_fields[name].default
            if usual / FAR_RATE <= rate <= usual * FAR_RATE:
                continue
            is_wild = rate > MOST_RATE
            yield RunFinding(
                "lr",
                "error" if is_wild else "warning",
                f"{name}={rate:g}",
                "a step would move a tensor by more than its own size"
                if is_wild
                else f"far from the {usual:g} that serves models of any size",
                f"use --{name.replace('_', '-')} {usual:g}, or compare both in a short run",
            )
        if config.warmup_steps > MOST_WARM_UP * config.max_steps:
            yield RunFinding(
                "warmup",
                "warning",
                f"warmup_steps={config.warmup_steps} of {config.max_steps}",
                f"more than {MOST_WARM_UP:.0%} of the run below its learning rates",
                f"use --warmup-steps {int(MOST_WARM_UP * config.max_steps) // 2}",
            )

    def _shape(self) -> Iterator[RunFinding]:
        config, plan = self.config, self.plan
        tokens = plan.sequence_length * config.sequences_per_step * plan.world
        if not self._is_long():
            return
        small = {
            f"sequences of {plan.sequence_length} tokens": plan.sequence_length < LEAST_LENGTH,
            f"{tokens:,} tokens a step": tokens < LEAST_TOKENS,
            f"a student of width {plan.width}": plan.width < LEAST_WIDTH,
        }
        found = [fact for fact, is_small in small.items() if is_small]
        if found:
            # one of them may be intended; several, on a paid device, are probably left from a test
            is_left_in = len(found) > 1 and plan.device != "cpu"
            yield RunFinding(
                "toy",
                "error" if is_left_in else "warning",
                ", ".join(found),
                "a long run with the settings of a test",
                f"expected sequences of {LEAST_LENGTH} and steps of {LEAST_TOKENS:,} tokens at "
                f"least and a width of {LEAST_WIDTH}: raise --batch-size or --grad-accum-steps, or "
                "lower --max-steps",
            )

    def _measured(self) -> Iterator[RunFinding]:
        """Yield findings from the measured steps."""
        config, plan = self.config, self.plan
        prediction, hours = plan.prediction, self.hours()
        if plan.has_run_out:
            found = f"device memory ran out in the first steps on {plan.device}"
            reason = "the run would end there"
            yield RunFinding("memory", "error", found, reason, self._less_memory())
        if prediction is None or hours is None:
            return
        yield from self._memory(prediction)
        yield from self._disk()
        share = self._evaluation_h(prediction) / max(hours, 1e-9)
        if share > MOST_EVALUATION:
            mend = "raise --eval-every or lower --eval-sequences"
            found = f"evaluations take {share:.0%} of the time"
            yield RunFinding("eval_cost", "warning", found, f"over {MOST_EVALUATION:.0%}", mend)
        if prediction.attention == "sdpa" and plan.device != "cpu":
            found, mend = "attention=sdpa", "nothing, or a cache of sequences up to 128 tokens"
            reason = "the kernel for packed documents does not take this model, length or dtype"
            yield RunFinding("attention", "warning", found, reason, mend)
        if prediction.fallback is not None:
            found = f"layers run uncompiled ({prediction.fallback})"
            mend = "mend what the compiler names, or say --compile off"
            yield RunFinding(
                "compile", "warning", found, "steps are slower than they could be", mend
            )
        speed = prediction.tokens_per_s * plan.world
        found = f"{hours:.3g} hours at {prediction.step_s:.3g} s a step, {speed:,.0f} tokens/s"
        cost = hours * config.price_per_hour * plan.world
        reason = (
            f"{cost:,.2f} at {config.price_per_hour:g} an hour and device" if cost else "no price"
        )
        yield RunFinding(
            "time", "note", found, reason, "nothing" if cost else "say --price-per-hour"
        )

    def _less_memory(self) -> str:
        config, plan = self.config, self.plan
        ways = [LESS_MEMORY]
        if config.form != "layer":
            ways.append("--form layer")
        if (
            config.latent_dtype == "bf16"
            and config.optimizer == "adamw"
            and config.offload != "latents"
        ):
            ways.append("--offload latents")
        if plan.world > 1 and not config.shard_latents and "weights" in config.kinds:
            ways.append("--shard-latents")
        return ", or ".join(ways)

    def _memory(self, prediction: RunPrediction) -> Iterator[RunFinding]:
        config, plan = self.config, self.plan
        if config.offload != "none":
            found = f"offload={config.offload} pins {prediction.pinned_gib:.3g} GiB of host memory"
            reason = "a save takes a copy of it beside for as long as it writes"
            yield RunFinding("host_memory", "note", found, reason, "nothing")
        if prediction.peak_gib is None or plan.memory_gib is None:
            return
        share, mend = prediction.peak_gib / plan.memory_gib, self._less_memory()
        found = f"{prediction.peak_gib:.3g} GiB of {plan.memory_gib:.3g} GiB"
        if share <= MEMORY_WARNING:
            yield RunFinding("memory", "note", found, f"{share:.0%} of what there is", "nothing")
            return
        reason = "fragments and evaluations may need the rest"
        yield RunFinding("memory", "error" if share > 1 else "warning", found, reason, mend)

    def _disk(self) -> Iterator[RunFinding]:
        need, free = self.disk_bytes() or 0, self.plan.free_bytes
        found = f"{need / GIB:.3g} GiB of checkpoints, {free / GIB:.3g} GiB free"
        if need <= DISK_WARNING * free:
            yield RunFinding("disk", "note", found, "enough room", "nothing")
            return
        is_short = need > free
        yield RunFinding(
            "disk",
            "error" if is_short else "warning",
            found,
            "the disk would be full before the run ends"
            if is_short
            else "little is left for others",
            "lower --keep, raise --milestone-every, or choose an --out with more room",
        )


class Checked(NamedTuple):
    """Findings and predictions of the preflight."""

    findings: list[RunFinding]
    prediction: RunPrediction | None
    is_long: bool
    hours: float | None = None
    """Predicted hours of the whole run; None if no steps were taken."""
    disk_bytes: int | None = None
    """Predicted most bytes of its checkpoints."""

    def errors(self) -> list[RunFinding]:
        """Return the findings that stop a run."""
        return [finding for finding in self.findings if finding.severity == "error"]


def examine(
    config: TrainConfig, student: str, out: Path, *, world: int = 1, measures: bool = False
) -> Checked:
    """Check a run on `world` devices before it starts; nothing is written.

    If the run is long, by its steps or by an estimate from their FLOPs, a few steps are taken to
    predict time and memory; with `measures` they are taken for any run.

    Raises:
        ConfigError, CacheError, CheckpointError: cache, student or device are missing.
    """
    resolved = check_dtype(config.divided(world))
    cache = open_cache(config.cache_dir)
    tokenizer, model = load_tokenizer(student), load_config(student).get_text_config()
    problems = _messages(
        lambda: check_losses(resolved.losses, cache, with_teacher=not resolved.reads_cache),
        lambda: check_rollouts(resolved.on_policy, resolved.rollout_tokens, cache, resolved.device),
        lambda: check_batch(resolved.batch_size, cache),
        lambda: cache.check_student(
            tokenizer_hash(tokenizer), model.vocab_size, most_positions(model)
        ),
    )
    backend = backends.select(config.device)
    where = out.resolve()
    there = next(each for each in (where, *where.parents) if each.is_dir())
    plan = RunPlan(
        device=backend.name(),
        has_bf16=backend.has_bf16(),
        memory_gib=backend.memory_gib(),
        free_bytes=shutil.disk_usage(there).free,
        train_sequences=cache.num_sequences("train"),
        held_out_sequences=cache.num_sequences("held_out"),
        sequence_length=cache.sequence_length,
        width=model.hidden_size,
        world=world,
        problems=tuple(problems),
        attention=_attention_findings(resolved.learn, student, cache.sequence_length, backend),
    )
    guess = None if plan.problems else guessed_hours(resolved.part(OptimConfig), student, cache)
    measures = measures or is_long(resolved.max_steps, guess)
    if measures and not plan.problems and plan.train_sequences and plan.held_out_sequences:
        try:
            plan = plan._replace(prediction=predict(resolved, student, cache, world=world))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            plan = plan._replace(has_run_out=True)
        if plan.has_run_out:
            backend.free_memory()  # not above: the error references what had been loaded
    checks = Preflight(resolved, plan)
    hours = checks.hours()
    return Checked(
        checks.findings(),
        plan.prediction,
        is_long(resolved.max_steps, hours if plan.prediction else guess),
        hours,
        checks.disk_bytes(),
    )


def codes_forced(findings: Sequence[RunFinding], *, force: bool) -> list[str]:
    """Return the codes of errors that --force overrides.

    Errors that `train_student` raises itself are left to it.

    Raises:
        ConfigError: there are errors, and `force` is false.
    """
    errors = [each for each in findings if each.severity == "error" and each.code not in REFUSED]
    if not force:
        refuse(errors)
    return sorted({finding.code for finding in errors})


def refuse(findings: Sequence[RunFinding]) -> None:
    """Stop if there are errors.

    Raises:
        ConfigError: names the first error, and the number of others.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = f" ({len(errors) - 1} more in the table)" if len(errors) > 1 else ""
        raise ConfigError(f"preflight: {errors[0].line()}, or add --force{more}")


def guessed_hours(config: OptimConfig, student: str, cache: TeacherCache) -> float | None:
    """Return the hours of all steps at a third of the device's peak; None for an unknown device."""
    device = device_called(backends.select(config.device).name())
    peak = None if device is None else device.peak_flops(config.dtype)
    if peak is None:
        return None
    with torch.device("meta"):
        settings = load_config(student)
        model = LanguageModel(auto_class(settings).from_config(settings))
    S, K = cache.sequence_length, cache.manifest.settings.top_k
    flops = token_flops(model, linear_names(model.model), config, S=S, K=K).total
    return config.max_steps * config.sequences_per_step * S * flops / (peak * USUAL_SHARE) / 3600


def _messages(*checks: Callable[[], None]) -> Iterator[str]:
    """Yield the errors that `train_student` would raise."""
    for check in checks:
        try:
            check()
        except QatError as error:
            yield str(error)


def _attention_findings(
    learn: str, student: str, length: int, backend: backends.Backend
) -> tuple[RunFinding, ...]:
    """Return what the extension with the student's attention finds; empty for dense attention.

    Raises:
        ConfigError: it cannot compute that attention.
    """
    settings = load_config(student)
    sparse = sparse_attention(settings)
    return () if sparse is None else tuple(sparse.findings(learn, settings, length, backend))
