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

from qat.backend import device as backends
from qat.data.reader import TeacherCache
from qat.data.text import tokenizer_hash
from qat.errors import ConfigError, QatError
from qat.models.attention import sparse_attention
from qat.models.devices import device_called
from qat.models.directory import resolve
from qat.models.flops import token_flops
from qat.models.language_model import LanguageModel, most_positions
from qat.models.load import load_config, load_model, load_tokenizer
from qat.models.opening import auto_class
from qat.models.regions import attention_kernel
from qat.models.step_memory import step_bytes
from qat.models.stored_state import packed_state_dict
from qat.nn.step import form_weights
from qat.nn.swap import linear_names
from qat.process import GIB, is_out_of_memory
from qat.ranks import ALONE, Ranks, SimulatedRanks
from qat.train.config import TrainConfig
from qat.train.judge import Judge
from qat.train.learnable import weights_in_scope
from qat.train.loop import Trainer
from qat.train.run import RunDirectory
from qat.train.start import (
    Loaded,
    check_batch,
    check_dtype,
    check_losses,
    check_rollouts,
    make_trainable,
    open_teacher,
    training_cache,
)
from qat.train.step import EAGER_STEPS, StepResult
from qat.train.step_config import OptimConfig, rate_of

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
    """`tile` or `blocks`, our kernels for packed documents, or `sdpa`; empty on devices that
    compile each shape."""
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
    judge = Judge(model, load_tokenizer(student), cache, config)
    trainer = Trainer(
        optimizer,
        judge,
        run=RunDirectory(Path()),  # nothing is written there
        config=config.model_copy(update={"rollout_every": 1}),  # a step with a rollout costs most
        teacher=open_teacher(config, cache),
    )

    def taken(step: int) -> StepResult:
        return trainer.take_step(trainer.step_batches(step), step)

    try:
        backend.reset_peak_memory()
        for step in range(WARM_STEPS):
            result = taken(step)
        begun = backend.mark(result.grad_norm)
        for step in range(WARM_STEPS, WARM_STEPS + MEASURED_STEPS):
            result = taken(step)
        ended = backend.mark(result.grad_norm)
        step_s = backend.seconds_between(begun, ended) / MEASURED_STEPS
        eval_s = _evaluation_s(judge, dtype)
        final_bytes = sum(tensor.nbytes for tensor in packed_state_dict(model.model).values())
        trainer.codes.flipped_frac()  # keeps the codes, which a checkpoint holds as well
        codes_bytes = sum(tensor.nbytes for tensor in trainer.codes.state().values())
        peak_gib = backend.memory_use().peak_gib
    finally:
        trainer.take_step.close()
    is_compiled = bool(trainer.take_step.compile_facts()["compiled"])
    length = cache.sequence_length
    attention = attention_kernel(model, length, dtype, is_compiled=is_compiled)
    beside = Path(resolve(student))  # a local student's tokenizer and configuration are there
    files = [path for path in beside.iterdir() if path.is_file()] if beside.is_dir() else []
    final_bytes += sum(path.stat().st_size for path in files if path.suffix != ".safetensors")
    learning = weights_in_scope(model.model, config.scope, config.kinds)
    return RunPrediction(
        step_s=step_s,
        tokens_per_s=result.positions / ranks.size / step_s,
        eval_s=eval_s,
        peak_gib=peak_gib,
        pinned_gib=step_bytes(model.model, learning, config, dtype).pinned / GIB,
        checkpoint_bytes=final_bytes + optimizer.state_bytes() + codes_bytes,
        final_bytes=final_bytes,
        attention="" if backend.is_traced else attention,
        fallback=trainer.take_step.fallback,
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


Severity = Literal["error", "warning", "note"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note")

LONG_STEPS, LONG_H = 5000, 1.0
"""Steps and hours from which a run counts as long."""
LESS_MEMORY = "lower --batch-size and raise --grad-accum-steps, or add --gradient-checkpointing"
REFUSED = {"cache", "eval_split"}
"""Codes of errors that --force does not override: `train_student` raises them itself."""


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
    """The input of the checks: a run's settings and plan, and numbers computed from them."""

    config: TrainConfig
    """The run's settings, with the dtype resolved."""
    plan: RunPlan

    @property
    def measured(self) -> RunPrediction:
        """The prediction; the properties below need it, and `is_long` does not."""
        assert self.plan.prediction is not None
        return self.plan.prediction

    @property
    def evaluation_h(self) -> float:
        """Hours of all evaluations: of the untrained student, periodic, and last."""
        evaluations = -(-self.config.max_steps // self.config.eval_every)
        evaluations += not self.config.skip_first_eval
        return evaluations * self.measured.eval_s / 3600

    @property
    def hours(self) -> float:
        """Hours of the whole run; saves run in the background."""
        return self.config.max_steps * self.measured.step_s / 3600 + self.evaluation_h

    @property
    def disk_bytes(self) -> int:
        """The most bytes that the run's checkpoints take at any time.

        They are those kept, milestones, the best one, the one being written, and the final model.
        """
        config = self.config
        saves = -(-config.max_steps // config.save_every) if config.save_every else 1
        milestones = config.max_steps // config.milestone_every if config.milestone_every else 0
        held = min(saves, config.keep) + milestones + 2
        return held * self.measured.checkpoint_bytes + self.measured.final_bytes

    @property
    def is_long(self) -> bool:
        """True if the run is too expensive for the settings of a test."""
        return is_long(self.config.max_steps, self.hours if self.plan.prediction else None)

    def findings(self) -> list[RunFinding]:
        """Run all `CHECKS`; return their findings, errors first."""
        why = "the run would stop before its first step"
        problems = (problem.rpartition("; ") for problem in self.plan.problems)
        found = [RunFinding("cache", "error", what, why, mend) for what, _, mend in problems]
        found += self.plan.attention
        for code, look, needs_prediction in CHECKS:
            if self.plan.prediction is not None or not needs_prediction:
                found += [RunFinding(code, *each) for each in look(self)]
        return sorted(found, key=lambda finding: ORDER.index(finding.severity))


# Each check yields severity, what was found, the reason why it matters, and the remedy.
Findings = Iterator[tuple[Severity, str, str, str]]


def _dtype(run: Preflight) -> Findings:
    dtype, device = run.config.dtype, run.plan.device
    if dtype == "tf32":
        reason = "exact to 10 bits; bf16 is faster and what students are trained in"
        yield "note", "dtype=tf32", reason, "nothing, or --dtype bf16"
    reasons = {
        "fp32": f"and {device} computes many times faster in bf16",
        "fp16": f"and {device} has bf16, whose gradients do not overflow",
    }
    if run.plan.has_bf16 and dtype in reasons:
        severity: Severity = "error" if dtype == "fp32" and run.is_long else "warning"
        yield severity, f"dtype={dtype}", reasons[dtype], "use --dtype bf16"


def _saving(run: Preflight) -> str:
    """Return a remedy: steps of about ten minutes if they were timed, else a hundredth of all."""
    steps = run.config.max_steps
    every = min(steps, round(600 / run.measured.step_s)) if run.plan.prediction else steps // 100
    return f"use --save-every {max(1, every)}"


def _save_every_off(run: Preflight) -> Findings:
    if run.config.save_every == 0 and run.is_long:
        found = f"save_every=0 in a run of {run.config.max_steps:,} steps"
        reason = "a stop would cost all work since the last best evaluation"
        yield "error", found, reason, _saving(run)


def _save_sparse(run: Preflight) -> Findings:
    every = run.config.save_every
    lost_h = min(every, run.config.max_steps) * run.measured.step_s / 3600
    if lost_h > 1 / 3:
        found = f"save_every={every}, one checkpoint in {lost_h * 60:.0f} minutes"
        severity: Severity = "error" if lost_h > 1 else "warning"
        yield severity, found, "a stop costs as much work", _saving(run)


def _eval_split(run: Preflight) -> Findings:
    there, least = run.plan.held_out_sequences, 64
    judged = min(there, run.config.eval_sequences)
    if judged < least:
        severity: Severity = "warning" if judged else "error"
        found = f"{judged} held-out sequences judge the student"
        reason = f"fewer than {least} choose the best checkpoint by noise"
        rebuild = "rebuild the cache with a higher --held-out"
        yield severity, found, reason, "raise --eval-sequences" if there >= least else rebuild


def _epochs(run: Preflight) -> Findings:
    config, there = run.config, run.plan.train_sequences
    if not there:
        return
    passes = config.max_steps * config.sequences_per_step * run.plan.world / there
    found = f"{passes:,.1f} passes over {there:,} sequences"
    if passes <= 20:
        yield "note", found, "how often each one is seen", "nothing"
        return
    # after a thousand passes nothing more has been learned for long
    severity: Severity = "error" if passes > 1000 and run.is_long else "warning"
    reason = "a student begins to learn them by heart"
    yield severity, found, reason, "build a larger cache, or lower --max-steps"


def _lr(run: Preflight) -> Findings:
    for kind in run.config.kinds:
        name, rate = rate_of(kind), run.config.rates[kind]
        usual = OptimConfig.model_fields[name].default
        if usual / 10 <= rate <= usual * 10:
            continue
        found = f"{name}={rate:g}"
        mend = f"use --{name.replace('_', '-')} {usual:g}, or compare both in a short run"
        if rate > 1:  # rates are relative to a tensor's size
            reason = "a step would move a tensor by more than its own size"
            yield "error", found, reason, mend
        else:
            reason = f"far from the {usual:g} that serves models of any size"
            yield "warning", found, reason, mend


def _warmup(run: Preflight) -> Findings:
    steps, share = run.config.warmup_steps, 0.2
    most = share * run.config.max_steps
    if steps > most:
        found = f"warmup_steps={steps} of {run.config.max_steps}"
        reason = f"more than {share:.0%} of the run below its learning rates"
        yield "warning", found, reason, f"use --warmup-steps {int(most) // 2}"


def _toy(run: Preflight) -> Findings:
    plan, length, tokens, width = run.plan, 32, 2048, 256  # less suggests the settings of a test
    step = plan.sequence_length * run.config.sequences_per_step * plan.world
    small = {
        f"sequences of {plan.sequence_length} tokens": plan.sequence_length < length,
        f"{step:,} tokens a step": step < tokens,
        f"a student of width {plan.width}": plan.width < width,
    }
    found = [fact for fact, is_small in small.items() if is_small]
    if found and run.is_long:
        # one of them may be intended; several, on a paid device, are probably left from a test
        severity: Severity = "error" if len(found) > 1 and plan.device != "cpu" else "warning"
        mend = (
            f"expected sequences of {length} and steps of {tokens:,} tokens at least and a width "
            f"of {width}: raise --batch-size or --grad-accum-steps, or lower --max-steps"
        )
        yield severity, ", ".join(found), "a long run with the settings of a test", mend


def _less_memory(run: Preflight) -> str:
    config = run.config
    is_plain_bf16 = (config.optimizer, config.latent_dtype) == ("adamw", "bf16")
    is_shared = run.plan.world > 1 and "weights" in config.kinds
    ways = {
        LESS_MEMORY: True,
        "--form layer": config.form != "layer",
        "--offload latents": is_plain_bf16 and config.offload != "latents",
        "--shard-latents": is_shared and not config.shard_latents,
    }
    return ", or ".join(way for way, is_left in ways.items() if is_left)


def _memory_ran_out(run: Preflight) -> Findings:
    if run.plan.has_run_out:
        found = f"device memory ran out in the first steps on {run.plan.device}"
        yield "error", found, "the run would end there", _less_memory(run)


def _host_memory(run: Preflight) -> Findings:
    if run.config.offload != "none":
        found = (
            f"offload={run.config.offload} pins {run.measured.pinned_gib:.3g} GiB of host memory"
        )
        yield "note", found, "a save takes a copy of it beside for as long as it writes", "nothing"


def _memory(run: Preflight) -> Findings:
    peak, there = run.measured.peak_gib, run.plan.memory_gib
    if peak is None or there is None:
        return
    share, found = peak / there, f"{peak:.3g} GiB of {there:.3g} GiB"
    if share <= 0.92:
        yield "note", found, f"{share:.0%} of what there is", "nothing"
        return
    severity: Severity = "error" if share > 1 else "warning"
    reason = "fragments and evaluations may need the rest"
    yield severity, found, reason, _less_memory(run)


def _disk(run: Preflight) -> Findings:
    need, free = run.disk_bytes, run.plan.free_bytes
    found = f"{need / GIB:.3g} GiB of checkpoints, {free / GIB:.3g} GiB free"
    mend = "lower --keep, raise --milestone-every, or choose an --out with more room"
    if need > free:
        yield "error", found, "the disk would be full before the run ends", mend
    elif need > 0.8 * free:
        yield "warning", found, "little is left for others", mend
    else:
        yield "note", found, "enough room", "nothing"


def _eval_cost(run: Preflight) -> Findings:
    share, most = run.evaluation_h / max(run.hours, 1e-9), 0.1
    if share > most:
        found = f"evaluations take {share:.0%} of the time"
        yield "warning", found, f"over {most:.0%}", "raise --eval-every or lower --eval-sequences"


def _attention(run: Preflight) -> Findings:
    if run.measured.attention == "sdpa" and run.plan.device != "cpu":
        reason = "the kernels for packed documents do not take this model, length or dtype"
        mend = "nothing, or a cache of sequences up to 128 tokens"
        yield "warning", "attention=sdpa", reason, mend


def _compile(run: Preflight) -> Findings:
    if run.measured.fallback is not None:
        found = f"layers run uncompiled ({run.measured.fallback})"
        mend = "mend what the compiler names, or say --compile off"
        yield "warning", found, "steps are slower than they could be", mend


def _time(run: Preflight) -> Findings:
    measured, world, price = run.measured, run.plan.world, run.config.price_per_hour
    speed = f"{measured.step_s:.3g} s a step, {measured.tokens_per_s * world:,.0f} tokens/s"
    found = f"{run.hours:.3g} hours at {speed}"
    if cost := run.hours * price * world:
        yield "note", found, f"{cost:,.2f} at {price:g} an hour and device", "nothing"
    else:
        yield "note", found, "no price", "say --price-per-hour"


class Check(NamedTuple):
    """One row of `CHECKS`."""

    code: str
    look: Callable[[Preflight], Findings]
    needs_prediction: bool = False


CHECKS = (
    Check("dtype", _dtype),
    Check("save_every_off", _save_every_off),
    Check("save_sparse", _save_sparse, needs_prediction=True),
    Check("eval_split", _eval_split),
    Check("epochs", _epochs),
    Check("lr", _lr),
    Check("warmup", _warmup),
    Check("toy", _toy),
    Check("memory", _memory_ran_out),
    Check("host_memory", _host_memory, needs_prediction=True),
    Check("memory", _memory, needs_prediction=True),
    Check("disk", _disk, needs_prediction=True),
    Check("eval_cost", _eval_cost, needs_prediction=True),
    Check("attention", _attention, needs_prediction=True),
    Check("compile", _compile, needs_prediction=True),
    Check("time", _time, needs_prediction=True),
)
"""All checks, in the order in which findings of one severity are listed."""


class Checked(NamedTuple):
    """Findings and predictions of the preflight."""

    findings: list[RunFinding]
    prediction: RunPrediction | None
    is_long: bool
    hours: float | None = None
    """Predicted hours of the whole run; None if no steps were taken."""
    disk_bytes: int | None = None
    """Predicted most bytes of its checkpoints."""
    loaded: Loaded | None = None
    """The student's tokenizer for the run that follows: to read it takes a second or two."""

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
    buckets, order = config.bucket_lengths, config.order
    cache = training_cache(config.cache_dir, order, config.eval_sequences, buckets)
    tokenizer, settings = load_tokenizer(student), load_config(student)
    model = settings.get_text_config()
    problems = _messages(
        lambda: check_losses(resolved.losses, cache, with_teacher=not resolved.reads_cache),
        lambda: check_rollouts(resolved.on_policy, resolved.rollout_tokens, cache, resolved.device),
        lambda: check_batch(resolved.batch_size, cache),
        lambda: cache.check_student(
            tokenizer_hash(tokenizer), model.vocab_size, most_positions(model)
        ),
    )
    backend, sparse = backends.select(config.device), sparse_attention(settings)
    attention = (
        sparse.findings(resolved.learn, settings, cache.sequence_length, backend) if sparse else ()
    )
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
        attention=tuple(attention),
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
    run = Preflight(resolved, plan)
    if plan.prediction is None:
        found = Checked(run.findings(), None, is_long(resolved.max_steps, guess))
    else:
        found = Checked(run.findings(), plan.prediction, run.is_long, run.hours, run.disk_bytes)
    return found._replace(loaded=Loaded(None, tokenizer))


def codes_forced(findings: Sequence[RunFinding], *, force: bool) -> list[str]:
    """Return the codes of errors that --force overrides.

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
    # steps usually reach a third of a device's peak
    return config.max_steps * config.sequences_per_step * S * flops / (peak / 3) / 3600


def _messages(*checks: Callable[[], object]) -> Iterator[str]:
    """Yield the errors that `train_student` would raise."""
    for check in checks:
        try:
            check()
        except QatError as error:
            yield str(error)
