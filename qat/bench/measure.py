"""Clocks of the benchmarks: of steps, of calls that take turns, and of the device itself."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise

import torch

from qat.backend.base import DTYPES, Backend
from qat.bench.stats import median_interval, percentiles, variation
from qat.bench.student import Subject
from qat.data.packing import Batch
from qat.models.cost import device_called

Row = dict[str, object]
"""Of results."""


@dataclass(frozen=True)
class Timing:
    """What the timed steps took."""

    warmup_s: float
    """All steps before the clock, the compiler's work among them."""
    steps_s: tuple[float, ...]
    """Device time of each step: from the end of the one before to its own end."""
    peak_gib: float | None
    """Most memory held from the first step on."""
    reserved_gib: float | None
    """Most memory that PyTorch took from a GPU meanwhile, in use or not."""
    loss_nats: float
    """Mean over valid tokens; the same student and data at every step. Of several ranks the part
    that this one's tokens add to the mean over all."""
    valid_tokens: int
    positions: int
    """Tokens of one step, padding included."""
    compiler: dict[str, object]

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.steps_s)

    @property
    def tokens_per_s(self) -> float:
        """Positions per second, padding included, at the median step."""
        return self.positions / self.step_s

    def numbers(self) -> Row:
        """The fields of a row of results."""
        around = percentiles(self.steps_s)
        return {
            "unit": "s",
            "samples": list(self.steps_s),
            "step_s": self.step_s,
            "step_p10_s": around.p10,
            "step_p90_s": around.p90,
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
    subject: Subject, batches: Sequence[Batch], backend: Backend, *, warmup: int, steps: int
) -> Timing:
    """Take `warmup` steps, then `steps` timed ones, all over the same micro-batches.

    Nothing waits for the device between the timed steps, as in training: they are told apart by
    marks on its own clock.
    """
    # from here on: a replayed graph asks for no memory, only its recording did
    backend.reset_peak_memory()
    began = backend.mark()
    for step in range(warmup):
        result = subject(batches, step)
    backend.synchronize()
    marks = [backend.mark()]
    for step in range(warmup, warmup + steps):
        result = subject(batches, step)
        marks.append(backend.mark(result.grad_norm))
    backend.synchronize()
    valid, loss = backend.read([result.valid_tokens, result.sums["loss"]])
    return Timing(
        warmup_s=backend.seconds_between(began, marks[0]),
        steps_s=tuple(backend.seconds_between(first, last) for first, last in pairwise(marks)),
        peak_gib=backend.peak_memory_gib(),
        reserved_gib=backend.peak_reserved_gib(),
        loss_nats=loss / max(valid, 1),
        valid_tokens=valid,
        positions=result.positions,
        compiler=subject.compile_facts(),
    )


def compile_anew() -> None:
    """Forget what was compiled for other shapes: a run of one shape compiles for that shape."""
    torch.compiler.reset()


@dataclass(frozen=True)
class CostFit:
    """Step time as a fixed cost and one per token."""

    fixed_s: float
    per_token_s: float
    worst_error: float
    """Largest deviation of a measured step from the line, as a share of it."""

    @property
    def marginal_tokens_per_s(self) -> float:
        """What an endless batch would reach."""
        return 1 / self.per_token_s


def fit_cost(tokens: Sequence[int], seconds: Sequence[float]) -> CostFit | None:
    """The line `seconds = fixed + per_token * tokens` of least relative squares.

    None for fewer than three sizes, or where more tokens take no longer.
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


# Calls that take turns, each time on data that no cache holds.

SPREAD_BYTES = 2**28
"""What is written before each call on a GPU: several times the last cache of any."""
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Clock:
    """How calls are timed: on which device, how often, and for how long at most."""

    backend: Backend
    repeats: int
    limit_s: float
    """Of one case; at least `LEAST_ROUNDS` rounds are taken all the same."""

    def turns(self, runs: list[Callable[[], object]]) -> list[list[float]]:
        """Device seconds of every run, one after the other, in rounds of alternating direction.

        Before each one memory is written until no cache holds anything else.
        """
        backend, began = self.backend, time.perf_counter()
        size = SPREAD_BYTES if backend.records() else 0
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
    """What kernels' inputs are in: bf16 on a GPU, fp32 elsewhere, where they are interpreted."""
    return "bf16" if backend.records() else "fp32"


def times(seconds: list[float]) -> Row:
    """Percentiles, the median's interval and the variation of some times, and themselves."""
    interval = median_interval(seconds)
    return {
        "unit": "s",
        "samples": seconds,
        **{f"{name}_s": value for name, value in asdict(percentiles(seconds)).items()},
        "low_s": interval.low,
        "high_s": interval.high,
        "variation": variation(seconds),
    }


# How fast this device really is: the rates that every benchmark measures before its cases.

SHORTEST_S, REPEATS = 2e-3, 10
"""Sizes grow until one call takes so long; of so many the fastest counts."""
LARGEST_SIDE, LARGEST_COUNT = 8192, 2**28


@dataclass(frozen=True)
class Roofline:
    """How fast the device is, by its data sheet and by what was measured on the spot."""

    sheet_flops: float | None
    """Peak FLOP/s in the compute dtype, or None for a device outside the table."""
    matmul_flops: float
    """FLOP/s of a large square matmul in the compute dtype."""
    copy_bytes: float
    """Bytes per second read and written by a large copy."""

    def mfu(self, flops_per_s: float) -> dict[str, float | None]:
        """The share of each peak that `flops_per_s` is."""
        sheet = self.sheet_flops
        return {
            "mfu_frac": None if sheet is None else flops_per_s / sheet,
            "mfu_of_matmul_frac": flops_per_s / self.matmul_flops,
        }


def measure_roofline(backend: Backend, dtype: str) -> Roofline:
    """Peaks of the device for the compute dtype called `dtype`."""

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
