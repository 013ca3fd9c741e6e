"""Multiply a packed or dense matrix and a few vectors: one linear of a decoding step.

`y = x @ W.T` with `W = codebook[indices] * S`, computed in float32 from float32 levels; no weight
is written to memory. A linear fuses the operations around it: the norm before it, and the gated
unit or the residual sum after it.

The kernel: a unit is 16 consecutive weights of a row, whose indices are `BITS` half-words; a tile
is R rows x U units. A thread decodes its units into float32 levels and adds up their products with
x. The inputs are spread (`lut_rows`): input j of all units is contiguous, so that a thread reads
the inputs of four units as 16 bytes. One scale multiplies a unit's sum. If an index names a
codeword, one load reads its weights. If levels of 16 bits and inputs of 22 bits are precise enough,
tensor cores multiply (`lut_mma`), with the same norm before and the same sums after. For one vector
of such inputs and 2-bit weights, Hopper looks up sums of four weights instead (`lut_sums`).

Shapes: B sequences, O out_features, I in_features, C numbers of a codebook, P parts, D weights that
an index names.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.decode.kernels.launch import (
    IS_COMPILED,
    gdc_launch_dependents,
    gdc_wait,
    has_warpgroups,
    overlapping,
)
from qat.extensions.decode.kernels.lut_mma import (
    asm_values,
    decoded,
    mma_dots,
    mma_load_ahead,
    mma_tables,
)
from qat.extensions.decode.kernels.lut_rows import (
    SPLIT,
    UNIT,
    LutRows,
    Rows,
    empty_inputs,
    gathered,
    order_of,
    put_inputs,
    spread,
)
from qat.extensions.decode.kernels.lut_sums import (
    INPUTS,
    NO_SUMS,
    WARPS,
    Around,
    Source,
    SumsTile,
    add_up,
    steps_for,
)
from qat.kernels.dispatch import tl, triton, use_triton
from qat.kernels.tuned import chosen

MOST_VECTORS = 8
"""The most vectors at once; for more, forming the weight and a matmul is faster."""
# integer type of a unit's indices: one word, two for 8 bits; three for 3 bits, which fit no type
WORDS = {1: torch.int16, 2: torch.int32, 3: torch.int16, 4: torch.int64, 8: torch.int64}


class Norm(NamedTuple):
    """An RMS norm whose gain is already applied to the input: `x / sqrt(mean square + eps)`."""

    squares: Tensor
    """`(B, P)`: sums of squares of parts of the input before its gain."""
    eps: float


class Stream(NamedTuple):
    """The residual stream between two linears, all float32."""

    residual: Tensor
    """`(B, D)`."""
    scaled: Tensor
    """`residual * gamma`, `(B, D)` in the input order of the next matrix."""
    squares: Tensor
    """`(B, P)`: sums of squares of parts of `residual`."""


def matvec(
    x: Tensor,
    rows: Rows,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    is_gated: bool = False,
    order: int = 1,
) -> Tensor:
    """Return `W x`, divided by the RMS of `norm`, plus `bias`: `(B, O)` float32, spread by `order`.

    `x` `(B, I)` is float32, spread by `order_of(rows)`. With `is_gated` the first half of the
    rows are gates, and the result is `silu(gate) * up`, `(B, O / 2)`.
    """
    if use_triton(x, __name__):
        O = rows.shape[0] // 2 if is_gated else rows.shape[0]
        out = empty_inputs(x.shape[0], O, order, x.device)
        _launch(x, rows, out, norm=norm, bias=bias, is_gated=is_gated, order=order)
        return out
    y = _product(x, rows)
    if norm is not None:
        mean = norm.squares.sum(1, keepdim=True) / rows.shape[1]
        y = y * torch.rsqrt(mean + norm.eps)
    if bias is not None:
        y = y + bias.float()
    if is_gated:
        gate, up = y.chunk(2, 1)
        y = F.silu(gate) * up
    return spread(y, order)


def matvec_add(
    x: Tensor,
    rows: Rows,
    residual: Tensor,
    gamma: Tensor,
    *,
    bias: Tensor | None = None,
    order: int = 1,
) -> Stream:
    """Return the stream after `residual + W x + bias`; `scaled` is spread by `order`."""
    if use_triton(x, __name__):
        B, O = x.shape[0], rows.shape[0]
        tile = _tile(rows, O, B)
        if isinstance(tile, SumsTile):
            count = tile.warps * tile.blocks([len(part.octets) for part in _sources(rows)])
        else:
            count = triton.cdiv(O, tile.rows)
        squares = torch.empty(B, count, dtype=torch.float32, device=x.device)
        out, scaled = torch.empty_like(residual), empty_inputs(B, O, order, x.device)
        added = (scaled, squares, residual, gamma.contiguous())
        _launch(x, rows, out, bias=bias, order=order, added=added)
        return Stream(out, scaled, squares)
    y = _product(x, rows)
    return stream(residual + (y if bias is None else y + bias.float()), gamma, order)


def stream(residual: Tensor, gamma: Tensor, order: int) -> Stream:
    """Return the stream that starts with `residual`, `(B, D)`."""
    residual = residual.float()
    squares = residual.square().sum(1, keepdim=True)
    return Stream(residual, spread(residual * gamma.float(), order), squares)


def _product(x: Tensor, rows: Rows) -> Tensor:
    W = rows.float() if isinstance(rows, Tensor) else rows.dense()
    return gathered(x, order_of(rows)) @ W.T


class Tile(NamedTuple):
    """The tiling of a matrix: R rows x U units, and how a program iterates over its rows' tiles."""

    rows: int
    units: int
    """Units of 16 weights; single weights if the matrix is dense."""
    depth: int
    """Tiles computed per iteration; as many are prefetched."""
    warps: int
    registers: int = 0
    """Register limit per thread, or 0. Without one the compiler prefetches so far ahead that few
    threads fit."""


def tile_for(out_features: int, in_features: int, bits: int) -> Tile:
    """Return the default: one row per thread, and a row in whole tiles where possible."""
    if bits == 16:
        depth = 5 if in_features % 2560 == 0 else 4
        return Tile(4, min(512, triton.next_power_of_2(in_features)), depth, 4)
    units, registers = in_features // UNIT, 96 if bits == 2 else 128
    if units % 128 == 0 or units > 512:
        return Tile(4, 128, 1, 4, registers=registers)
    if units % 32 == 0:
        return Tile(16, 32, 1, 4, registers=registers)
    return Tile(8, 64, 1, 4, registers=registers)


def vectors_tile_for(out_features: int, in_features: int, bits: int) -> Tile:
    """Return the default tile for codewords, of which a load fills four registers at once."""
    return tile_for(out_features, in_features, bits)._replace(registers=128)


class MmaTile(NamedTuple):
    """The tiling for tensor cores (`lut_mma`): 16 rows, shared by the warps of a program."""

    units: int
    """Consecutive units that a lane reads at a time; four lanes share a row."""
    warps: int
    """Warps that share 16 rows."""
    registers: int = 0

    @property
    def rows(self) -> int:
        """Rows of the weight that one program reads."""
        return 16

    @property
    def depth(self) -> int:
        """Spans computed per iteration."""
        return 1


def mma_tile_for(out_features: int, in_features: int, bits: int) -> MmaTile:
    """Return the default: a lane reads 16 bytes, and more warps share 16 rows if rows are few.

    2,560 rows give 160 programs for the 132 multiprocessors of an H200.
    """
    units = 4 if bits == 2 else 2
    spans = triton.next_power_of_2(max(in_features // (4 * UNIT * units), 1))
    most = 16 if out_features < 4096 else 8 if out_features < 8192 else 2
    if in_features > 8192:
        most = min(most, 8)
    return MmaTile(units, min(most, spans))


def vectors_mma_tile_for(out_features: int, in_features: int, bits: int) -> MmaTile:
    """Return the default for codewords, which take more registers: fewer units, or a limit.

    Measured on an H200 with the matrices of a decoder layer of a 4B model (speedrun/LOG.md).
    """
    tile = mma_tile_for(out_features, in_features, bits)
    if in_features > 8192:
        return tile._replace(registers=128)
    spans = triton.next_power_of_2(max(in_features // (4 * UNIT * 2), 1))
    return tile if out_features < 4096 else MmaTile(2, min(4, spans))


def sums_tile_for(out_features: int, in_features: int, *, has_groups: bool) -> SumsTile:
    """Return the default for one vector, given all rows; only Hopper was measured."""
    if not has_groups:
        return NO_SUMS
    return SumsTile(INPUTS, steps_for(out_features, in_features), WARPS)


def _tile(
    rows: Rows, out_features: int, B: int, *, is_gated: bool = False
) -> Tile | MmaTile | SumsTile:
    bits = 16 if isinstance(rows, Tensor) else rows.weight_bits
    key = (out_features, rows.shape[1], bits)
    device = rows.device if isinstance(rows, Tensor) else rows.octets.device
    is_vector = not isinstance(rows, Tensor) and rows.vector_size > 1
    if order_of(rows) == SPLIT:
        # all gates share one codebook, and all ups
        are_sources = not is_gated or rows.starts in ((0,), (0, rows.shape[0] // 2))
        if B == 1 and bits == 2 and are_sources:
            kernel = "vectors_sums" if is_vector else "lut_sums"
            default = sums_tile_for(*rows.shape, has_groups=has_warpgroups(device))
            tile = chosen(kernel, (*rows.shape, bits), default, device)
            if tile != NO_SUMS:
                return tile
        if is_vector:
            return chosen("vectors_mma", key, vectors_mma_tile_for(*key), device)
        return chosen("lut_mma", key, mma_tile_for(*key), device)
    if is_vector:
        return chosen("vectors_matvec", key, vectors_tile_for(*key), device)
    return chosen("lut_matvec", key, tile_for(*key), device)


def _sources(rows: LutRows, *, is_gated: bool = False) -> list[Source]:
    """Split the rows into sources of one codebook each; gates and ups are separate."""
    starts = (0, rows.shape[0] // 2) if is_gated else rows.starts
    ends = pairwise((*starts, rows.shape[0]))
    given = rows.codebooks if rows.vector_size == 1 else rows.tables.view(torch.int32)
    return [
        Source(rows.octets[start:end], rows.scales[start:end], own)
        for (start, end), own in zip(ends, [*given, given[-1]], strict=False)
    ]


def _launch(
    x: Tensor,
    rows: Rows,
    out: Tensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    is_gated: bool = False,
    order: int,
    added: tuple[Tensor | None, ...] = (None, None, None, None),
) -> None:
    scaled, squares_out, residual, gamma = added
    O, I = rows.shape[0] // (2 if is_gated else 1), rows.shape[1]
    tile = _tile(rows, O, x.shape[0], is_gated=is_gated)
    if isinstance(tile, SumsTile):
        squares, eps = (None, 0.0) if norm is None else norm
        around = Around(squares, eps, is_gated, order, *added)
        add_up(out, x, _sources(rows, is_gated=is_gated), bias, tile, around)
        return
    # a dense matrix, unless it is packed
    tensors, bits, C, D, length = (rows, None, None, None, None), 16, 0, 1, 1
    starts, is_mma = (), False
    if not isinstance(rows, Tensor):
        is_mma, bits = order_of(rows) == SPLIT, rows.weight_bits
        words = rows.octets.view(torch.int32 if is_mma else WORDS[bits])
        tensors = (words, rows.scales, rows.codebooks, rows.tables, rows.factors)
        C, D, starts = rows.codebooks[0].numel(), rows.vector_size, rows.starts[1:]
        length = I // rows.scales.shape[1] // UNIT
    # first rows of the second and the third part; without one, a number larger than any row's
    second, third = (*starts, 2**31 - 1, 2**31 - 1)[:2]
    # comparisons between four levels; the interpreter has no assembly
    lookup = SELECT if C == 4 else ASSEMBLED_GATHER if IS_COMPILED else GATHER
    # several vectors need all registers; the interpreter has no register limit
    is_capped = IS_COMPILED and tile.registers and x.shape[0] == 1
    capped = {"maxnreg": tile.registers} if is_capped else {}
    num_squares = 0 if norm is None else norm.squares.shape[1]
    _matvec_kernel[(triton.cdiv(O, tile.rows),)](
        out, scaled, squares_out, x.view(torch.int32) if is_mma else x.contiguous(),
        None if norm is None else norm.squares, *tensors, bias, residual, gamma,
        num_out=O, num_squares=num_squares, second=second, third=third,
        eps=0.0 if norm is None else norm.eps, UNITS=I if bits == 16 else I // UNIT,
        B=x.shape[0], BITS=bits, C=C, D=D, LENGTH=length, LOOKUP=lookup, MMA=is_mma,
        ASSEMBLED=IS_COMPILED, GLU=is_gated, SQUARES=max(triton.next_power_of_2(num_squares), 2),
        ORDER=order, R=tile.rows, U=tile.units, DEPTH=tile.depth, W=tile.warps,
        num_warps=tile.warps, **capped, **overlapping(x.device),
    )  # fmt: skip


@triton.jit
def _matvec_kernel(
    out, scaled, squares_out, x, squares_in, source, scales, codebooks, tables, factors, bias,
    residual, gamma, num_out, num_squares, second, third, eps,
    UNITS: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    LENGTH: tl.constexpr, LOOKUP: tl.constexpr, MMA: tl.constexpr, ASSEMBLED: tl.constexpr,
    GLU: tl.constexpr, SQUARES: tl.constexpr, ORDER: tl.constexpr, R: tl.constexpr,
    U: tl.constexpr, DEPTH: tl.constexpr, W: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    first = tl.program_id(0) * R
    row = first + tl.arange(0, R)
    is_row = row < num_out
    row = tl.minimum(row, num_out - 1)  # rows past the last repeat it, so that no load needs a mask
    # no kernel writes these, so they are loaded before the wait for the previous kernel
    if MMA:
        loaded = mma_load_ahead(
            source, scales, first, num_out, 0, UNITS, BITS, D, LENGTH, 2 if GLU else 1, U, W
        )
        table = mma_tables(
            tables, first, num_out, second, third, BITS, D, 2 if GLU else 1, W, ASSEMBLED
        )
    else:
        loaded = _load_ahead(source, scales, row, 0, UNITS, BITS, LENGTH, U, DEPTH)
    if GLU:
        if not MMA:
            loaded_up = _load_ahead(source, scales, row + num_out, 0, UNITS, BITS, LENGTH, U, DEPTH)
        if bias is not None:
            up_bias = tl.load(bias + num_out + row).to(tl.float32)
    if bias is not None:
        own_bias = tl.load(bias + row).to(tl.float32)
    if residual is not None:
        gain = tl.load(gamma + row)
    # x, its squares and the residual are written by previous kernels
    if OVERLAP:
        gdc_wait()
    norms, olds = (), ()
    for b in tl.static_range(B):
        if squares_in is not None:
            share = tl.arange(0, SQUARES)
            place = squares_in + b * num_squares + share
            found = tl.load(place, mask=share < num_squares, other=0.0)
            mean = tl.sum(found, axis=0) / (UNITS * (1 if BITS == 16 else 16))
            norms = norms + (tl.rsqrt(mean + eps),)
        if residual is not None:
            olds = olds + (tl.load(residual + b * num_out + row),)
    if MMA:
        # gates, then ups
        sums = mma_dots(
            x, source, scales, table, factors, loaded, first, num_out, second, third,
            UNITS, B, BITS, D, LENGTH, 2 if GLU else 1, U, W, ASSEMBLED,
        )  # fmt: skip
    else:
        sums = _dots(
            x, source, scales, codebooks, loaded,
            row, second, third, UNITS, B, BITS, C, D, LENGTH, LOOKUP, R, U, DEPTH,
        )  # fmt: skip
        if GLU:
            sums = sums + _dots(
                x, source, scales, codebooks, loaded_up,
                row + num_out, second, third, UNITS, B, BITS, C, D, LENGTH, LOOKUP, R, U, DEPTH,
            )  # fmt: skip
    # the fused operations: norm, bias, gated unit, residual sum
    for b in tl.static_range(B):
        y = sums[b]
        if squares_in is not None:
            y *= norms[b]
        if bias is not None:
            y += own_bias
        if GLU:
            up = sums[B + b]
            if squares_in is not None:
                up *= norms[b]
            if bias is not None:
                up += up_bias
            y = y * tl.sigmoid(y) * up
        if residual is None:
            put_inputs(out, b, row, y, is_row, num_out, ORDER)
        else:
            y += olds[b]
            tl.store(out + b * num_out + row, y, mask=is_row)
            put_inputs(scaled, b, row, y * gain, is_row, num_out, ORDER)
            square = tl.sum(tl.where(is_row, y * y, 0.0), axis=0)
            tl.store(squares_out + b * tl.num_programs(0) + tl.program_id(0), square)


@triton.jit
def _dots(
    x, source, scales, codebooks, loaded, row, second, third,
    UNITS: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    LENGTH: tl.constexpr, LOOKUP: tl.constexpr, R: tl.constexpr, U: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Return `W[row] @ x[b]`, `(R,)` float32 for each b; the first tiles are `loaded` already."""
    SPAN: tl.constexpr = U * DEPTH
    IN_TILES: tl.constexpr = UNITS % SPAN == 0
    # the last tiles of a packed row start early instead of ending past the row
    WHOLE: tl.constexpr = IN_TILES or (UNITS > SPAN and BITS < 16)
    # one value per row, so that each thread has its own: the compiler would copy a uniform one
    part = (row >= second).to(tl.int32) + (row >= third).to(tl.int32)
    codebook = codebooks
    if BITS < 16:
        codebook += part[:, None] * C
    sums = ()
    for _b in tl.static_range(B):
        sums = sums + (tl.zeros([R, U], tl.float32),)
    for start in range(0, UNITS, SPAN):
        words, shares = loaded
        place = tl.minimum(start, UNITS - SPAN) if WHOLE else start
        if UNITS > SPAN:
            # prefetch the next tiles while these are computed; the last iteration loads the same
            # ones again
            following = tl.minimum(start + SPAN, UNITS - SPAN) if WHOLE else start + SPAN
            loaded = _load_ahead(source, scales, row, following, UNITS, BITS, LENGTH, U, DEPTH)
        for d in tl.static_range(DEPTH):
            unit = place + d * U + tl.arange(0, U)
            if BITS == 16:
                added = ()
                for b in tl.static_range(B):
                    inputs = _inputs(x + b * UNITS, unit, UNITS, R, WHOLE)
                    added = added + (sums[b] + words[d].to(tl.float32) * inputs,)
                sums = added
            else:
                levels = levels_of(words[d], codebook, BITS, D, LOOKUP)
                share = decoded(shares[d])
                if WHOLE and not IN_TILES:
                    share = tl.where((unit >= start)[None, :], share, 0.0)
                added = ()
                for b in tl.static_range(B):
                    inside = tl.zeros([R, U], tl.float32)
                    for j in tl.static_range(16):
                        row_of_x = x + (b * 16 + j) * UNITS
                        inputs = _inputs(row_of_x, unit, UNITS, R, WHOLE)
                        inside += levels[j] * inputs
                    added = added + (sums[b] + inside * share,)
                sums = added
    found = ()
    for b in tl.static_range(B):
        found = found + (tl.sum(sums[b], axis=1),)
    return found


@triton.jit
def _load_ahead(
    source, scales, row, start,
    UNITS: tl.constexpr, BITS: tl.constexpr, LENGTH: tl.constexpr, U: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Load words and scales of `DEPTH` tiles from unit `start` on, as stored."""
    WHOLE: tl.constexpr = UNITS % (U * DEPTH) == 0 or (UNITS > U * DEPTH and BITS < 16)
    words, shares = (), ()
    for d in tl.static_range(DEPTH):
        unit = start + d * U + tl.arange(0, U)
        words = words + (_draw(source, row, unit, UNITS, BITS, WHOLE),)
        if BITS < 16:
            shares = shares + (_scale(scales, row, unit, UNITS, LENGTH, WHOLE),)
    return words, shares


@triton.jit
def _inputs(x, unit, UNITS: tl.constexpr, R: tl.constexpr, WHOLE: tl.constexpr):
    """Load the inputs of the units once per row, so that each thread loads its own."""
    place = x + unit[None, :] + tl.zeros([R, 1], tl.int32)
    return tl.load(place) if WHOLE else tl.load(place, mask=(unit < UNITS)[None, :], other=0.0)


@triton.jit
def _read(places, is_unit, WHOLE: tl.constexpr):
    return tl.load(places) if WHOLE else tl.load(places, mask=is_unit, other=0)


@triton.jit
def _draw(source, row, unit, UNITS: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr):
    """Load the indices of each unit, `(R, U)`, as one word, or as two if one is too small."""
    is_unit = (unit < UNITS)[None, :]
    place = row.to(tl.int64)[:, None] * UNITS + unit[None, :]
    if BITS == 3:
        word = _read(source + place * 3, is_unit, WHOLE).to(tl.int64) & 0xFFFF
        word |= (_read(source + place * 3 + 1, is_unit, WHOLE).to(tl.int64) & 0xFFFF) << 16
        word |= (_read(source + place * 3 + 2, is_unit, WHOLE).to(tl.int64) & 0xFFFF) << 32
        return word, word
    elif BITS == 8:
        low = _read(source + place * 2, is_unit, WHOLE)
        return low, _read(source + place * 2 + 1, is_unit, WHOLE)
    elif BITS == 16:
        return _read(source + place, is_unit, WHOLE)
    else:
        word = _read(source + place, is_unit, WHOLE)
        return word, word


@triton.jit
def _scale(scales, row, unit, UNITS: tl.constexpr, LENGTH: tl.constexpr, WHOLE: tl.constexpr):
    """Load the scale of each unit's group, as stored."""
    group = tl.max_contiguous(unit // LENGTH, 4 if LENGTH == 1 else 1)
    place = row.to(tl.int64)[:, None] * (UNITS // LENGTH) + group[None, :]
    return _read(scales + place, (unit < UNITS)[None, :], WHOLE)


# Look up the levels of packed indices, 16 at a time; exact. A GPU reads weights of few bits faster
# than it can look up their levels: the bound is integer instructions per weight, 2 with assembled
# loads (fewer in `lut_mma`).

GATHER, SELECT, ASSEMBLED_GATHER = 0, 1, 2
"""Ways to look up levels: a load from the codebook, comparisons between four, an assembled load.

The assembled load does the same on a GPU, but the compiler does not move its words between threads.
"""


def _four_bits() -> str:
    """Return the assembly of `_gathered_by_four`: $8 the word, $9 the codebook."""
    lines = [".reg .b32 low, high, at;", ".reg .b64 place;", "mov.b64 {low, high}, $9;"]
    for k in range(8):
        # index k in bytes, 4 per level, or-ed into the address of a table that is aligned to 64
        # bytes (0xEA: a & b | c)
        shift = "shl.b32 at, $8, 2;" if k == 0 else f"shr.u32 at, $8, {4 * k - 2};"
        lines += [shift, "lop3.b32 at, at, 60, low, 0xEA;", "mov.b64 place, {at, high};"]
        lines.append(f"ld.global.nc.f32 ${k}, [place];")
    return "\n".join(["{", *lines, "}"])


FOUR_BITS, OUTPUTS_8 = tl.constexpr(_four_bits()), tl.constexpr("=&f," * 8)
FLOATS_8 = tl.constexpr((tl.float32,) * 8)
FLOATS_2, FLOATS_4 = tl.constexpr((tl.float32,) * 2), tl.constexpr((tl.float32,) * 4)
ONE = tl.constexpr(
    "{.reg .b64 place; mad.wide.u32 place, $2, 4, $1; ld.global.nc.f32 $0, [place];}"
)
PAIR = tl.constexpr(
    "{.reg .b64 place; mad.wide.u32 place, $3, 8, $2; ld.global.nc.v2.f32 {$0, $1}, [place];}"
)
FOUR = tl.constexpr(
    "{.reg .b64 place; mad.wide.u32 place, $5, 16, $4;"
    " ld.global.nc.v4.f32 {$0, $1, $2, $3}, [place];}"
)


@triton.jit
def levels_of(words, codebook, BITS: tl.constexpr, D: tl.constexpr, LOOKUP: tl.constexpr):
    """Return the 16 levels of each unit, or its 16 / d codewords, `(R, U)` float32 each."""
    if D > 1:
        found = ()
        for k in tl.static_range(16 // D):
            code = (words[0] >> (k * BITS * D)).to(tl.int32) & (2 ** (BITS * D) - 1)
            found = found + _codeword(codebook, code, D, LOOKUP)
        return found
    elif LOOKUP == 2 and BITS == 4:
        first = _gathered_by_four(words[0].to(tl.int32), codebook)
        return first + _gathered_by_four((words[0] >> 32).to(tl.int32), codebook)
    else:
        found = ()
        for j in tl.static_range(16):
            code = (words[j * BITS // 64] >> (j * BITS % 64)).to(tl.int32) & (2**BITS - 1)
            if LOOKUP == 1:
                zero, one = tl.load(codebook), tl.load(codebook + 1)
                two, three = tl.load(codebook + 2), tl.load(codebook + 3)
                is_odd = (code & 1) != 0
                level = tl.where(
                    (code & 2) != 0, tl.where(is_odd, three, two), tl.where(is_odd, one, zero)
                )
            else:
                level = _gathered(codebook, code) if LOOKUP == 2 else tl.load(codebook + code)
            found = found + (level,)
        return found


@triton.jit
def _codeword(codebook, code, D: tl.constexpr, LOOKUP: tl.constexpr):
    """Return the d numbers of a codeword by assembled loads of 16 bytes, or of 8 if d is 2."""
    found = ()
    if LOOKUP == 0:
        for j in tl.static_range(D):
            found = found + (tl.load(codebook + code * D + j),)
    elif D == 2:
        found = asm_values(PAIR, "=f,=f,l,r", (codebook, code), FLOATS_2)
    else:
        for j in tl.static_range(0, D, 4):
            found = found + asm_values(
                FOUR, "=f,=f,=f,=f,l,r", (codebook + j, code * (D // 4)), FLOATS_4
            )  # fmt: skip
    return found


@triton.jit
def _gathered(codebook, code):
    """Load `codebook[code]` through the read-only L1 path; all threads read the same few lines."""
    return tl.inline_asm_elementwise(
        ONE, "=f,l,r", [codebook, code], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _gathered_by_four(word, codebook):
    """Look up eight indices of 4 bits; each table of 16 levels is aligned to 64 bytes."""
    return asm_values(FOUR_BITS, OUTPUTS_8 + "r,l", (word, codebook), FLOATS_8)
