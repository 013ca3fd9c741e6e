"""The gates of one kernel, in order: compile, correct, fast. Behind one that fails none is run."""

import gc
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from qat.backend.base import Backend
from qat.bench.measure import SPREAD_BYTES, Clock, Roofline, Row, times
from qat.bench.stats import compare
from qat.kernels.dispatch import HAS_TRITON, computing_by
from qat.kernels.tuned import Key

Size = Mapping[str, int]
"""Dimensions by letter, as the kernel's own module names them."""
Inputs = dict[str, Any]
"""Tensors by name, alone or in tuples, and whatever else a call takes."""
Outputs = dict[str, Tensor]
Way = Callable[[Inputs, Size], Outputs]
"""A call; it may write into its inputs, and what it wrote is among its outputs."""


@dataclass(frozen=True)
class Room:
    """Where inputs are made: a device, its compute dtypes and a generator."""

    device: torch.device
    dtype: torch.dtype
    half: torch.dtype
    """For kernels that take half precision alone."""
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers."""
        made = torch.randn(shape, device=self.device, generator=self.generator)
        return made.to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Float32 between `low` and `high`."""
        made = torch.rand(shape, device=self.device, generator=self.generator)
        return made * (high - low) + low

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Whole numbers below `high`."""
        return torch.randint(high, shape, device=self.device, dtype=dtype, generator=self.generator)

    def positions(self, B: int, S: int) -> Tensor:
        """`(B, S)`: places inside documents of random lengths, which begin anew with 0."""
        is_start = self.uniform(B, S) < 0.1
        places = torch.arange(S, device=self.device).expand(B, S)
        first = torch.where(is_start, places, 0).cummax(1).values
        return (places - first).contiguous()


class Space(NamedTuple):
    """The configurations that a kernel may run with at one size (`qat.kernels.tuned`)."""

    kernel: str
    key: Key
    default: tuple
    others: tuple[tuple, ...]


@dataclass(frozen=True)
class KernelCase:
    """A kernel beside the plain-PyTorch reference of the same signature."""

    name: str
    inputs: Callable[[Room, Size], Inputs]
    kernel: Way
    reference: Way
    size: Callable[[Mapping[str, Any]], Size]
    """Of a model's configuration: where speed is measured."""
    odd: tuple[Size, ...]
    """Where results are checked everywhere: no dimension fills the kernel's tiles."""
    wide: tuple[Size, ...] = ()
    """Where results are checked on a GPU besides: as wide as real models, no multiple of a tile."""
    exact: Way | None = None
    """In float64 from the inputs as they are; without it the reference on float64 inputs."""
    compared: Callable[[Outputs], Outputs] = lambda outputs: outputs
    """What of the results of both ways is compared with the exact ones."""
    moved: Callable[[Inputs, Outputs, Size], int] | None = None
    """Bytes; without it those of all inputs and outputs, once each."""
    flops: Callable[[Size], float] = lambda size: 0.0
    slack: float = 2e-6
    """Beyond eager PyTorch's error, as a share of the largest exact value."""
    floor: float = 0.0
    """What the largest exact value counts for at least: 1 for results that are logarithms."""
    space: Callable[[Size], Space] | None = None
    """What there is to tune, where there is anything."""
    counts: bool = True
    """Whether the smallest share of the roofline is looked for here too."""

    def truth(self, inputs: Inputs, size: Size) -> Outputs:
        """The exact results."""
        if self.exact is not None:
            return self.exact(copied(inputs), size)
        wide = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)
        return self.compared(self.reference(copied(wide), size))

    def num_bytes(self, inputs: Inputs, outputs: Outputs, size: Size) -> int:
        """What a call reads and writes."""
        if self.moved is not None:
            return self.moved(inputs, outputs, size)
        return num_bytes(inputs) + num_bytes(outputs)


def ways(function: Way) -> dict[str, Way]:
    """Both ways of a function that chooses by `use_triton`."""

    def by(kernel: bool) -> Way:
        def run(inputs: Inputs, size: Size) -> Outputs:
            with computing_by(kernel):
                return function(inputs, size)

        return run

    return {"kernel": by(True), "reference": by(False)}


def copied(inputs: Inputs) -> Inputs:
    """Inputs that a call may write into."""
    return tree_map_only(Tensor, torch.clone, inputs)


def num_bytes(*values: object) -> int:
    """Bytes that tensors hold, at any depth."""
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


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
    worst, allowed = (
        (found - exact)[finite].abs().max().item() if finite.any() else 0.0
        for found in (kernel, eager)
    )
    if worst <= allowed + slack:
        return None
    return f"errs by {worst:.3g}, eager PyTorch by {allowed:.3g}"


FAULTS: tuple[type[Exception], ...] = (
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
if HAS_TRITON:
    from triton.runtime.errors import TritonError

    FAULTS += (TritonError,)
MESSAGE = 300


@dataclass(frozen=True)
class Refusal:
    """Which gate a kernel failed, and how."""

    gate: Literal["compile", "correct", "fast"]
    difference: str


@dataclass(frozen=True)
class Seeds:
    """Where inputs come from: a device, and a seed for each shape."""

    device: torch.device
    first: int
    is_interpreted: bool

    def room(self, offset: int) -> Room:
        """Inputs of the seed `first + offset`: bfloat16.

        The interpreter rounds that wrongly, so there float32 and float16.
        """
        dtypes = (torch.float32, torch.float16) if self.is_interpreted else (torch.bfloat16,) * 2
        seed = self.first + offset
        return Room(self.device, *dtypes, torch.Generator(self.device).manual_seed(seed))

    def sizes(self, case: KernelCase) -> tuple[Size, ...]:
        """Shapes to check: wide ones too where kernels are compiled."""
        return case.odd if self.is_interpreted else (*case.odd, *case.wide)


def compiles(case: KernelCase, seeds: Seeds) -> Refusal | None:
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


def is_correct(case: KernelCase, seeds: Seeds) -> Refusal | None:
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


def worst_of(case: KernelCase, found: Outputs, eager: Outputs, exact: Outputs) -> str | None:
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

MOST_CALLS = 64
REFERENCE_CALLS = 4


@dataclass(frozen=True)
class Speed:
    """What the turns took, per call."""

    kernel_s: list[float]
    """Empty where no kernel is compiled."""
    reference_s: list[float]
    calls: int
    num_bytes: int
    """Of one call."""
    flops: float


def measure(case: KernelCase, size: Size, seeds: Seeds, clock: Clock) -> Speed:
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
        [seconds / len(inputs) for seconds in kernel[0]] if kernel else [],
        [seconds / len(few) for seconds in reference],
        len(inputs),
        moved,
        case.flops(size),
    )


def spread_inputs(case: KernelCase, size: Size, seeds: Seeds, *, is_spread: bool) -> list[Inputs]:
    """As many different inputs as hold `SPREAD_BYTES`, but one where all fit into no cache."""
    inputs = [case.inputs(seeds.room(0), size)]
    count = min(SPREAD_BYTES // max(num_bytes(inputs[0]), 1), MOST_CALLS) if is_spread else 1
    return inputs + [case.inputs(seeds.room(offset), size) for offset in range(1, count)]


def recorded(
    case: KernelCase, size: Size, inputs: list[Inputs], backend: Backend
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
