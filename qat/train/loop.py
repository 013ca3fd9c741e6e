"""The training loop.

It prefetches batches, takes steps, and periodically logs, evaluates and saves.
"""

import logging
import math
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import torch

from qat.backend import device as backends
from qat.data.packing import Batch
from qat.data.pipeline import computed_ahead
from qat.errors import CheckpointError, Stopped, TrainingError
from qat.logs import Ticker, progress
from qat.losses.config import OWN_WORDS, targets_read
from qat.models.decoding import Rollouts, load_decoding
from qat.models.devices import device_called
from qat.models.flops import TokenFlops, forward_flops, token_flops
from qat.models.language_model import LanguageModel
from qat.nn.lut_embedding import quant_tables
from qat.nn.step import form_weights
from qat.observe.runs import score
from qat.ranks import ALONE, Ranks
from qat.train.config import RolloutConfig, TrainConfig
from qat.train.finite import not_finite
from qat.train.judge import CodeWatch, Judge
from qat.train.learnable import weights_in_scope
from qat.train.metrics import Metrics
from qat.train.optim import Optimizer
from qat.train.pulse import Pulse
from qat.train.resume import EXIT_CODES, HALT, SOAK, Stops
from qat.train.run import RunDirectory
from qat.train.saver import HasState, Saver, check_alike
from qat.train.step import OwnRows, StepResult, TrainingStep, rank_indices
from qat.train.step_config import StepConfig

logger = logging.getLogger(__name__)


class Trainer:
    """The state of one run, and the loop over its steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        judge: Judge,
        *,
        run: RunDirectory,
        config: TrainConfig,
        teacher: LanguageModel | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.student = student = judge.student
        self.cache = judge.cache
        self.optimizer = optimizer
        self.judge = judge
        self.config = config
        self.run = run
        self.ranks = ranks
        self._step_config = config.part(StepConfig)
        self.backend = backends.select(config.device)
        self.dtype = self.backend.dtype(config.dtype)
        self._targets = targets_read(config.losses, with_teacher=not config.reads_cache)
        self.teacher = teacher
        self.rollouts: Rollouts | None = None
        """Source of the student's own text, if it learns from any."""
        own = None
        if config.on_policy:
            own = OwnRows(config.own_rows, config.own_losses, config.reads_cache)
            self.rollouts = load_decoding().rollouts(
                student,
                self.cache,
                config.part(RolloutConfig),
                self._step_config,
                end=judge.tokenizer.eos_token_id,
                ranks=ranks,
            )
        self.take_step = TrainingStep(student, optimizer, self._step_config, teacher, own=own)
        self.codes = CodeWatch(student.model)
        beside: list[HasState] = [self.codes, *filter(None, [self.rollouts])]
        self.saver = Saver(
            run,
            student,
            judge.tokenizer,
            optimizer,
            beside=beside,
            keep=config.keep,
            milestone_every=config.milestone_every,
            ranks=ranks,
        )
        self.stops = Stops(run.path / HALT)
        self.step = 0
        self.best = math.inf
        self.skipped: list[str] = []
        """Damaged checkpoints that are newer than the one from which the run was resumed."""
        self._metrics: Metrics | None
        """The run's metrics, on its first rank; set while it trains."""
        self._pulse: Pulse
        """This rank's heartbeats and events; set while it trains."""

    def train(self) -> None:
        """Run from the present step to `max_steps`.

        Raises:
            TrainingError: the loss is not finite; the last good checkpoint is kept.
            Stopped: a stop was requested; the checkpoint of this very step is saved.
        """
        self._metrics = Metrics(self.run.path) if self.ranks.is_first else None
        self._log_plan()
        self._pulse = Pulse(
            self.run.path,
            self.backend,
            self.ranks,
            stall_s=self.config.stall_s,
            beat_s=self.config.beat_s,
            flops_share=self._flops_share(),
        )
        steps = range(self.step, self.config.max_steps)
        ahead = self.config.batches_ahead
        ahead = self.backend.batches_ahead if ahead < 0 else ahead
        stream = computed_ahead(self.micro_batches, steps, ahead)
        try:
            with (
                progress("training", self.config.max_steps, "steps", done=self.step) as ticker,
                closing(stream),
                self.stops,
                self._pulse,
                self.saver,
            ):
                self._begin()
                try:
                    for batches in self._pulse.timed(stream):
                        batches = self._with_rollouts(batches)
                        stop = self.stops.requested(self.step)
                        result = self.take_step(batches, self.step, stop=stop)
                        self._follow(result, batches[0], ticker)
                    self.saver.finish()
                except CheckpointError as error:  # a background save failed
                    self._pulse.event("save_failed", error=str(error))
                    raise
                finally:
                    self._pulse.tell_waits(self.cache.waits, self.cache.waited_s)
        finally:
            if self._metrics is not None:
                self._metrics.close()
            self.take_step.close()

    def _log_plan(self) -> None:
        config, cache = self.config, self.cache
        count, length = cache.num_sequences("train"), cache.sequence_length
        sequences = config.sequences_per_step * self.ranks.size
        names = weights_in_scope(self.student.model, config.scope, config.kinds)
        tables = len(quant_tables(self.student.model).keys() & names)
        of_tables = f" and {tables} {'table' if tables == 1 else 'tables'}" if tables else ""
        where = {"mlp": "in the MLPs", "attention": "in the attention", "e2e": "in all blocks"}
        devices = f"{self.ranks.size} x " if self.ranks.size > 1 else ""
        left = config.max_steps - self.step
        steps = f"{left:,} steps left of {config.max_steps:,}" if self.step else f"{left:,} steps"
        lines = [
            f"training on {devices}{self.backend.name()} in {config.dtype}: "
            f"{self.optimizer.num_learnable():,} values learn "
            f"({', '.join(self.optimizer.kinds)} of {len(names) - tables} linears "
            f"{where[config.scope]}{of_tables})",
            f"{steps}, each of {sequences * length:,} tokens ({sequences} sequences of {length}): "
            f"{left * sequences / count:.3g} passes over the {count:,} sequences of "
            f"{cache.directory}",
        ]
        if self.rollouts is not None:
            own = config.own_rows * sequences // config.batch_size
            every = f"{config.rollout_every} steps" if config.rollout_every > 1 else "step"
            lines.append(
                f"{own} of the {sequences} sequences of a step are prompts that the student goes "
                f"on with, by {self.rollouts.longest} tokens at most, anew every {every}"
            )
        for line in lines:
            logger.info("%s", line)

    def _flops_share(self) -> float | None:
        """Return the peak's share that one position a second takes; None for an unknown device."""
        device = device_called(self.backend.name())
        peak = None if device is None else device.peak_flops(self.config.dtype)
        if peak is None:
            return None
        return self.flops().total / peak

    def flops(self) -> TokenFlops:
        """Return the FLOPs of one position, those of a running teacher included."""
        config, S = self.config, self.cache.sequence_length
        names = weights_in_scope(self.student.model, config.scope, config.kinds)
        K = self.cache.manifest.settings.top_k
        flops = token_flops(self.student, names, config, S=S, K=K)
        if self.teacher is None:
            return flops
        share = config.on_policy if config.on_policy and config.reads_cache else 1.0
        return replace(flops, teacher=share * forward_flops(self.teacher, S))

    def _begin(self) -> None:
        """Compile; evaluate the untrained student, or record that the run was resumed."""
        with self._pulse.pause():
            self._warm_up()
        if self.step > 0:
            self._pulse.event("resumed", step=self.step, world_size=self.ranks.size)
        # a resumed run may have lost its best checkpoint and have no step left to find a new one
        is_first = self.step == 0 and not self.config.skip_first_eval
        if is_first or (self.step == self.config.max_steps and math.isinf(self.best)):
            with self._pulse.pause():
                # the untrained student competes, so that a run that makes it worse returns it
                # unchanged
                if self._evaluate() and is_first:
                    self._save(is_best=True)
        for name in self.skipped:
            self._pulse.event("fallback_checkpoint", step=self.step, damaged=name)

    def _warm_up(self) -> None:
        """Compile the step ahead of the first one, on devices where that takes long."""
        if not self.backend.is_traced or self.step == self.config.max_steps:
            return
        with self.backend.tracing.compiling("the training step"):
            self.take_step.warm_up(self.micro_batches(self.step), self.step)
        facts = self.take_step.compile_facts()
        if "step_compile_s" in facts:
            logger.info(
                "compiled the training step before the clock: %d graphs in %.1f s",
                facts["graphs"],
                facts["step_compile_s"],
            )

    def _follow(self, result: StepResult, batch: Batch, ticker: Ticker) -> None:
        """Count a finished step; log, evaluate, save or stop if due."""
        self.step += 1
        self._pulse.stepped(self.step, result.positions, result.grad_norm)
        is_logged = self._is_due(self.config.log_every)
        is_pause = self._is_due(self.config.eval_every, self.config.save_every)
        if is_logged or is_pause:
            numbers = self._read(result)
            self._check_finite(numbers)
        if is_logged:
            ticker.note(self._log(numbers, batch))
        else:
            self._pulse.beat_if_due(self.step, self.take_step.compile_facts)
        ticker.advance()
        if is_pause:
            with self._pulse.pause():
                # a new best student is always saved
                is_best = self._is_due(self.config.eval_every) and self._evaluate()
                if is_best or self._is_due(self.config.save_every):
                    self._save(is_best=is_best)
        if self.take_step.is_stop_agreed and self.step < self.config.max_steps:
            with self._pulse.pause():
                self._stop(result)

    def _save(self, *, is_best: bool) -> None:
        """Save this step's checkpoint after checking that all ranks hold the same student."""
        alike = [*self.optimizer.replicated(), *self.optimizer.hosted_codes()]
        check_alike(alike, self.step, self.ranks)
        self.saver.save(self.step, self.best, is_best=is_best)

    def _is_due(self, *periods: int) -> bool:
        """Return whether this step is the last one, or a multiple of a period that is not 0."""
        is_last = self.step == self.config.max_steps
        return is_last or any(period and self.step % period == 0 for period in periods)

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's sequences of a step, on the host; seed and step determine them."""
        pinned = self.backend.pinned
        parts = rank_indices(self._step_config, step, self.cache.indices, self.ranks)
        parts = parts if self.rollouts is None else parts[:, self.rollouts.order]
        batches = self.cache.micro_batches(parts, self._targets)
        return [Batch(*map(pinned, batch)) for batch in batches]

    def step_batches(self, step: int) -> list[Batch]:
        """Return what a step learns from: its sequences, and the student's own text in them."""
        batches = self.micro_batches(step)
        return batches if self.rollouts is None else self.rollouts.into(batches, step)

    def _with_rollouts(self, batches: list[Batch]) -> list[Batch]:
        """Insert the student's own text into the batches of the coming step."""
        if self.rollouts is None:
            return batches
        if not self.rollouts.needed(self.step):
            return self.rollouts.into(batches, self.step)
        with self._pulse.rolling_out():
            return self.rollouts.into(batches, self.step)

    def _read(self, result: StepResult) -> "_StepNumbers":
        """Read a step's results on the host, over all ranks; all ranks call this together."""
        result, flag = self.take_step.sum_over_ranks(result)
        wanted = [*result.sums.values(), result.valid_tokens, result.grad_norm, flag]
        *sums, valid, norm, nan_flag = self.backend.read(wanted)
        own = self.rollouts.metrics() if self.rollouts else {}
        mine = own.get("own_tokens", 0.0)

        def mean(name: str, part: float) -> float:
            others = mine if name.startswith(OWN_WORDS) else valid - mine
            return part / max(valid if name == "loss" else others, 1)

        by_name = zip(result.sums, sums, strict=True)
        means = {f"{name}_nats": mean(name, part) for name, part in by_name}
        return _StepNumbers(means, own, valid, norm, math.isfinite(means["loss_nats"] + nan_flag))

    def _log(self, numbers: "_StepNumbers", batch: Batch) -> str:
        """Write the step's metrics and heartbeat; return the text of the progress line."""
        means, grad_norm = numbers.means, numbers.grad_norm
        reads = self.judge.count_reads(batch, self.dtype, self._pulse.event)
        if self._metrics is not None:
            self._metrics.write(
                kind="train",
                step=self.step,
                **means,
                grad_norm=grad_norm,
                lr_share=self.optimizer.lr_share(self.step - 1),
                valid_tokens=numbers.valid_tokens,
                **numbers.own_metrics,
                **reads,
            )
        facts = self.take_step.compile_facts() | reads
        tokens_per_s = self._pulse.beat(
            self.step, loss_nats=means["loss_nats"], grad_norm=grad_norm, facts=facts
        )
        return f"loss {means['loss_nats']:.4f}, {tokens_per_s:,.0f} tokens/s"

    def _evaluate(self) -> bool:
        """Evaluate the student; return whether it is the best so far.

        All ranks form the weights; the first evaluates, and the others wait for its score. Where
        each layer's weights are gathered as it runs, all ranks evaluate.
        """
        form_weights(self.student.model, self.dtype)
        with self.backend.tracing.compiling("the evaluation"):
            flipped = self.codes.flipped_frac()
            gathers = self.take_step.forms_by_layer and bool(self.optimizer.sharded)
            judges = self._metrics is not None or gathers
            verdict = self.judge.verdict(self.dtype) if judges else {}
        now = math.inf
        if self._metrics is not None:
            if flipped is not None:
                verdict["codes_flipped_frac"] = flipped
            self._metrics.write(kind="eval", step=self.step, **verdict)
            numbers = (f"{k} {v:.4f}" for k, v in verdict.items() if isinstance(v, float))
            logger.info("step %d, held out: %s", self.step, "  ".join(numbers))
            now = score(verdict)
        now = self.ranks.copy_from_first(torch.tensor(now, dtype=torch.float64)).item()
        if math.isnan(now):
            self._pulse.event(
                "not_finite", step=self.step, loss_nats=now, which="the held-out loss"
            )
            self._give_up(f"the held-out loss after step {self.step} is NaN")
        is_best, self.best = now < self.best, min(now, self.best)
        return is_best

    def _stop(self, result: StepResult) -> None:
        """Save, and end the run with the reason of the stop."""
        self._check_finite(self._read(result))
        if self.saver.saved != self.step:
            self.saver.save(self.step, self.best, is_best=False)
        self.saver.finish()
        reason = self.stops.requested(self.step) or "another rank"
        kind = "halted" if reason in {HALT, SOAK} else "signal"
        self._pulse.event(kind, step=self.step, wish=reason)
        if self.ranks.is_first:
            self.stops.clear_halt()
        raise Stopped(
            f"stopped by {reason} after step {self.step}; {self.run.checkpoint_path(self.step)} is "
            "saved: go on with --resume",
            EXIT_CODES.get(reason, 1),
        )

    def _check_finite(self, numbers: "_StepNumbers") -> None:
        if numbers.is_finite:
            return
        loss = numbers.means["loss_nats"]
        which = not_finite(self.take_step.numbers())
        self._pulse.event("not_finite", step=self.step, loss_nats=loss, which=which)
        found = f"loss {loss:.4g}, gradient norm {numbers.grad_norm:.4g}"
        self._give_up(
            f"not every loss, gradient, weight and moment up to step {self.step} is finite (there: "
            f"{found}{f'; {which}' if which else ''})"
        )

    def _give_up(self, found: str) -> None:
        """End a run whose numbers are not finite, after finishing a background save."""
        self.ranks.sync_errors(self.saver.finish)  # the first one writes, all raise its error
        latest = self.run.pointed("latest")
        kept = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
        raise TrainingError(
            f"{found}, expected numbers; {kept}: lower --lr and its kin, or --clip-grad-norm, and "
            "start anew"
        )


class _StepNumbers(NamedTuple):
    """The numbers of one step, on the host."""

    means: dict[str, float]
    """Nats per valid token by loss, with the suffix `_nats`."""
    own_metrics: dict[str, float]
    """Metrics of the student's own rows (`Rollouts.metrics`)."""
    valid_tokens: float
    grad_norm: float
    is_finite: bool
    """True if every loss and gradient up to this step, and all state after it, is finite."""
