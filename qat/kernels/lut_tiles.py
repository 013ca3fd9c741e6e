"""The tiling of a quantized weight for kernels, and the scales of a tile.

The weight is seen as runs of consecutive weights: a run is one group if scales are by group, else
one row. A run is cut into units of E weights; a tile is N runs x U units.

Shapes: O out_features, I in_features, R rank.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton
from qat.quant.weight import INFINITY, SCALE_NAMES, Scales

WARPS = 4


class FormTile(NamedTuple):
    """The tiling of forming a weight."""

    weights: int = 4096
    """Weights per tile: 32 per thread of four warps."""


class Tiling(NamedTuple):
    """The partition of a weight into tiles."""

    num_runs: int
    length: int
    """Weights per run."""
    rank: int
    """The rank of the scales; 0 if scales are by group."""
    scale_bits: int
    N: int
    """Runs per tile."""
    U: int
    """Units of a run per tile."""
    E: int
    """Weights per unit."""

    @classmethod
    def of(
        cls, shape: torch.Size, scales: Scales, weights: int, unit: int, *, cuts: bool = False
    ) -> Self:
        """Return a tiling with about `weights` weights per tile.

        Units have one weight if `unit` does not divide a run. A group is split over tiles only with
        `cuts`, for kernels that do not sum over groups.
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
        """Warps per program; more if a single group is larger than a tile should be."""
        return min(max(self.N * self.U * self.E // 1024, WARPS), 32)

    def constants(self) -> dict[str, int]:
        """Return the kernels' arguments that are not tensors."""
        runs = {"num_runs": self.num_runs, "LENGTH": self.length}
        scales = {"R": self.rank, "SCALE_BITS": self.scale_bits}
        return runs | scales | {"N": self.N, "U": self.U, "E": self.E}


def scale_operands(scales: Scales) -> tuple[Tensor | None, ...]:
    """Return the tensors of `Scales` in field order, None for those of the other form."""
    parts = scales.present()
    return tuple(parts[name].contiguous() if name in parts else None for name in SCALE_NAMES)


NO_NUMBER = tl.constexpr(INFINITY)
"""The bits of float16's infinity; all above are NaN."""


@triton.jit
def units_of_tile(
    tile, num_runs, LENGTH: tl.constexpr, N: tl.constexpr, U: tl.constexpr, E: tl.constexpr
):
    """Return each unit's run and first column, `(N * U,)`, and whether it exists."""
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
    """Load a tile's units (`units_of_tile`), their gradient and their group's scale, as stored."""
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
    """Return `A diag(g) B` of each weight, `(units, E)`, summed in the order of the reference."""
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
    """Round float32 to what a checkpoint stores (`round_as_stored`) and convert it back."""
    if SCALE_BITS == 32:
        return scale
    elif SCALE_BITS == 16:
        return scale.to(tl.float16).to(tl.float32)
    else:
        half = tl.where(scale < 0, 0.0, scale).to(tl.float16)
        bits = half.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        # round off the bits that E5M3 or E5M0 does not have, ties to even, or to the larger power
        CUT: tl.constexpr = 15 - SCALE_BITS
        odd = (bits >> CUT) & 1 if SCALE_BITS > 5 else tl.minimum(bits >> CUT, 1)
        cut = (bits + ((1 << (CUT - 1)) - 1) + odd) >> CUT << CUT
        cut = tl.minimum(cut, NO_NUMBER - (1 << CUT))
        # infinity and NaN are kept
        kept = tl.where(bits < NO_NUMBER, cut, bits).to(tl.int16).to(tl.float16, bitcast=True)
        return kept.to(tl.float32)
