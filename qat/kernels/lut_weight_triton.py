"""`form` and `reduce` of `lut_weight` as one Triton kernel each.

A kernel sees the weight as runs of consecutive weights: a run is one group where scales are by
group, else one row. A program owns a tile of N runs x U units x E weights. Eight weights make a
unit wherever they fill whole bytes, so that each packed byte is read once. The products that say
which weight is formed are rounded one by one, as the reference rounds them: no fused multiply-add.
"""

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat.quant.pack import Packed
from qat.quant.weight import Scales

FORM_WEIGHTS = 4096
"""Weights of a program that forms, 32 a thread."""
REDUCE_WEIGHTS = 2048
"""Weights of a program that reduces, 16 a thread: it keeps a sum for each level."""
WARPS = 4


def form(out: Tensor, source: Packed | Tensor, codebook: Tensor, scales: Scales) -> None:
    """Write `codebook[indices] * S` into `out`, in its dtype, to the bit as the reference does."""
    tiling = _Tiling.of(source, scales, FORM_WEIGHTS)
    _form_kernel[tiling.grid](
        out,
        *_operands(source, codebook, scales),
        **tiling.constants(source, codebook),
        enable_fp_fusion=False,
        num_warps=tiling.num_warps,
    )


def reduce(
    dW: Tensor,
    source: Packed | Tensor,
    codebook: Tensor,
    scales: Scales,
    *,
    wants_codebook: bool,
    wants_scales: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of codebook and scales as `lut_weight` wants them; reads `dW` once."""
    tiling = _Tiling.of(source, scales, REDUCE_WEIGHTS)
    new = {"device": dW.device, "dtype": torch.float32}
    d_levels = d_scales = None
    if wants_codebook:
        d_levels = torch.empty(tiling.num_programs, codebook.numel(), **new)
    if wants_scales:
        d_scales = torch.empty(dW.shape if scales.scales is None else scales.scales.shape, **new)
    _reduce_kernel[tiling.grid](
        d_levels,
        d_scales,
        dW.contiguous(),
        *_operands(source, codebook, scales),
        **tiling.constants(source, codebook),
        enable_fp_fusion=scales.scales is not None,
        num_warps=tiling.num_warps,
    )
    if wants_codebook:
        d_levels = d_levels.sum(0, dtype=torch.float64).float()
    return d_levels, d_scales


class _Tiling(NamedTuple):
    """How the weight is cut into tiles."""

    num_runs: int
    length: int
    """Weights of a run."""
    rank: int
    """0 where scales are by group."""
    N: int
    U: int
    E: int

    @classmethod
    def of(cls, source: Packed | Tensor, scales: Scales, weights: int) -> Self:
        """Tiles of about `weights` weights; a group is never cut."""
        O, I = source.shape
        if scales.scales is not None:
            num_runs, length, rank = scales.scales.numel(), I // scales.scales.shape[1], 0
            columns = triton.next_power_of_2(length)
        else:
            num_runs, length, rank = O, I, scales.rank_gain.numel()
            columns = min(triton.next_power_of_2(length), weights // 8)
        N = min(max(weights // columns, 1), triton.next_power_of_2(num_runs))
        E = 8 if length % 8 == 0 else 1
        return cls(num_runs, length, rank, N, columns // E, E)

    @property
    def grid(self) -> tuple[int, int]:
        return triton.cdiv(self.num_runs, self.N), triton.cdiv(self.length, self.U * self.E)

    @property
    def num_programs(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_warps(self) -> int:
        """More where one group alone is larger than a tile should be."""
        return min(max(self.N * self.U * self.E // 1024, WARPS), 32)

    def constants(self, source: Packed | Tensor, codebook: Tensor) -> dict[str, int]:
        """The kernels' arguments that are no tensors."""
        is_packed = isinstance(source, Packed)
        return {
            "num_runs": self.num_runs,
            "in_features": source.shape[1],
            "width": source.octets.shape[1] if is_packed else 0,
            "LENGTH": self.length,
            "BITS": source.bits if is_packed else 0,
            "C": codebook.numel(),
            "SLOTS": max(triton.next_power_of_2(codebook.numel()), 2),
            "R": self.rank,
            "N": self.N,
            "U": self.U,
            "E": self.E,
        }


def _operands(
    source: Packed | Tensor, codebook: Tensor, scales: Scales
) -> tuple[Tensor | None, ...]:
    tensor = source.octets if isinstance(source, Packed) else source
    given = (None if scale is None else scale.contiguous() for scale in scales)
    return tensor.contiguous(), codebook, *given


@triton.jit
def _form_kernel(
    out,
    source,
    codebook,
    scales,
    scale_out,
    rank_gain,
    scale_in,
    num_runs,
    in_features,
    width,
    LENGTH: tl.constexpr,
    BITS: tl.constexpr,
    C: tl.constexpr,
    SLOTS: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
):
    run, column, inside = _places(num_runs, LENGTH, N, U, E)
    S = _scale(scales, scale_out, rank_gain, scale_in, run, column, num_runs, LENGTH, R)
    levels, middles, _order = _tables(codebook, BITS, C, SLOTS)
    index = _index(
        source, middles, S, inside, in_features, width, num_runs, LENGTH, BITS, C, N, U, E
    )
    W = _look_up(levels, index) * S
    tl.store(out + run * LENGTH + column, W.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _reduce_kernel(
    d_levels,
    d_scales,
    dW,
    source,
    codebook,
    scales,
    scale_out,
    rank_gain,
    scale_in,
    num_runs,
    in_features,
    width,
    LENGTH: tl.constexpr,
    BITS: tl.constexpr,
    C: tl.constexpr,
    SLOTS: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
):
    run, column, inside = _places(num_runs, LENGTH, N, U, E)
    place = run * LENGTH + column
    dW = tl.load(dW + place, mask=inside, other=0).to(tl.float32)
    S = _scale(scales, scale_out, rank_gain, scale_in, run, column, num_runs, LENGTH, R)
    levels, middles, order = _tables(codebook, BITS, C, SLOTS)
    index = _index(
        source, middles, S, inside, in_features, width, num_runs, LENGTH, BITS, C, N, U, E
    )
    if d_scales is not None:
        dS = dW * _look_up(levels, index)
        if R == 0:
            by_run = tl.sum(tl.sum(dS, axis=2), axis=1)
            runs = tl.program_id(0) * N + tl.arange(0, N)
            tl.store(d_scales + runs, by_run, mask=runs < num_runs)
        else:
            tl.store(d_scales + place, dS, mask=inside)
    if d_levels is not None:
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        by_level = _sum_by_level(dW * S, index, SLOTS)
        tl.store(d_levels + program * C + order, by_level, mask=order < C)


@triton.jit
def _places(num_runs, LENGTH: tl.constexpr, N: tl.constexpr, U: tl.constexpr, E: tl.constexpr):
    """Run and column in it of each weight of this program's tile, and whether it exists."""
    run = tl.program_id(0) * N + tl.arange(0, N)[:, None, None]
    unit = tl.program_id(1) * U + tl.arange(0, U)[None, :, None]
    column = unit * E + tl.arange(0, E)[None, None, :]
    # whole units fit, or a unit is one weight
    return run, column, (run < num_runs) & (unit * E < LENGTH)


@triton.jit
def _scale(
    scales,
    scale_out,
    rank_gain,
    scale_in,
    run,
    column,
    num_runs,
    LENGTH: tl.constexpr,
    R: tl.constexpr,
):
    """`S` as a checkpoint stores it, of a shape that broadcasts to the tile's."""
    if R == 0:
        S = _as_stored(tl.load(scales + run, mask=run < num_runs, other=1))
    else:
        S = tl.zeros([run.shape[0], column.shape[1], column.shape[2]], tl.float32)
        for r in range(R):
            A = _as_stored(tl.load(scale_out + run * R + r, mask=run < num_runs, other=0))
            B = _as_stored(tl.load(scale_in + r * LENGTH + column, mask=column < LENGTH, other=0))
            S += (A * tl.load(rank_gain + r)) * B
    return S


@triton.jit
def _as_stored(scale):
    """float32 after a round trip through the float16 of a checkpoint."""
    return scale.to(tl.float16).to(tl.float32)


@triton.jit
def _tables(codebook, BITS: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr):
    """Levels in the order that the index counts, their middles, and each level's place.

    Packed indices count levels as they lie; a latent weight's index counts them ascending.
    """
    place = tl.arange(0, SLOTS)
    levels = tl.load(codebook + place, mask=place < C, other=float("inf"))
    middles = levels
    if BITS == 0:
        row, column = levels[:, None], levels[None, :]
        is_before = (column < row) | ((column == row) & (place[None, :] < place[:, None]))
        rank = tl.sum(is_before.to(tl.int32), axis=1)
        takes = rank[:, None] == place[None, :]
        levels = tl.sum(tl.where(takes, row, 0.0), axis=0)
        nexts = tl.sum(tl.where(rank[:, None] == place[None, :] + 1, row, 0.0), axis=0)
        middles = (levels + nexts) * 0.5
        place = tl.sum(tl.where(takes, place[:, None], 0), axis=0)
    return levels, middles, place


@triton.jit
def _index(
    source,
    middles,
    S,
    inside,
    in_features,
    width,
    num_runs,
    LENGTH: tl.constexpr,
    BITS: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    U: tl.constexpr,
    E: tl.constexpr,
):
    """The index of each weight of the tile."""
    run = tl.program_id(0) * N + tl.arange(0, N)[:, None]
    unit = tl.program_id(1) * U + tl.arange(0, U)[None, :]
    first = run * LENGTH + unit * E
    is_unit = (run < num_runs) & (unit * E < LENGTH)
    if BITS == 0:
        latent = tl.load(
            source + first[:, :, None] + tl.arange(0, E)[None, None, :], mask=inside, other=0
        )
        scaled = tl.where(S == 0, 0.0, tl.div_rn(latent.to(tl.float32), tl.where(S == 0, 1.0, S)))
        return _nearest(scaled, middles, C)
    else:
        return _unpack(source, first, is_unit, in_features, width, BITS, E)


@triton.jit
def _unpack(octets, first, is_unit, in_features, width, BITS: tl.constexpr, E: tl.constexpr):
    """The indices of units whose first weights are `first`, counted through all rows."""
    if E == 8:
        octet = octets + first // 8 * BITS
        shift = first * 0
        COUNT: tl.constexpr = BITS
    else:
        bit = first % in_features * BITS
        octet = octets + first // in_features * width + bit // 8
        shift = bit % 8
        COUNT: tl.constexpr = 1 if 8 % BITS == 0 else 2
    word = tl.load(octet, mask=is_unit, other=0).to(tl.int32)
    for k in tl.static_range(1, COUNT):
        is_read = is_unit if E == 8 else is_unit & (shift + BITS > 8)
        word |= tl.load(octet + k, mask=is_read, other=0).to(tl.int32) << (8 * k)
    shifts = shift[:, :, None] + tl.arange(0, E)[None, None, :] * BITS
    return (word[:, :, None] >> shifts) & (2**BITS - 1)


@triton.jit
def _nearest(scaled, middles, C: tl.constexpr):
    """How many middles lie below each value: a binary search, ties to the lower level."""
    SLOTS: tl.constexpr = middles.shape[0]
    index = tl.zeros(scaled.shape, tl.int32)
    for halving in tl.static_range(1, 5):
        if SLOTS >> halving > 0:
            middle = _look_up(middles, index + ((SLOTS >> halving) - 1))
            index += tl.where(scaled <= middle, 0, SLOTS >> halving)
    return tl.minimum(index, C - 1)


@triton.jit
def _look_up(table, index):
    """`table[index]`."""
    flat = tl.reshape(index, (index.numel,))
    return tl.reshape(tl.gather(table, flat, 0), index.shape)


@triton.jit
def _sum_by_level(values, index, SLOTS: tl.constexpr):
    """The sum of `values` where each index is taken, `(SLOTS,)`.

    Index = high * LOW + low: the values of each high part times the one-hot of each low part, which
    is half the comparisons. The sums of all levels are joined before they cross threads: one
    exchange, not one for each.
    """
    LOW: tl.constexpr = 4 if SLOTS > 4 else 2
    is_low = ()
    for low in tl.static_range(LOW):
        is_low = is_low + (tl.where(index % LOW == low, 1.0, 0.0),)
    sums = ()
    for high in tl.static_range(SLOTS // LOW):
        part = tl.where(index // LOW == high, values, 0.0)
        for low in tl.static_range(LOW):
            sums = sums + (tl.sum(part * is_low[low], axis=2),)
    for halving in tl.static_range(1, 5):
        if SLOTS >> halving > 0:
            joined = ()
            for c in tl.static_range(SLOTS >> halving):
                joined = joined + (tl.join(sums[c], sums[c + (SLOTS >> halving)]),)
            sums = joined
    rows: tl.constexpr = index.shape[0] * index.shape[1]
    return tl.sum(tl.reshape(sums[0], (rows, SLOTS)), axis=0)
