"""What the kernel bench knows of a kernel: its inputs, its two ways, what a call must move."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
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
    from qat.kernels.lut_matvec import MMA_BITS, MMA_INPUTS, UNIT
    from qat.kernels.lut_matvec_tiles import Tile, tile_for

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
    from qat.kernels.lut_matvec import UNIT
    from qat.kernels.lut_matvec_tiles import MmaTile, mma_tile_for

    units = key[1] // UNIT
    cuts = [MmaTile(*one) for one in product((1, 2, 4), (1, 2, 4, 8, 16))]
    fitting = [cut for cut in cuts if 4 * cut.units * cut.warps <= units]
    return _space("lut_mma", key, mma_tile_for(*key), fitting)


def form_space(size: Size, bits: int, *, is_packed: bool) -> Space:
    """Tiles of a weight that is formed."""
    from qat.kernels.lut_weight_triton import FormTile

    key = (size["O"], size["I"], bits if is_packed else 0, 2**bits)
    return _space("lut_form", key, FormTile(), [FormTile(w) for w in (1024, 2048, 8192)])


def gated_space(size: Size, kernel: str) -> Space:
    """Columns of a gated unit's program."""
    from triton import next_power_of_2

    from qat.kernels.glu_triton import LARGEST_BLOCK, Cut

    most = next_power_of_2(size["F"])
    cuts = [Cut(block, w) for block, w in product((512, 1024, 2048, 4096), (2, 4, 8))]
    fitting = [cut for cut in cuts if cut.block <= most]
    return _space(kernel, (size["F"],), Cut(min(LARGEST_BLOCK, most)), fitting)


def gather_space(size: Size, kernel: str) -> Space:
    """Pieces of chosen words' weights."""
    from qat.kernels.head_triton import Gather

    listed = product((4, 8, 16, 32), (128, 256, 512, 1024), (2, 4, 8))
    pieces = [Gather(*one) for one in listed if 1024 <= one[0] * one[1] / (one[2] / 4) <= 8192]
    return _space(kernel, (size["K"], size["D"]), Gather(), pieces)


def block_pass_space(size: Size) -> Space:
    """Blocks of a program of the pass over logits."""
    from qat.kernels.topk_triton import BlockPass

    listed = [BlockPass(*one) for one in product((16, 32, 64, 128), (2, 4, 8))]
    return _space("top_k_blocks", (size["V"],), BlockPass(), listed)


def _space(kernel: str, key: tuple[int, ...], default: tuple, listed: list) -> Space:
    return Space(kernel, key, default, tuple(c for c in dict.fromkeys(listed) if c != default))
