"""Times steps: the compiler and the first steps outside the clock, then each step on its own."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qat.backend.base import DTYPES, Backend
from qat.bench.student import Subject
from qat.data.packing import Batch
from qat.models.cost import device_called


@dataclass(frozen=True)
class Timing:
    """What the timed steps took."""

    warmup_s: float
    """All steps before the clock, the compiler's work among them."""
    steps_s: tuple[float, ...]
    """Device time of each step: from the end of the one before to its own end."""
    peak_gib: float | None
    """Most memory held from the first step on."""
    loss_nats: float
    """Mean over valid tokens; the same student and data at every step."""
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

    def numbers(self) -> dict[str, object]:
        """The fields of a row of results."""
        low, high = spread(self.steps_s)
        return {
            "unit": "s",
            "samples": list(self.steps_s),
            "step_s": self.step_s,
            "step_p10_s": low,
            "step_p90_s": high,
            "step_mean_s": statistics.fmean(self.steps_s),
            "timed_steps": len(self.steps_s),
            "warmup_s": self.warmup_s,
            "tokens_per_s": self.tokens_per_s,
            "valid_tokens_per_s": self.valid_tokens / self.step_s,
            "positions": self.positions,
            "peak_gib": self.peak_gib,
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
    pairs = zip(marks, marks[1:], strict=False)
    valid, loss = backend.read([result.valid_tokens, result.sums["loss"]])
    return Timing(
        warmup_s=backend.seconds_between(began, marks[0]),
        steps_s=tuple(backend.seconds_between(first, last) for first, last in pairs),
        peak_gib=backend.peak_memory_gib(),
        loss_nats=loss / max(valid, 1),
        valid_tokens=valid,
        positions=result.positions,
        compiler=subject.compile_facts(),
    )


def compile_anew() -> None:
    """Forget what was compiled for other shapes: a run of one shape compiles for that shape."""
    torch.compiler.reset()


def spread(seconds: Sequence[float]) -> tuple[float, float]:
    """The 10th and 90th percentile, between the nearest ranks."""
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return tenths[0], tenths[-1]


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


# How fast this device really is: the rates that every benchmark measures before its cases.

LARGEST, SHORTEST_S, REPEATS = 8192, 2e-3, 10


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
    device = device_called(backend.name())
    with backend.matmul_precision(dtype):
        matmul = _measure_matmul(backend, DTYPES[dtype])
    sheet = None if device is None else device.peak_flops(dtype)
    return Roofline(sheet, matmul, _measure_copy(backend))


def _measure_matmul(backend: Backend, dtype: torch.dtype) -> float:
    n, best = 256, math.inf
    while True:
        a, b = (torch.randn(n, n, device=backend.device).to(dtype) for _ in range(2))
        out = a @ b
        best = _fastest(backend, lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
        if best >= SHORTEST_S or n >= LARGEST:
            return 2 * n**3 / best
        n *= 2


def _measure_copy(backend: Backend) -> float:
    count = 2**20
    while True:
        source = torch.ones(count, device=backend.device)
        target = torch.empty_like(source)
        best = _fastest(backend, lambda t=target, s=source: t.copy_(s))
        if best >= SHORTEST_S or count >= 2**28:
            return 2 * source.nbytes / best
        count *= 4


def _fastest(backend: Backend, run: object) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        times.append(backend.seconds_of(run))
    return min(times)
