"""The gates of one kernel, in order: compile, correct, fast. Behind one that fails none is run."""

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from qat.backend.base import Backend
from qat.bench.kernels.case import Case, Inputs, Outputs, Room, Size, copied, num_bytes
from qat.bench.measure import Roofline
from qat.bench.stats import compare, median_interval, percentiles, variation
from qat.kernels.dispatch import HAS_TRITON

# Three-way comparison of a kernel: against float64, and against eager PyTorch in its dtype.


def difference(kernel: Tensor, eager: Tensor, exact: Tensor, slack: float = 0.0) -> str | None:
    """What is wrong with the kernel's result; None if nothing is.

    It may err by what eager PyTorch errs at most in the same dtype, plus `slack`. Where the exact
    result is infinite, the kernel's must be the same infinity.
    """
    if kernel.shape != exact.shape:
        return f"shape {tuple(kernel.shape)}, not {tuple(exact.shape)}"
    finite = exact.isfinite()
    kernel, eager = kernel.double(), eager.double()
    if not bool(kernel[finite].isfinite().all()):
        return "the kernel gave NaN or infinity"
    if not bool((kernel == exact)[~finite].all()):
        return "the kernel misses an infinity"
    worst, allowed = (_largest((found - exact)[finite]) for found in (kernel, eager))
    if worst <= allowed + slack:
        return None
    return f"errs by {worst:.3g}, eager PyTorch by {allowed:.3g}"


def _largest(errors: Tensor) -> float:
    return errors.abs().max().item() if errors.numel() else 0.0


Gate = Literal["compile", "correct", "fast"]


def _faults_of_triton() -> tuple[type[Exception], ...]:
    if not HAS_TRITON:
        return ()
    from triton.runtime.errors import TritonError

    return (TritonError,)


FAULTS = (
    *_faults_of_triton(),
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a kernel that does not compile or launch may raise, through Triton or PyTorch."""
MESSAGE = 300


@dataclass(frozen=True)
class Refusal:
    """Which gate a kernel failed, and how."""

    gate: Gate
    difference: str


@dataclass(frozen=True)
class Seeds:
    """Where inputs come from: a device, and a seed for each shape."""

    device: torch.device
    first: int
    is_interpreted: bool

    def room(self, offset: int) -> Room:
        """Inputs of the seed `first + offset`."""
        return Room.seeded(self.device, self.first + offset, is_interpreted=self.is_interpreted)

    def sizes(self, case: Case) -> tuple[Size, ...]:
        """Shapes to check: wide ones too where kernels are compiled."""
        return case.odd if self.is_interpreted else (*case.odd, *case.wide)


def compiles(case: Case, seeds: Seeds) -> Refusal | None:
    """Build and launch the kernel once for every shape."""
    for offset, size in enumerate(seeds.sizes(case)):
        inputs = case.inputs(seeds.room(offset), size)
        try:
            with torch.no_grad():
                case.kernel(inputs, size)
            if seeds.device.type == "cuda":
                torch.cuda.synchronize(seeds.device)
        except FAULTS as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            lines = f"{type(error).__name__}: {error}".strip().splitlines()
            return Refusal("compile", f"at {_shown(size)}: {' / '.join(lines)[:MESSAGE]}")
    return None


def is_correct(case: Case, seeds: Seeds) -> Refusal | None:
    """Compare with eager PyTorch and with float64, at every shape.

    What the kernel allocates is full of NaN before it writes; it runs twice, the second time on
    whatever the first left in buffers that it keeps.
    """
    for offset, size in enumerate(seeds.sizes(case)):
        inputs = case.inputs(seeds.room(offset), size)
        with torch.no_grad():
            eager, exact = case.reference(copied(inputs), size), case.truth(inputs, size)
            for _ in range(2):
                with poisoned():
                    found = case.kernel(copied(inputs), size)
                wrong = worst_of(case, found, eager, exact)
                if wrong:
                    return Refusal("correct", f"{wrong} at {_shown(size)}, seed {seeds.first}")
    gc.collect()
    return None


def worst_of(case: Case, found: Outputs, eager: Outputs, exact: Outputs) -> str | None:
    """The first result in which the kernel is worse than eager PyTorch; None if there is none."""
    found, eager = case.compared(found), case.compared(eager)
    if found.keys() != exact.keys():
        return f"results {', '.join(found)}, expected {', '.join(exact)}"
    for name, truth in exact.items():
        truth = truth.double()
        finite = truth[truth.isfinite()]
        size = finite.abs().max().item() if finite.numel() else 0.0
        wrong = difference(found[name], eager[name], truth, case.slack * max(size, case.floor))
        if wrong:
            return f"{name} {wrong} (largest {size:.3g})"
    return None


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that is not written holds NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that other operators are not deterministic
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=is_warning)


def _shown(size: Size) -> str:
    return " ".join(f"{name}={value}" for name, value in size.items())


# Times a kernel and its reference in turns, each time on data that no cache holds.

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
