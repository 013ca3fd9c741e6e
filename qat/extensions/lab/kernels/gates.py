"""The gates of a kernel, in order: compile, correct, resources, fast.

A failed gate skips the rest.
"""

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
from qat.extensions.bench.measure import SPREAD_BYTES, Clock, Roofline, Row, times
from qat.extensions.lab.kernels.resources import Compiled, most, taking
from qat.extensions.lab.stats import compare
from qat.kernels.dispatch import HAS_TRITON, computing_by
from qat.kernels.tuned import Key

Size = Mapping[str, int]  # dimensions by letter, named as in the kernel's module
Inputs = dict[str, Any]  # tensors by name, alone or in tuples, and other arguments of a call
Outputs = dict[str, Tensor]
Implementation = Callable[[Inputs, Size], Outputs]
"""One implementation. It may write into its inputs; what it wrote is among its outputs."""


@dataclass(frozen=True)
class InputMaker:
    """The device, compute dtypes and generator for making inputs."""

    device: torch.device
    dtype: torch.dtype
    half: torch.dtype  # the dtype for kernels that support only half precision
    generator: torch.Generator | None  # None for tensors without values

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return standard normal numbers."""
        made = torch.randn(shape, device=self.device, generator=self.generator)
        return made.to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return uniform float32 numbers in [low, high)."""
        made = torch.rand(shape, device=self.device, generator=self.generator)
        return made * (high - low) + low

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return uniform integers in [0, high)."""
        return torch.randint(high, shape, device=self.device, dtype=dtype, generator=self.generator)

    def positions(self, B: int, S: int) -> Tensor:
        """Return positions `(B, S)` in documents of random lengths, each starting at 0."""
        is_start = self.uniform(B, S) < 0.1
        places = torch.arange(S, device=self.device).expand(B, S)
        first = torch.where(is_start, places, 0).cummax(1).values
        return (places - first).contiguous()


class Space(NamedTuple):
    """The configurations that a kernel may run with at one size (see `qat.kernels.tuned`)."""

    kernel: str
    key: Key
    default: tuple
    others: tuple[tuple, ...]


@dataclass(frozen=True)
class KernelCase:
    """A kernel and the plain-PyTorch reference of the same signature."""

    name: str
    inputs: Callable[[InputMaker, Size], Inputs]
    kernel: Implementation
    reference: Implementation
    size: Callable[[Mapping[str, Any]], Size]
    """Maps a model's configuration to the size that is timed."""
    odd: tuple[Size, ...]
    """Sizes that are checked everywhere: no dimension is a multiple of the kernel's tiles."""
    wide: tuple[Size, ...] = ()
    """Sizes that are also checked on a GPU: as wide as real models, not a multiple of a tile."""
    exact: Implementation | None = None
    """Computes the results in float64 from the inputs; None runs the reference in float64."""
    compared: Callable[[Outputs], Outputs] = lambda outputs: outputs
    """Selects the results of both implementations that are compared with the exact ones."""
    moved: Callable[[Inputs, Outputs, Size], int] | None = None
    """Counts the bytes that a call moves; None counts all inputs and outputs once."""
    flops: Callable[[Size], float] = lambda size: 0.0
    slack: float = 2e-6
    """Allowed error beyond that of eager PyTorch, as a fraction of the largest exact value."""
    floor: float = 0.0
    """Lower bound of the largest exact value in `slack`: 1 for results that are logarithms."""
    space: Callable[[Size], Space] | None = None
    """The configurations to tune; None if there are none."""
    counts: bool = True
    """True if this kernel counts in the search for the smallest fraction of the roofline."""

    def truth(self, inputs: Inputs, size: Size) -> Outputs:
        """Return the exact results in float64."""
        if self.exact is not None:
            return self.exact(copied(inputs), size)
        wide = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)
        return self.compared(self.reference(copied(wide), size))

    def num_bytes(self, inputs: Inputs, outputs: Outputs, size: Size) -> int:
        """Return the bytes that a call reads and writes."""
        if self.moved is not None:
            return self.moved(inputs, outputs, size)
        return num_bytes(inputs) + num_bytes(outputs)


def dispatched(function: Implementation) -> dict[str, Implementation]:
    """Return both implementations of a function that dispatches by `use_triton`."""

    def by(kernel: bool) -> Implementation:
        def run(inputs: Inputs, size: Size) -> Outputs:
            with computing_by(kernel):
                return function(inputs, size)

        return run

    return {"kernel": by(True), "reference": by(False)}


def copied(inputs: Inputs) -> Inputs:
    """Copy all tensors, so that a call may write into them."""
    return tree_map_only(Tensor, torch.clone, inputs)


def num_bytes(*values: object) -> int:
    """Return the bytes of all tensors, at any depth."""
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


# Three-way comparison of a kernel: against float64, and against eager PyTorch in the same dtype.


def difference(kernel: Tensor, eager: Tensor, exact: Tensor, slack: float = 0.0) -> str | None:
    """Return what is wrong with the kernel's result; None if it is correct.

    Its largest error may be that of eager PyTorch in the same dtype, plus `slack`. Where the exact
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
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions of a kernel that does not compile or launch, from Triton or PyTorch."""
if HAS_TRITON:
    from triton.runtime.errors import TritonError

    FAULTS += (TritonError,)
MESSAGE = 300


@dataclass(frozen=True)
class Refusal:
    """A failed gate, and how the kernel failed it."""

    gate: Literal["compile", "correct", "resources", "fast"]
    difference: str


@dataclass(frozen=True)
class Seeds:
    """The device of the inputs, and a seed for each shape."""

    device: torch.device
    first: int
    is_interpreted: bool

    def maker(self, offset: int) -> InputMaker:
        """Return a source of bfloat16 inputs with the seed `first + offset`.

        Triton's interpreter rounds bfloat16 incorrectly, so there it is float32 and float16.
        """
        dtypes = (torch.float32, torch.float16) if self.is_interpreted else (torch.bfloat16,) * 2
        seed = self.first + offset
        return InputMaker(self.device, *dtypes, torch.Generator(self.device).manual_seed(seed))

    def sizes(self, case: KernelCase) -> tuple[Size, ...]:
        """Return the sizes to check: wide ones only where kernels are compiled."""
        return case.odd if self.is_interpreted else (*case.odd, *case.wide)


def compiles(case: KernelCase, seeds: Seeds) -> Refusal | None:
    """Check that the kernel compiles and launches at every size."""
    for offset, size in enumerate(seeds.sizes(case)):
        inputs = case.inputs(seeds.maker(offset), size)
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
    """Compare with eager PyTorch and with float64, at every size.

    Memory that the kernel allocates is filled with NaN. It runs twice, so that the second run sees
    the contents that the first one left in persistent buffers.
    """
    for offset, size in enumerate(seeds.sizes(case)):
        inputs = case.inputs(seeds.maker(offset), size)
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
    """Return the first result in which the kernel is worse than eager PyTorch, if any."""
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
    """Fill memory allocated in the block with NaN, or with the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    # deterministic mode fills uninitialized memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other operators warn that they are not deterministic
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=is_warning)


def _shown(size: Size) -> str:
    return " ".join(f"{name}={value}" for name, value in size.items())


# Timing of a kernel and its reference in turns, each with a cold cache.

MOST_CALLS = 64
REFERENCE_CALLS = 4


@dataclass(frozen=True)
class Speed:
    """Seconds per call, in turns."""

    kernel_s: list[float]  # empty if the kernel is not compiled
    reference_s: list[float]
    calls: int
    num_bytes: int  # bytes per call
    flops: float
    compiled: tuple[Compiled, ...] = ()
    """The resources that the launched kernels need; empty if none is compiled."""


def measure(case: KernelCase, size: Size, seeds: Seeds, clock: Clock) -> Speed:
    """Time kernel and reference in turns, the kernel as one captured graph of several calls.

    The reference is called as in eager PyTorch, launches included, because it may synchronize.
    """
    backend = clock.backend
    with torch.no_grad():
        inputs = spread_inputs(case, size, seeds, is_spread=backend.records)
        moved = case.num_bytes(inputs[0], case.reference(dict(inputs[0]), size), size)
        few = inputs[:REFERENCE_CALLS]
        runs = [lambda: [case.reference(each, size) for each in few]]
        runs[0]()
        compiled: list[Compiled] = []
        if backend.records:
            with taking(compiled.append):
                runs.append(recorded(case, size, inputs, backend))
        reference, *kernel = clock.turns(runs)
    return Speed(
        [seconds / len(inputs) for seconds in kernel[0]] if kernel else [],
        [seconds / len(few) for seconds in reference],
        len(inputs),
        moved,
        case.flops(size),
        tuple(compiled),
    )


def spread_inputs(case: KernelCase, size: Size, seeds: Seeds, *, is_spread: bool) -> list[Inputs]:
    """Return different inputs of `SPREAD_BYTES` in all, or only one unless `is_spread`."""
    inputs = [case.inputs(seeds.maker(0), size)]
    count = min(SPREAD_BYTES // max(num_bytes(inputs[0]), 1), MOST_CALLS) if is_spread else 1
    return inputs + [case.inputs(seeds.maker(offset), size) for offset in range(1, count)]


def recorded(
    case: KernelCase, size: Size, inputs: list[Inputs], backend: Backend
) -> Callable[[], object]:
    """Return the replay of a graph that calls the kernel on all inputs and keeps all outputs.

    Each output has its own memory: overwriting the previous output would write to the cache.
    """

    def run() -> list[Outputs]:
        return [case.kernel(each, size) for each in inputs]

    run()
    backend.synchronize()
    replay, _ = backend.record(run)
    replay()
    return replay


def is_lean(speed: Speed) -> Refusal | None:
    """Refuse a kernel that spills more bytes than it may."""
    excess = next((each.excess for each in speed.compiled if each.excess), "")
    return Refusal("resources", excess) if excess else None


def is_fast(speed: Speed) -> Refusal | None:
    """Refuse a kernel that is slower than its reference."""
    if not speed.kernel_s:
        return None
    found = compare(speed.reference_s, speed.kernel_s)
    if found.verdict != "slower":
        return None
    times = f"{found.after.median:.3g} s a call, the reference {found.before.median:.3g} s"
    return Refusal("fast", f"{times}, with separated intervals")


def numbers(speed: Speed, rates: Roofline) -> Row:
    """Return a case's times for a row of results, with its fraction of the roofline.

    The bound is the time of its bytes at the rate of a large copy, or of its FLOPs at that of a
    large matmul, whichever is longer.
    """
    reference = statistics.median(speed.reference_s)
    common: Row = {"calls": speed.calls, "reference_s": reference}
    if not speed.kernel_s:
        return common
    median = statistics.median(speed.kernel_s)
    by_memory, by_matmul = speed.num_bytes / rates.copy_bytes, speed.flops / rates.matmul_flops
    return {
        **common,
        **most(speed.compiled),
        "compiled": [each._asdict() for each in speed.compiled],
        "rounds": len(speed.kernel_s),
        **times(speed.kernel_s),
        "over_reference": reference / median,
        "gb": speed.num_bytes / 1e9,
        "gb_per_s": speed.num_bytes / median / 1e9,
        "tflops": speed.flops / median / 1e12 if speed.flops else None,
        "bound": "memory" if by_memory >= by_matmul else "matmul",
        "roofline_frac": max(by_memory, by_matmul) / median,
    }
