"""How kernels of a quantized weight cut it into tiles, and the scales of a tile.

The weight is seen as runs of consecutive weights: a run is one group where scales are by group,
else one row. A run is cut into units of E weights; a tile is N runs x U units.

Shapes: O out_features, I in_features, R rank.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton
from qat.quant.weight import LARGEST, SCALE_NAMES, Scales

WARPS = 4


class FormTile(NamedTuple):
    """What a program forms."""

    weights: int = 4096
    """Of a tile, 32 a thread of four warps."""


class Tiling(NamedTuple):
    """How the weight is cut into tiles."""

    num_runs: int
    length: int
    """Weights of a run."""
    rank: int
    """0 where scales are by group."""
    scale_bits: int
    N: int
    """Runs of a tile."""
    U: int
    """Units of a run in a tile."""
    E: int
    """Weights of a unit."""

    @classmethod
    def of(
        cls,
        shape: torch.Size,
        scales: Scales,
        weights: int,
        unit: int,
        *,
        cuts: bool = False,
    ) -> Self:
        """Tiles of about `weights` weights. Units of one weight where `unit` does not fill a run.

        A group is cut only where it `cuts`, for what needs no sum over it.
        """
        O, I = shape
        if scales.scales is not None:
            num_runs, length, rank = scales.scales.numel(), I // scales.scales.shape[1], 0
            columns = triton.next_power_of_2(length)
            columns = min(columns, weights) if cuts else columns
        else:
            num_runs, length, rank = O, I, scales.low_rank()[1].numel()
            columns = min(triton.next_power_of_2(length), weights // 8)
        N = min(max(weights // columns, 1), triton.next_power_of_2(num_runs))
        E = unit if length % unit == 0 else 1
        return cls(num_runs, length, rank, scales.bits, N, columns // E, E)

    @property
    def num_tiles(self) -> int:
        """Tiles of the whole weight."""
        return triton.cdiv(self.num_runs, self.N) * triton.cdiv(self.length, self.U * self.E)

    @property
    def num_warps(self) -> int:
        """More where one group alone is larger than a tile should be."""
        return min(max(self.N * self.U * self.E // 1024, WARPS), 32)

    def constants(self) -> dict[str, int]:
        """The kernels' arguments that are no tensors."""
        return {
            "num_runs": self.num_runs,
            "LENGTH": self.length,
            "R": self.rank,
            "SCALE_BITS": self.scale_bits,
            "N": self.N,
            "U": self.U,
            "E": self.E,
        }


def scale_operands(scales: Scales) -> tuple[Tensor | None, ...]:
    """The tensors of `Scales` in its order, None for those of the other form."""
    parts = scales.present()
    return tuple(parts[name].contiguous() if name in parts else None for name in SCALE_NAMES)


LARGEST_E5M3 = tl.constexpr(LARGEST)
"""The bits of the largest stored number, as a float16's."""


@triton.jit
def units_of_tile(
    tile, num_runs, LENGTH: tl.constexpr, N: tl.constexpr, U: tl.constexpr, E: tl.constexpr
):
    """Run and first column in it of each unit of a tile, `(N * U,)`, and whether it exists."""
    ACROSS: tl.constexpr = (LENGTH + U * E - 1) // (U * E)
    unit = tl.arange(0, N * U)
    run = tile // ACROSS * N + unit // U
    column = (tile % ACROSS * U + unit % U) * E
    return run, column, (run < num_runs) & (column < LENGTH)


@triton.jit
def read_gradient(
    tile, dW, scales, num_runs,
    LENGTH: tl.constexpr, R: tl.constexpr, N: tl.constexpr, U: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """A tile's units (`units_of_tile`), their gradient and their group's scale, as they lie."""
    run, column, is_unit = units_of_tile(tile, num_runs, LENGTH, N, U, E)
    place = (run * LENGTH + column)[:, None] + tl.arange(0, E)[None, :]
    dW = tl.load(dW + place, mask=is_unit[:, None], other=0)
    if R > 0:
        return run, column, is_unit, dW, tl.full([1], 1.0, tl.float32)
    else:
        return run, column, is_unit, dW, tl.load(scales + run, mask=is_unit, other=1)


@triton.jit
def low_rank_scale(
    scale_out, rank_gain, scale_in, run, column, is_unit,
    LENGTH: tl.constexpr, R: tl.constexpr, SCALE_BITS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """`A diag(g) B` of each weight, `(units, E)`, summed in the order of the reference."""
    S = tl.zeros([run.shape[0], E], tl.float32)
    columns = column[:, None] + tl.arange(0, E)[None, :]
    for r in range(R):
        A = tl.load(scale_out + run * R + r, mask=is_unit, other=0)
        B = tl.load(scale_in + r * LENGTH + columns, mask=is_unit[:, None], other=0)
        A, B = as_stored(A, SCALE_BITS), as_stored(B, SCALE_BITS)
        S += (A * tl.load(rank_gain + r))[:, None] * B
    return S


@triton.jit
def as_stored(scale, SCALE_BITS: tl.constexpr):
    """float32 after a round trip through what a checkpoint stores: itself, float16 or E5M3."""
    if SCALE_BITS == 32:
        return scale
    elif SCALE_BITS == 16:
        return scale.to(tl.float16).to(tl.float32)
    else:
        half = tl.where(scale < 0, 0.0, scale).to(tl.float16)
        bits = half.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        # the seven bits that E5M3 lacks are rounded off, ties to even
        cut = tl.minimum((bits + 63 + ((bits >> 7) & 1)) >> 7 << 7, LARGEST_E5M3)
        # what is not finite stays so
        kept = tl.where(bits < 0x7C00, cut, bits).to(tl.int16).to(tl.float16, bitcast=True)
        return kept.to(tl.float32)
