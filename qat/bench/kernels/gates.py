"""The gates of one kernel, in order: compile, correct, fast. Behind one that fails none is run."""

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from qat.backend.base import Backend
from qat.bench.measure import Roofline
from qat.bench.stats import compare, median_interval, percentiles, variation
from qat.kernels.dispatch import HAS_TRITON, computing_by
from qat.kernels.tuned import Key

# What the kernel bench knows of a kernel: its inputs, its two ways, what a call must move.

Size = Mapping[str, int]
"""Dimensions by letter, as the kernel's own module names them."""
Inputs = dict[str, Any]
"""Tensors by name, alone or in tuples, and whatever else a call takes."""
Outputs = dict[str, Tensor]
Way = Callable[[Inputs, Size], Outputs]
"""A call; it may write into its inputs, and what it wrote is among its outputs."""


@dataclass(frozen=True)
class Room:
    """Where inputs are made: a device, its compute dtypes and a seed."""

    device: torch.device
    dtype: torch.dtype
    half: torch.dtype
    """For kernels that take half precision alone."""
    generator: torch.Generator

    @classmethod
    def seeded(cls, device: torch.device, seed: int, *, is_interpreted: bool) -> "Room":
        """bfloat16; the interpreter rounds that wrongly, so there float32 and float16."""
        dtype, half = torch.bfloat16, torch.bfloat16
        if is_interpreted:
            dtype, half = torch.float32, torch.float16
        return cls(device, dtype, half, torch.Generator(device).manual_seed(seed))

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
        return self.compared(self.reference(doubled(inputs), size))

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


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:  # noqa: ANN401 - any tree
    """`value` with every tensor of its dicts, tuples and lists changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped(change, item) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(mapped(change, item) for item in value)
    return value


def copied(inputs: Inputs) -> Inputs:
    """Inputs that a call may write into."""
    return mapped(torch.clone, inputs)


def doubled(inputs: Inputs) -> Inputs:
    """A copy whose floats are float64."""
    return mapped(lambda t: t.double() if t.is_floating_point() else t.clone(), inputs)


def num_bytes(*values: object) -> int:
    """Bytes that tensors hold, at any depth."""
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    mapped(add, values)
    return total


# The configurations that tuning tries, by kernel; each is one of `qat.kernels.tuned`.
#
# Triton is imported where a space is asked for: without it there is nothing to tune.

PACKED = (
    (16, 32, 1, 4, 64),
    (16, 32, 1, 4, 96),
    (8, 32, 1, 2, 96),
    (32, 32, 1, 4, 128),
    (4, 128, 1, 4, 64),
    (4, 128, 1, 4, 128),
    (2, 128, 1, 2, 96),
    (8, 128, 1, 8, 96),
)
"""Rows, units, depth, warps and registers."""
DENSE = ((4, 512, 1, 4), (4, 512, 5, 4), (8, 512, 1, 8), (2, 512, 5, 4), (4, 1024, 2, 4))


def matvec_space(size: Size, bits: int, *, is_short: bool) -> Space:
    """Tiles of a matrix times a vector; with `is_short`, of tensor cores where they can."""
    from qat.kernels.lut_matvec import MMA_BITS, MMA_INPUTS, UNIT, Tile, tile_for

    I, is_dense = size["I"], bits == 16
    key = (size["O"], I, bits)
    if is_short and bits in MMA_BITS and I % MMA_INPUTS == 0:
        return _mma_space(key)
    listed = DENSE if is_dense else PACKED
    tiles = [Tile(*t[:4], registers=0 if is_dense else t[4]) for t in listed]
    # not those of which more than a third would lie outside the row
    widths = [tile.units * tile.depth * (1 if is_dense else UNIT) for tile in tiles]
    fitting = [t for t, w in zip(tiles, widths, strict=True) if I % w == 0 or I > 2 * w]
    return _space("lut_matvec", key, tile_for(*key), fitting)


def _mma_space(key: tuple[int, int, int]) -> Space:
    from qat.kernels.lut_matvec import UNIT, MmaTile, mma_tile_for

    units = key[1] // UNIT
    cuts = [MmaTile(*one) for one in product((1, 2, 4), (1, 2, 4, 8, 16))]
    fitting = [cut for cut in cuts if 4 * cut.units * cut.warps <= units]
    return _space("lut_mma", key, mma_tile_for(*key), fitting)


def form_space(size: Size, bits: int, *, is_packed: bool) -> Space:
    """Tiles of a weight that is formed."""
    from qat.kernels.lut_weight import FormTile

    key = (size["O"], size["I"], bits if is_packed else 0, 2**bits)
    return _space("lut_form", key, FormTile(), [FormTile(w) for w in (1024, 2048, 8192)])


def gated_space(size: Size, kernel: str) -> Space:
    """Columns of a gated unit's program."""
    from triton import next_power_of_2

    from qat.kernels.glu import LARGEST_BLOCK, Cut

    most = next_power_of_2(size["F"])
    cuts = [Cut(block, w) for block, w in product((512, 1024, 2048, 4096), (2, 4, 8))]
    fitting = [cut for cut in cuts if cut.block <= most]
    return _space(kernel, (size["F"],), Cut(min(LARGEST_BLOCK, most)), fitting)


def gather_space(size: Size, kernel: str) -> Space:
    """Pieces of chosen words' weights."""
    from qat.kernels.head import Gather

    listed = product((4, 8, 16, 32), (128, 256, 512, 1024), (2, 4, 8))
    pieces = [Gather(*one) for one in listed if 1024 <= one[0] * one[1] / (one[2] / 4) <= 8192]
    return _space(kernel, (size["K"], size["D"]), Gather(), pieces)


def block_pass_space(size: Size) -> Space:
    """Blocks of a program of the pass over logits."""
    from qat.kernels.topk import BlockPass

    listed = [BlockPass(*one) for one in product((16, 32, 64, 128), (2, 4, 8))]
    return _space("top_k_blocks", (size["V"],), BlockPass(), listed)


def _space(kernel: str, key: tuple[int, ...], default: tuple, listed: list) -> Space:
    return Space(kernel, key, default, tuple(c for c in dict.fromkeys(listed) if c != default))


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
        size,
        [seconds / len(inputs) for seconds in kernel[0]] if kernel else [],
        [seconds / len(few) for seconds in reference],
        len(inputs),
        moved,
        case.flops(size),
    )


def spread_inputs(case: KernelCase, size: Size, seeds: Seeds, *, is_spread: bool) -> list[Inputs]:
    """As many different inputs as hold `SPREAD_BYTES`, but one where all fit into no cache."""
    inputs = [case.inputs(seeds.room(0), size)]
    if is_spread:
        count = min(SPREAD_BYTES // max(num_bytes(inputs[0]), 1), MOST_CALLS)
        inputs += [case.inputs(seeds.room(offset), size) for offset in range(1, count)]
    return inputs


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
