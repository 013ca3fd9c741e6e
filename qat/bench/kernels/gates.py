"""The gates of one kernel, in order: compile, correct, fast. Behind one that fails none is run."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qat.bench.kernels.case import Case, Outputs, Room, Size, copied
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
