"""The one training loop.

It asks for batches ahead of time, takes steps, and every so often logs, judges and saves.
"""

import logging
import math
import time
from contextlib import closing

from torch import Tensor

from qat import backend as backends
from qat.data.batch import Batch
from qat.data.pipeline import computed_ahead
from qat.data.reader import TeacherCache
from qat.data.sampler import sequence_indices
from qat.errors import TrainingError
from qat.logs import HEARTBEAT, METRICS, JsonLines, Ticker, progress
from qat.losses.config import targets_read
from qat.models.devices import device_called
from qat.models.flops import forward_flops, token_flops
from qat.models.language_model import LanguageModel
from qat.train.codes import CodeWatch
from qat.train.config import TrainConfig
from qat.train.judge import Judge, score
from qat.train.optim import Optimizer, linears_in_scope
from qat.train.run import Run, save_training_state
from qat.train.step import StepResult, TrainingStep

logger = logging.getLogger(__name__)


class Trainer:
    """Everything one run needs, and the loop over its steps."""

    def __init__(
        self,
        student: LanguageModel,
        cache: TeacherCache,
        optimizer: Optimizer,
        judge: Judge,
        *,
        run: Run,
        config: TrainConfig,
        teacher: LanguageModel | None = None,
    ) -> None:
        self.student = student
        self.cache = cache
        self.optimizer = optimizer
        self.judge = judge
        self.config = config
        self.run = run
        self.backend = backends.select(config.device)
        self.dtype = self.backend.dtype(config.dtype)
        self._targets = targets_read(config.losses, with_teacher=config.teacher is not None)
        self.teacher = teacher
        self.take_step = TrainingStep(student, optimizer, config, teacher)
        self.codes = CodeWatch(student.model)
        self.step = 0
        self.best = math.inf
        self._trouble: Tensor | float = 0.0
        """NaN once any gradient norm was not finite; stays on the device between checks."""

    def train(self) -> None:
        """Run until `max_steps`, from wherever the run stands.

        Raises:
            TrainingError: the loss is not finite; the last good checkpoint is kept.
        """
        metrics = JsonLines(self.run.path / METRICS)
        heartbeat = JsonLines(self.run.path / HEARTBEAT)
        speed = _Speed(heartbeat, self.backend, self._flops_share())
        steps = range(self.step, self.config.max_steps)
        stream = computed_ahead(self._micro_batches, steps, self.backend.batches_ahead())
        try:
            with progress("training", self.config.max_steps, "steps") as ticker, closing(stream):
                ticker.advance(self.step)
                if self.step == 0:
                    self._evaluate(metrics)
                for batches in stream:
                    self._advance(batches, metrics, speed, ticker)
        finally:
            metrics.close()
            speed.close()
            self.take_step.close()

    def _flops_share(self) -> float | None:
        """What one position a second is of the device's peak; None for an unknown device."""
        student, config, S = self.student, self.config, self.cache.sequence_length
        names = linears_in_scope(student.model, config.scope)
        K = self.cache.manifest.settings.top_k
        flops = token_flops(student, names, config, S=S, K=K).total
        if self.teacher is not None:
            flops += forward_flops(self.teacher, S)
        device = device_called(self.backend.name())
        peak = None if device is None else device.peak_flops(config.dtype)
        return None if peak is None else flops / peak

    def _advance(
        self, batches: list[Batch], metrics: JsonLines, speed: "_Speed", ticker: Ticker
    ) -> None:
        """One step, and what is due after it."""
        result = self.take_step(batches, self.step)
        self._trouble = self._trouble + 0.0 * result.grad_norm
        self.step += 1
        speed.count(result.positions)
        if self._is_due(self.config.log_every):
            ticker.note(self._log(metrics, speed, result))
        ticker.advance()
        if self._is_due(self.config.eval_every, self.config.save_every):
            self._pause(metrics, result)
            speed.restart()

    def _is_due(self, *periods: int) -> bool:
        is_last = self.step == self.config.max_steps
        return is_last or any(self.step % period == 0 for period in periods)

    def _micro_batches(self, step: int) -> list[Batch]:
        """The sequences of a step, on the host: seed and step alone decide which."""
        config, pinned = self.config, self.backend.pinned
        indices = sequence_indices(
            config.seed, step, config.sequences_per_step, self.cache.num_sequences("train")
        )
        parts = indices.reshape(config.grad_accum_steps, config.batch_size)
        batches = (self.cache.batch(part, targets=self._targets) for part in parts)
        return [Batch(*map(pinned, batch)) for batch in batches]

    def _log(self, metrics: JsonLines, speed: "_Speed", result: StepResult) -> str:
        """Write the step's lines; returns what the progress line shows."""
        valid_tokens = int(result.valid_tokens)
        count = max(valid_tokens, 1)
        means = {f"{name}_nats": part.item() / count for name, part in result.sums.items()}
        self._check_finite(result)
        metrics.write(
            kind="train",
            step=self.step,
            **means,
            grad_norm=result.grad_norm.item(),
            lr_share=self.optimizer.lr_share(self.step - 1),
            valid_tokens=valid_tokens,
        )
        tokens_per_s = speed.write(self.step, self.take_step.compile_facts())
        return f"loss {means['loss_nats']:.4f}  {tokens_per_s:,.0f} tokens/s"

    def _pause(self, metrics: JsonLines, result: StepResult) -> None:
        """Evaluate and save where they are due; a best student is always saved."""
        self._check_finite(result)
        is_best = self._is_due(self.config.eval_every) and self._evaluate(metrics)
        if is_best or self._is_due(self.config.save_every):
            self._save(is_best=is_best)

    def _evaluate(self, metrics: JsonLines) -> bool:
        """Judge the student; whether it is the best so far. An untrained one never counts."""
        verdict = self.judge.verdict(self.dtype)
        flipped = self.codes.flipped_frac()
        if flipped is not None:
            verdict["codes_flipped_frac"] = flipped
        metrics.write(kind="eval", step=self.step, **verdict)
        numbers = (f"{k} {v:.4f}" for k, v in verdict.items() if isinstance(v, float))
        logger.info("step %d: %s", self.step, "  ".join(numbers))
        is_best = self.step > 0 and score(verdict) < self.best
        if is_best:
            self.best = score(verdict)
        return is_best

    def _save(self, *, is_best: bool) -> None:
        """Write this step's checkpoint and let the pointers name it."""
        path = self.run.checkpoint_path(self.step)
        state = {**self.optimizer.state(), **_rng_tensors(self.backend), **self.codes.state()}
        facts = {"step": self.step, "best": self.best}
        save_training_state(
            self.student.model, self.judge.tokenizer, path, tensors=state, facts=facts
        )
        if is_best:
            self.run.point("best", path)
        self.run.point("latest", path)
        self.run.remove_old(self.config.keep)

    def _check_finite(self, result: StepResult) -> None:
        loss = result.sums["loss"].item() / max(int(result.valid_tokens), 1)
        if math.isfinite(loss + self._trouble):
            return
        latest = self.run.pointed("latest")
        kept = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
        raise TrainingError(
            f"not every loss and gradient up to step {self.step} is finite (there: loss "
            f"{loss:.4g}, gradient norm {result.grad_norm.item():.4g}), expected numbers; {kept}: "
            "lower --lr and its kin, or --clip-grad-norm, and start anew"
        )


class _Speed:
    """Steps and tokens against the clock, outside evaluation and saving."""

    def __init__(
        self, heartbeat: JsonLines, backend: backends.Backend, flops_share: float | None
    ) -> None:
        self._heartbeat = heartbeat
        self._flops_share = flops_share
        self._backend = backend
        self._began = time.perf_counter()
        self.restart()

    def restart(self) -> None:
        """Begin a new stretch: what lies between the stretches is not training."""
        self._backend.synchronize()
        self._since = time.perf_counter()
        self._steps = self._positions = 0

    def count(self, positions: int) -> None:
        """One more step, over `positions` tokens."""
        self._steps += 1
        self._positions += positions

    def write(self, step: int, facts: dict[str, object]) -> float:
        """One heartbeat line for the stretch so far, with `facts`; returns tokens per second."""
        self._backend.synchronize()
        seconds = time.perf_counter() - self._since
        tokens_per_s = self._positions / seconds
        self._heartbeat.write(
            step=step,
            tokens_per_s=tokens_per_s,
            mfu_frac=None if self._flops_share is None else tokens_per_s * self._flops_share,
            step_s=seconds / self._steps,
            peak_gib=self._backend.peak_memory_gib(),
            elapsed_s=time.perf_counter() - self._began,
            **facts,
        )
        self.restart()
        return tokens_per_s

    def close(self) -> None:
        """Close the heartbeat file."""
        self._heartbeat.close()


def _rng_tensors(backend: backends.Backend) -> dict[str, Tensor]:
    return {f"rng.{name}": state for name, state in backend.rng_state().items()}
