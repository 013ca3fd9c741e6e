"""Clocks of the benchmarks: for steps, for calls in turns, and for the peak rates of the device."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, pairwise

import torch

from qat.backend.base import DTYPES, Backend
from qat.data.packing import Batch
from qat.extensions.bench.stats import median_interval, percentiles, slowest, variation
from qat.extensions.bench.student import Subject
from qat.models.devices import device_called

Row = dict[str, object]  # a row of results
NumberedBatches = Iterable[
    tuple[int, Sequence[Batch]]
]  # the number of each step, and its micro-batches


@dataclass(frozen=True)
class Timing:
    """The measurements of the timed steps."""

    warmup_s: float  # seconds of all steps before the clock starts, compilation included
    steps_s: tuple[float, ...]
    """Device time of each step: from the end of the previous one to its own end."""
    peak_gib: float | None  # peak of memory in use since the first step
    reserved_gib: float | None  # peak of memory that PyTorch reserved on a GPU, in use or not
    loss_nats: float
    """Mean over valid tokens of the last step; with several ranks, this rank's part of the mean."""
    valid_tokens: int
    positions: int  # tokens per step, padding included
    compiler: dict[str, object]

    @property
    def step_s(self) -> float:
        """The median step time."""
        return statistics.median(self.steps_s)

    @property
    def tokens_per_s(self) -> float:
        """Positions per second, padding included, at the median step."""
        return self.positions / self.step_s

    def numbers(self) -> Row:
        """Return the columns for a row of results."""
        around = percentiles(self.steps_s)
        return {
            "unit": "s",
            "samples": list(self.steps_s),
            "step_s": self.step_s,
            "step_p10_s": around.p10,
            "step_p90_s": around.p90,
            "step_p99_s": around.p99,
            "step_max_s": max(self.steps_s),
            "slowest_steps": slowest(self.steps_s, range(len(self.steps_s))),
            "step_mean_s": statistics.fmean(self.steps_s),
            "timed_steps": len(self.steps_s),
            "warmup_s": self.warmup_s,
            "tokens_per_s": self.tokens_per_s,
            "valid_tokens_per_s": self.valid_tokens / self.step_s,
            "positions": self.positions,
            "peak_gib": self.peak_gib,
            "peak_reserved_gib": self.reserved_gib,
            "loss_nats": self.loss_nats,
            **self.compiler,
        }


def time_steps(
    subject: Subject, numbered: NumberedBatches, backend: Backend, *, warmup: int, steps: int
) -> Timing:
    """Take the first `warmup` steps of `numbered`, then `steps` timed ones.

    The host never waits for the device between timed steps, as in training: events on the device's
    clock separate them.
    """
    # reset before the warm-up: capturing a graph allocates memory, replaying it does not
    backend.reset_peak_memory()
    began = backend.mark()
    coming = iter(numbered)
    for step, batches in islice(coming, warmup):
        result = subject(batches, step)
    backend.synchronize()
    marks = [backend.mark()]
    for step, batches in islice(coming, steps):
        result = subject(batches, step)
        marks.append(backend.mark(result.grad_norm))
    backend.synchronize()
    valid, loss = backend.read([result.valid_tokens, result.sums["loss"]])
    used = backend.memory_use()
    return Timing(
        warmup_s=backend.seconds_between(began, marks[0]),
        steps_s=tuple(backend.seconds_between(first, last) for first, last in pairwise(marks)),
        peak_gib=used.peak_gib,
        reserved_gib=used.peak_reserved_gib,
        loss_nats=loss / max(valid, 1),
        valid_tokens=valid,
        positions=result.positions,
        compiler=subject.compile_facts(),
    )


def compile_anew() -> None:
    """Drop code compiled for other shapes, so that a shape is compiled as in a run of its own."""
    torch.compiler.reset()


@dataclass(frozen=True)
class CostFit:
    """A linear model of step time: a fixed cost and a cost per token."""

    fixed_s: float
    per_token_s: float
    worst_error: float  # largest relative error of the line over the measured steps

    @property
    def marginal_tokens_per_s(self) -> float:
        """The speed of an infinitely large batch."""
        return 1 / self.per_token_s


def fit_cost(tokens: Sequence[int], seconds: Sequence[float]) -> CostFit | None:
    """Fit `seconds = fixed + per_token * tokens` by least squares of the relative errors.

    None for fewer than three sizes, or if more tokens do not take longer.
    """
    if len(set(tokens)) < 3:
        return None
    x = torch.tensor(tokens, dtype=torch.float64)
    y = torch.tensor(seconds, dtype=torch.float64)
    design = torch.stack([torch.ones_like(x), x], 1) / y[:, None]
    fixed, per_token = torch.linalg.lstsq(design, torch.ones(len(y), 1).double()).solution[:, 0]
    if per_token <= 0:
        return None
    errors = ((fixed + per_token * x) / y - 1).abs()
    return CostFit(fixed.item(), per_token.item(), errors.max().item())


# Calls in turns, each with a cold cache.

SPREAD_BYTES = 2**28  # bytes written before each call on a GPU: several times its last-level cache
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Clock:
    """The device, the number of rounds and the time limit of a timing."""

    backend: Backend
    repeats: int
    limit_s: float  # time limit of one case; at least `LEAST_ROUNDS` rounds are run

    def turns(self, runs: list[Callable[[], object]]) -> list[list[float]]:
        """Return the device seconds of all runs in turns, in rounds of alternating direction.

        Before each call memory is overwritten to flush the caches.
        """
        backend, began = self.backend, time.perf_counter()
        size = SPREAD_BYTES if backend.records else 0
        flushed = torch.empty(size, dtype=torch.uint8, device=backend.device)
        found: list[list[float]] = [[] for _ in runs]
        for index in range(max(self.repeats, LEAST_ROUNDS) if self.repeats > 1 else 1):
            if index >= LEAST_ROUNDS and time.perf_counter() - began > self.limit_s:
                break
            order = range(len(runs)) if index % 2 == 0 else reversed(range(len(runs)))
            for which in order:
                flushed.zero_()
                found[which].append(backend.seconds_of(runs[which]))
        return found


def kernel_dtype(backend: Backend) -> str:
    """Return the dtype of kernels' inputs: bf16 on a GPU, else fp32, where they are interpreted."""
    return "bf16" if backend.records else "fp32"


def times(seconds: list[float]) -> Row:
    """Return columns with the samples, percentiles, the median's interval and the variation."""
    interval = median_interval(seconds)
    return {
        "unit": "s",
        "samples": seconds,
        **{f"{name}_s": value for name, value in asdict(percentiles(seconds)).items()},
        "low_s": interval.low,
        "high_s": interval.high,
        "variation": variation(seconds),
    }


# The device's peak rates, which every benchmark measures before its cases.

SHORTEST_S, REPEATS = 2e-3, 10
"""Sizes grow until one call takes `SHORTEST_S`; the fastest of `REPEATS` calls counts."""
LARGEST_SIDE, LARGEST_COUNT = 8192, 2**28


@dataclass(frozen=True)
class Roofline:
    """The device's peak rates, from its data sheet and as measured."""

    sheet_flops: float | None
    """Peak FLOP/s in the compute dtype; None for a device outside the table."""
    matmul_flops: float  # FLOP/s of a large square matmul in the compute dtype
    copy_bytes: float  # bytes per second of a large copy, reads and writes together

    def mfu(self, flops_per_s: float) -> dict[str, float | None]:
        """Return `flops_per_s` as a fraction of each peak."""
        sheet = self.sheet_flops
        return {
            "mfu_frac": None if sheet is None else flops_per_s / sheet,
            "mfu_of_matmul_frac": flops_per_s / self.matmul_flops,
        }


def measure_roofline(backend: Backend, dtype: str) -> Roofline:
    """Measure the device's peak rates in the compute dtype called `dtype`."""

    def fastest(run: Callable[[], object]) -> float:
        run()
        return min(backend.seconds_of(run) for _ in range(REPEATS))

    seconds, side = 0.0, 128
    while seconds < SHORTEST_S and side < LARGEST_SIDE:
        side *= 2
        a, b = (torch.randn(side, side, device=backend.device) for _ in range(2))
        a, b = a.to(DTYPES[dtype]), b.to(DTYPES[dtype])
        with backend.matmul_precision(dtype):
            seconds = fastest(partial(torch.mm, a, b, out=a @ b))
    matmul_flops = 2 * side**3 / seconds
    seconds, count = 0.0, 2**18
    while seconds < SHORTEST_S and count < LARGEST_COUNT:
        count *= 4
        source = torch.ones(count, device=backend.device)
        seconds = fastest(partial(torch.empty_like(source).copy_, source))
    device = device_called(backend.name())
    sheet = None if device is None else device.peak_flops(dtype)
    return Roofline(sheet, matmul_flops, 2 * source.nbytes / seconds)
