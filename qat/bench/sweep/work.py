"""What one run of a sweep does: times training steps, or trains a student."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace

from torch import Tensor

from qat.backend.base import Backend
from qat.backend.device import select
from qat.bench.batches import make_batches
from qat.bench.effective import Facts, check_strictly, what_ran
from qat.bench.measure import Timing
from qat.bench.results import IN_EVERY_ROW, environment
from qat.bench.run import Setting, prepare
from qat.bench.stats import FIRST_LOOK, leak_found_after, memory_trend
from qat.bench.student import Ours, Subject
from qat.bench.sweep.plan import StepsConfig, SweepRun
from qat.bench.sweep.telemetry import rank_facts
from qat.data.packing import Batch
from qat.errors import ConfigError
from qat.logs import HEARTBEAT, read_json_lines
from qat.ranks import ALONE, Ranks, joined
from qat.train.config import StepConfig, TrainConfig
from qat.train.start import train_student
from qat.train.step import StepResult, check_dtype


class Diary:
    """A subject, and what it held and saw at each of its steps."""

    def __init__(
        self,
        subject: Subject,
        backend: Backend,
        by_step: Sequence[Batch] = (),
        *,
        ranks: Ranks = ALONE,
        first_timed: int = 0,
    ) -> None:
        self._subject = subject
        self._backend = backend
        self._by_step = by_step
        """What the steps train on in turns, in place of what they are given."""
        self._ranks = ranks
        self._first_timed = first_timed
        self.held_mib: list[float] = []
        self.valid_tokens: list[Tensor] = []

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Take the step."""
        if step == self._first_timed:
            self._ranks.exchange_s()  # forget those before the clock
        if self._by_step:
            batches = [self._by_step[step % len(self._by_step)]]
        result = self._subject(batches, step)
        self.valid_tokens.append(result.valid_tokens)
        held = self._backend.held_memory_gib()
        if held is not None:
            self.held_mib.append(held * 2**10)
        return result

    def compile_facts(self) -> Facts:
        """The subject's."""
        return self._subject.compile_facts()

    def close(self) -> None:
        """Close the subject."""
        self._subject.close()


def time_bench(run: SweepRun) -> Facts | None:
    """The training step of the settings, its memory, and what ran in it; None but on rank 0."""
    config = check_dtype(StepsConfig.parse(run.settings, run.group))
    with joined(config.device) as ranks:
        return _time_ranks(run, config, ranks)


def _time_ranks(run: SweepRun, config: StepsConfig, ranks: Ranks) -> Facts | None:
    setting, model = prepare(config, run.student)
    seed = setting.data.seed + ranks.rank * config.grad_accum_steps  # each has batches of its own
    setting = replace(setting, data=replace(setting.data, seed=seed))
    ours = Ours(model, config, ranks=ranks, is_sharded=config.shard_latents)
    laid_out, first_timed = _laid_out(config, setting), config.warmup
    subject = Diary(ours.subject(), setting.backend, laid_out, ranks=ranks, first_timed=first_timed)
    timing = setting.time(subject, config.batch_size)
    numbers = {**setting.numbers(timing, ranks.size), **rank_numbers(timing, ranks)}
    if not ranks.is_first:
        return None
    valid = [int(count) for count in subject.valid_tokens[-config.steps :]]
    ran = what_ran(config, model, numbers["effective"], setting.backend)
    if run.strict:
        check_strictly(ran["fallbacks"])
    row = setting.row("sweep", run.group, config.batch_size)
    return {
        **row,
        **numbers,
        "layout": config.layout,
        "shard_latents": config.shard_latents,
        "valid_tokens_per_s": sum(valid) / sum(timing.steps_s),
        # steps of one shape: the median, which a hiccup does not move; of several: all of them
        "cost_s": timing.step_s / valid[0]
        if len(set(valid)) == 1
        else sum(timing.steps_s) / max(sum(valid), 1),
        **ran,
        **leak_facts(subject.held_mib),
        **_environment(config, setting.backend),
    }


def rank_numbers(timing: Timing, ranks: Ranks) -> Facts:
    """Of several ranks: the loss over all their tokens, the memory of the worst, and whose work the
    others wait for.

    A rank's work is a step without its exchanges, in which it waits for slower ranks as well. To be
    called by all ranks, behind the timed steps.
    """
    if ranks.size == 1:
        return {"ranks": 1}
    step_s = statistics.fmean(timing.steps_s)
    work_s = step_s - (ranks.exchange_s() or 0.0) / len(timing.steps_s)
    mine = json.dumps([work_s, timing.loss_nats, timing.peak_gib, timing.reserved_gib])
    works_s, losses, *memory = zip(*map(json.loads, ranks.texts(mine)), strict=True)
    peak, reserved = (max((m for m in each if m is not None), default=None) for each in memory)
    slowest = works_s.index(max(works_s))
    return {
        "ranks": ranks.size,
        "loss_nats": sum(losses),
        "peak_gib": peak,
        "peak_reserved_gib": reserved,
        "rank_work_s": works_s,
        "slowest_rank": slowest,
        "slowest_share": works_s[slowest] / step_s,
        "rank_spread": works_s[slowest] / min(works_s) - 1,
    }


def time_training(run: SweepRun) -> Facts:
    """A whole `qat train`, and the speed that its heartbeats tell."""
    config = check_dtype(TrainConfig.parse(run.settings, run.group))
    report = train_student(config, run.student, run.directory, resume=run.directory.exists())
    beats = read_json_lines(run.directory / HEARTBEAT)
    timed = beats[1:] or beats  # the first holds the compiler's work
    samples = [beat["step_s"] for beat in timed]
    positions = statistics.median(beat["tokens_per_s"] * beat["step_s"] for beat in timed)
    step_s = statistics.median(samples)
    reserved = [mib for beat in beats if (mib := beat["mem_reserved_mib"]) is not None]
    fell_back = [beats[-1]["fallback"]] if beats[-1]["fallback"] else []
    if run.strict:
        check_strictly(fell_back)
    return {
        "unit": "s",
        "samples": samples,
        "dtype": config.dtype,
        "batch_size": config.batch_size,
        "step_s": step_s,
        "tokens_per_s": positions / step_s,
        "peak_gib": beats[-1]["peak_gib"],
        "peak_reserved_gib": max(reserved) / 1024 if reserved else None,
        "kl_nats": report.best,
        "cost_s": step_s / positions,
        "requested": {"dtype": config.dtype, "compile": config.compile},
        "effective": {name: beats[-1][name] for name in ("compiled", "graphs", "fallback")},
        "fallbacks": fell_back,
        **rank_facts(run.directory),
        **_environment(config, select(config.device)),
    }


def leak_facts(held_mib: Sequence[float]) -> Facts:
    """Whether memory grew with the steps, to the last; None for too few of them to tell."""
    trend, found = memory_trend(held_mib), leak_found_after(held_mib)
    return {
        "memory_steps": len(held_mib),
        "memory_trend": trend and asdict(trend),
        "is_leaking": None if trend is None else trend.is_leak and found is not None,
        "leak_found_steps": found,
        "leak_needs_steps": FIRST_LOOK,
    }


def _laid_out(config: StepsConfig, setting: Setting) -> list[Batch]:
    """The batches of a layout by step; none of full rows.

    Raises:
        ConfigError: a cache, whose rows are packed already, or several micro-batches.
    """
    if config.layout == "rows":
        return []
    if config.cache_dir is not None or config.grad_accum_steps > 1:
        raise ConfigError(
            f"layout={config.layout} beside cache_dir or grad_accum_steps, expected random data in "
            "single micro-batches; drop them or the layout"
        )
    made = make_batches(setting.data, config.layout, config.batch_size, setting.backend)
    return [Batch(*map(setting.backend.pinned, batch)) for batch in made]


def _environment(config: StepConfig, backend: Backend) -> Facts:
    facts = environment(backend, config)
    return {name: facts[name] for name in (*IN_EVERY_ROW, "time", "driver")}
