"""What the kernel bench knows of a kernel: its inputs, its two ways, what a call must move."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat.kernels.dispatch import computing_by
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
class Case:
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
