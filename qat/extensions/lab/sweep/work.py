"""The work of one run of a sweep: timing training steps, or training a student."""

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import cycle

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qat.backend.base import Backend
from qat.backend.device import select
from qat.data.packing import Batch
from qat.errors import ConfigError
from qat.extensions.bench.effective import Facts, check_strictly, what_ran
from qat.extensions.bench.measure import NumberedBatches, Timing
from qat.extensions.bench.results import IN_EVERY_ROW, environment
from qat.extensions.bench.run import Setting, prepare
from qat.extensions.bench.stats import percentiles, slowest
from qat.extensions.bench.student import Ours, Subject
from qat.extensions.lab.buckets import default_buckets
from qat.extensions.lab.sweep.layouts import bucketed_batches, packed_batches
from qat.extensions.lab.sweep.leak import FIRST_LOOK, leak_found_after, memory_trend
from qat.extensions.lab.sweep.plan import StepsConfig, SweepRun
from qat.extensions.lab.sweep.telemetry import rank_facts
from qat.logs import HEARTBEAT, read_json_lines
from qat.ranks import ALONE, Ranks, joined
from qat.train.config import TrainConfig
from qat.train.start import check_dtype, train_student
from qat.train.step import StepResult
from qat.train.step_config import StepConfig

SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
"""PyTorch's kernels of dense attention by name."""
NO_KERNEL = ("No viable backend for scaled_dot_product_attention", "No available kernel")
"""Errors of PyTorch for a forced kernel that cannot run, on a CPU and on a GPU."""


class StepRecorder:
    """A subject that records the memory held after each step, and its valid tokens."""

    def __init__(
        self,
        subject: Subject,
        backend: Backend,
        *,
        ranks: Ranks = ALONE,
        first_timed: int = 0,
    ) -> None:
        self._subject = subject
        self._backend = backend
        self._ranks = ranks
        self._first_timed = first_timed
        self.held_mib: list[float] = []
        self.valid_tokens: list[Tensor] = []

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Take the step."""
        if step == self._first_timed:
            self._ranks.exchange_s()  # drop the exchanges before the clock starts
        result = self._subject(batches, step)
        self.valid_tokens.append(result.valid_tokens)
        held = self._backend.memory_use().held_gib
        if held is not None:
            self.held_mib.append(held * 2**10)
        return result

    def compile_facts(self) -> Facts:
        """Return the facts of the subject."""
        return self._subject.compile_facts()

    def close(self) -> None:
        """Close the subject."""
        self._subject.close()


def time_bench(run: SweepRun) -> Facts | None:
    """Time the training step of the settings; return None on all ranks but 0."""
    config = check_dtype(StepsConfig.parse(run.settings, run.group))
    with joined(config.device) as ranks:
        return _time_ranks(run, config, ranks)


def _time_ranks(run: SweepRun, config: StepsConfig, ranks: Ranks) -> Facts | None:
    setting, model = prepare(config, run.student)
    seed = setting.data.seed + ranks.rank * config.grad_accum_steps  # each rank has its own batches
    setting = replace(setting, data=replace(setting.data, seed=seed))
    ours = Ours(model, config, ranks=ranks, is_sharded=config.shard_latents)
    numbered = _laid_out(config, setting)
    subject = StepRecorder(ours.subject(), setting.backend, ranks=ranks, first_timed=config.warmup)
    with forced_attention(config.attention_kernel, setting.backend):
        timing = setting.time(subject, numbered)
    numbers = {**setting.numbers(timing, ranks.size), **rank_numbers(timing, ranks)}
    if not ranks.is_first:
        return None
    valid = [int(count) for count in subject.valid_tokens[-config.steps :]]
    # for steps of one shape the median, which ignores outliers; for several shapes the sum
    is_one = len(set(valid)) == 1
    cost_s = timing.step_s / valid[0] if is_one else sum(timing.steps_s) / sum(valid)
    length, effective = setting.data.seq_len, numbers["effective"]
    ran = what_ran(config, model, effective, setting.backend, length=length)
    ran["fallbacks"] += other_attention(config.attention_kernel, numbers["effective"])
    if run.strict:
        check_strictly(ran["fallbacks"])
    row = setting.row("sweep", run.group, config.batch_size)
    return {
        **row,
        **numbers,
        "layout": config.layout,
        "attention_kernel": config.attention_kernel,
        "shard_latents": config.shard_latents,
        "cost_s": cost_s,
        "valid_tokens_per_s": 1 / cost_s,
        **ran,
        **leak_facts(subject.held_mib),
        **_environment(config, setting.backend),
    }


@contextmanager
def forced_attention(kernel: str, backend: Backend) -> Iterator[None]:
    """Let PyTorch's dense attention use `kernel` alone.

    Raises:
        ConfigError: it cannot compute this attention on this device.
    """
    if kernel == "auto":
        yield
        return
    try:
        with sdpa_kernel(SDPA[kernel]):
            yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in NO_KERNEL):
            raise
        raise ConfigError(
            f"attention_kernel={kernel} cannot run this attention on {backend.name()} "
            f"({str(error).splitlines()[0]}), expected a kernel that can; choose another or auto"
        ) from error


def other_attention(kernel: str, effective: Facts) -> list[str]:
    """Return a sentence if attention ran by another operator than that of the forced `kernel`."""
    found = effective.get("attention", ())
    if kernel == "auto" or found and all(f"_{kernel}_" in f"{name}_" for name in found):
        return []
    return [f"attention_kernel={kernel} ran as {', '.join(found) or 'no operator of PyTorch'}"]


def rank_numbers(timing: Timing, ranks: Ranks) -> Facts:
    """Return the loss over all ranks' tokens, the highest memory, and the time of the slowest rank.

    A rank's work is its step without exchanges, which include waiting for slower ranks. All ranks
    must call this, after the timed steps.
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
    """Run `qat train` to the end and return the speed from its heartbeats."""
    config = check_dtype(TrainConfig.parse(run.settings, run.group))
    report = train_student(config, run.student, run.directory, resume=run.directory.exists())
    beats = read_json_lines(run.directory / HEARTBEAT)
    timed = beats[1:] or beats  # the first one includes compilation
    samples = [beat["step_s"] for beat in timed]
    positions = statistics.median(beat["tokens_per_s"] * beat["step_s"] for beat in timed)
    step_s, around = statistics.median(samples), percentiles(samples)
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
        "step_p90_s": around.p90,
        "step_p99_s": around.p99,
        "step_max_s": max(samples),
        "slowest_steps": slowest(samples, [beat["step"] for beat in timed]),
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
    """Return whether memory grew until the last step; None with too few steps to decide."""
    trend, found = memory_trend(held_mib), leak_found_after(held_mib)
    return {
        "memory_steps": len(held_mib),
        "memory_trend": trend and asdict(trend),
        "is_leaking": None if trend is None else trend.is_leak and found is not None,
        "leak_found_steps": found,
        "leak_needs_steps": FIRST_LOOK,
    }


def _laid_out(config: StepsConfig, setting: Setting) -> NumberedBatches:
    """Return the steps of a layout; those of documents cycle through their batches.

    Raises:
        ConfigError: there is a cache, whose rows are already packed, several micro-batches, or
            buckets that do not end with a whole row.
    """
    if config.layout == "rows":
        return setting.numbered_batches(config.batch_size)
    if config.cache_dir is not None or config.grad_accum_steps > 1:
        raise ConfigError(
            f"layout={config.layout} beside cache_dir or grad_accum_steps, expected random data in "
            "single micro-batches; drop them or the layout"
        )
    data, size = setting.data, config.batch_size
    buckets = config.buckets or default_buckets(data.seq_len)
    if config.layout == "packed":
        made = packed_batches(data, size, setting.backend)
    elif buckets[-1] == data.seq_len:
        made = bucketed_batches(data, size, buckets, setting.backend)
    else:
        raise ConfigError(
            f"bucket_lengths={config.bucket_lengths} of rows of {data.seq_len}, expected the "
            f"longest to be a row; end them with {data.seq_len}, or change seq_len"
        )
    pinned = [[Batch(*map(setting.backend.pinned, batch))] for batch in made]
    return enumerate(cycle(pinned))


def _environment(config: StepConfig, backend: Backend) -> Facts:
    facts = environment(backend, config)
    return {name: facts[name] for name in (*IN_EVERY_ROW, "time", "driver")}
