"""Times a kernel and its reference in turns, each time on data that no cache holds."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from qat.backend.base import Backend
from qat.bench.kernels.case import Case, Inputs, Outputs, Size, num_bytes
from qat.bench.kernels.gates import Refusal, Seeds
from qat.bench.measure import Roofline
from qat.bench.stats import compare, median_interval, percentiles, variation

SPREAD_BYTES = 2**28
"""What a recorded run reads: several times the last cache of any GPU."""
MOST_CALLS = 64
REFERENCE_CALLS = 4
LEAST_ROUNDS = 5

Row = dict[str, object]


@dataclass(frozen=True)
class Clock:
    """How measurements are taken: a device, how often, and for how long at most."""

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
                first = backend.mark()
                runs[which]()
                found[which].append(backend.seconds_between(first, backend.mark()))
        return found


@dataclass(frozen=True)
class Speed:
    """What the turns took, per call."""

    size: Size
    kernel_s: list[float]
    """Empty where no kernel is compiled."""
    reference_s: list[float]
    calls: int
    num_bytes: int
    """Of one call."""
    flops: float


def measure(case: Case, size: Size, seeds: Seeds, clock: Clock) -> Speed:
    """Interleaved times of the kernel, recorded as one graph of several calls, and the reference.

    The reference is called as eager PyTorch is, launches included: one may wait for the host.
    """
    backend = clock.backend
    with torch.no_grad():
        inputs = spread_inputs(case, size, seeds, is_spread=backend.records())
        moved = case.num_bytes(inputs[0], case.reference(dict(inputs[0]), size), size)
        few = inputs[:REFERENCE_CALLS]
        runs = [lambda: [case.reference(each, size) for each in few]]
        runs[0]()
        if backend.records():
            runs.append(recorded(case, size, inputs, backend))
        reference, *kernel = clock.turns(runs)
    return Speed(
        size,
        [seconds / len(inputs) for seconds in kernel[0]] if kernel else [],
        [seconds / len(few) for seconds in reference],
        len(inputs),
        moved,
        case.flops(size),
    )


def spread_inputs(case: Case, size: Size, seeds: Seeds, *, is_spread: bool) -> list[Inputs]:
    """As many different inputs as hold `SPREAD_BYTES`, but one where all fit into no cache."""
    inputs = [case.inputs(seeds.room(0), size)]
    if is_spread:
        count = min(SPREAD_BYTES // max(num_bytes(inputs[0]), 1), MOST_CALLS)
        inputs += [case.inputs(seeds.room(offset), size) for offset in range(1, count)]
    return inputs


def recorded(
    case: Case, size: Size, inputs: list[Inputs], backend: Backend
) -> Callable[[], object]:
    """A replay of the kernel's calls on all inputs; all results stay, each in memory of its own.

    One that wrote where the one before did would write into a cache.
    """

    def run() -> list[Outputs]:
        return [case.kernel(each, size) for each in inputs]

    run()
    backend.synchronize()
    replay, _ = backend.record(run)
    replay()
    return replay


def is_fast(speed: Speed) -> Refusal | None:
    """No kernel may be slower than its reference."""
    if not speed.kernel_s:
        return None
    found = compare(speed.reference_s, speed.kernel_s)
    if found.verdict != "slower":
        return None
    times = f"{found.after.median:.3g} s a call, the reference {found.before.median:.3g} s"
    return Refusal("fast", f"{times}, with separated intervals")


def numbers(speed: Speed, rates: Roofline) -> Row:
    """A case's times as a row of results holds them, with its share of the roofline.

    The bound is what its bytes take at the rate of a large copy, or its FLOPs at that of a large
    matmul, whichever is longer.
    """
    reference = statistics.median(speed.reference_s)
    common: Row = {"calls": speed.calls, "reference_s": reference}
    if not speed.kernel_s:
        return common
    median = statistics.median(speed.kernel_s)
    by_memory, by_matmul = speed.num_bytes / rates.copy_bytes, speed.flops / rates.matmul_flops
    return {
        **common,
        **times(speed.kernel_s),
        "over_reference": reference / median,
        "gb": speed.num_bytes / 1e9,
        "gb_per_s": speed.num_bytes / median / 1e9,
        "tflops": speed.flops / median / 1e12 if speed.flops else None,
        "bound": "memory" if by_memory >= by_matmul else "matmul",
        "roofline_frac": max(by_memory, by_matmul) / median,
    }


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
