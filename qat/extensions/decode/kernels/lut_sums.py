"""Multiply one vector by packed rows: look up sums of four products instead of weights.

A byte of 2-bit indices stands for four levels, or for one of 256 codewords of four weights; their
dot product with the four inputs at that place is one of 256 numbers. A program writes a table of
them for each of the 128 bytes of 512 inputs to shared memory, 128 KiB in all, and then reads the
same bytes of many rows; or for 64 bytes of 256 inputs, so that more than one program fits on a
multiprocessor. Everything is float32 and nothing is rounded. A weight costs 1.3 instructions
(compiled by Triton 3.6 for Hopper), while decoding it for tensor cores costs 3.4. The bounds are
then shared memory, which is read 4 bytes for each byte of indices, and how early rows arrive: a
warp prefetches 64 rows or more before it computes the first 32, and none after its own, since a
warp that ends would have to wait for them.

    program   256 or 512 inputs of W warps' rows; programs of the same rows add up their sums
    warp      STEPS times 32 rows, 8 at a time
    lane      4 r + q reads words 4 q to 4 q + 3 of each sixteen of row r
    table     a column of 256 words of shared memory; 64 columns are next to each other, so that
              one byte permutation (byte of indices above the column's byte) forms an address
    column    `b + 4 (j % 2) + 8 q + 32 (j / 2)` for byte b of word 4 q + j; with 512 inputs the
              other sixteen words have columns of their own

The 32 lanes of a warp must read 32 different banks. So a lane takes the bytes of a word, and the
words of a pair, in an order that depends on r (`_order`).

"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qat.extensions.decode.kernels.launch import (
    IS_COMPILED,
    gdc_launch_dependents,
    gdc_wait,
    overlapping,
)
from qat.extensions.decode.kernels.lut_mma import (
    columns,
    decoded,
    half_of,
    lane_products,
    number_of,
    rounded,
    run_asm,
    shares_of,
)
from qat.extensions.decode.kernels.lut_rows import MOST_PARTS, SPLIT_FACTOR, UNIT, put_inputs
from qat.extensions.decode.kernels.lut_wgmma import asked_for
from qat.kernels.dispatch import tl, triton

INPUTS = 512
"""Default number of inputs covered by one program's lookup tables."""
WARPS = 8
"""Default warps per program; with 512 inputs one program fits on a multiprocessor."""
MOST_STEPS = 4
"""The most steps of 32 rows per warp, which is also how many numbers a lane reduces at the end."""
FACTOR = tl.constexpr(SPLIT_FACTOR)


class SumsTile(NamedTuple):
    """The tiling of a product that looks up sums."""

    inputs: int
    """Inputs covered by a program's tables, 256 bytes each: 256 or 512; 0: sums are not looked
    up."""
    steps: int
    """Steps of 32 rows per warp."""
    warps: int
    """Warps per program; at most one for every 32 inputs."""
    ahead: int = 2
    """Steps of 32 rows that a warp prefetches before it computes the first."""

    @property
    def rows(self) -> int:
        """Rows per program."""
        return 32 * self.steps * self.warps

    def blocks(self, sizes: Sequence[int]) -> int:
        """Return the number of programs with the same inputs for parts of these sizes."""
        return sum(triton.cdiv(size, self.rows) for size in sizes)


NO_SUMS = SumsTile(0, 0, 0, 0)


def steps_for(out_features: int, in_features: int) -> int:
    """Return the steps of 32 rows per warp that leave few programs waiting for others to end."""
    blocks = max(132 // triton.cdiv(in_features, INPUTS), 1)
    return min(triton.cdiv(out_features, blocks * 32 * WARPS), MOST_STEPS)


class Source(NamedTuple):
    """Packed rows that share one codebook."""

    octets: Tensor
    """`(O, I / 4)` uint8."""
    scales: Tensor
    """`(O, G)` in the stored dtype."""
    codebook: Tensor
    """`(C,)` float32: levels, C at most 4; or `(512,)` int32: codewords (`short_codewords`)."""


class Around(NamedTuple):
    """Operations fused before and after the product in a decoding step, all in float32."""

    norm: Tensor | None = None
    """`(1, P)`: sums of squares of parts of the input, to which the norm's gain is applied
    already."""
    eps: float = 0.0
    is_gated: bool = False
    """True if the sources are gates and their ups."""
    order: int = 1
    """The input order of the next matrix, in which the result is written (`lut_rows`)."""
    scaled: Tensor | None = None
    """Output for the new residual times `gamma` in that order; `out` gets the new residual
    itself."""
    squares: Tensor | None = None
    """Output for sums of squares of the new residual, one per warp."""
    residual: Tensor | None = None
    """`(1, O)`."""
    gamma: Tensor | None = None


def add_up(
    out: Tensor,
    x: Tensor,
    sources: Sequence[Source],
    bias: Tensor | None,
    tile: SumsTile,
    around: Around | None = None,
) -> None:
    """Write `x @ W.T + bias` to `out`, with the rows of all sources stacked.

    `x` is `(1, I)` in bfloat16 or float16, and so is `out`. In a decoding step (`around`), and
    for codewords, `x` is split (`lut_rows`).
    """
    is_split, around = around is not None, around or Around()
    I = sources[0].octets.shape[1] * 4
    sizes = [source.octets.shape[0] for source in sources]
    # the kernel takes MOST_PARTS sources; missing ones have size 0
    none = MOST_PARTS - len(sources)
    blocks = tile.blocks(sizes)
    grid = (triton.cdiv(I, tile.inputs), blocks)
    partials = torch.empty(grid[0] * blocks * tile.rows, dtype=torch.float32, device=x.device)
    tables = None if IS_COMPILED else partials.new_empty(grid[0] * blocks * tile.inputs * 64)
    length = I // sources[0].scales.shape[1] // UNIT
    words, scales, codebooks = (
        [*tensors, *tensors[-1:] * none] for tensors in map(list, zip(*sources, strict=True))
    )
    if length == 1 and scales[0].dtype == torch.uint8:
        scales = [share.view(torch.int32) for share in scales]  # a lane needs four
    num_squares = 0 if around.norm is None else around.norm.shape[1]
    turns = max(triton.next_power_of_2(num_squares) // 32, 4)  # the same for most previous kernels
    size_0, size_1, size_2 = [*sizes, *[0] * none]
    sums_kernel[grid](
        out, around.scaled, around.squares, partials, arrivals(x.device, blocks * tile.warps),
        tables, x.view(torch.int32), around.norm, *(octets.view(torch.int32) for octets in words),
        *scales, *codebooks, bias, around.residual, around.gamma,
        num_out=size_0 if around.is_gated else sum(sizes), num_squares=num_squares,
        size_0=size_0, size_1=size_1, size_2=size_2, quads=I // (4 * UNIT), eps=around.eps,
        C=len(codebooks[0]), LENGTH=length, W=tile.warps, STEPS=tile.steps,
        AHEAD=min(tile.ahead, tile.steps), HALVES=tile.inputs // 256, SPLIT=is_split,
        GLU=around.is_gated, SQUARES=turns, ORDER=around.order, ASSEMBLED=IS_COMPILED,
        num_warps=tile.warps, num_stages=1,
        **overlapping(x.device),
    )  # fmt: skip


MOST_TILES = 2**16
"""Tiles whose counters are kept between calls."""
_ARRIVALS: dict[torch.device, Tensor] = {}


def arrivals(device: torch.device, count: int) -> Tensor:
    """Return per-tile counters of programs that stored their sums; the last program resets its own.

    The tensor is kept, so that no call has to write zeros, and never replaced, since captured
    graphs hold its address. Calls on one device must therefore run one after another, as they do
    on one stream. Nothing runs during a capture that could write the zeros: a graph captured
    before the first call gets a tensor of its own.
    """
    if device in _ARRIVALS and count <= MOST_TILES:
        return _ARRIVALS[device]
    zeros = torch.zeros(max(count, MOST_TILES), dtype=torch.int32, device=device)
    is_recorded = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if count <= MOST_TILES and not is_recorded:
        _ARRIVALS[device] = zeros
    return zeros


def _write() -> str:
    """Return assembly: store the sums of $2-$17, by four bits, and $18-$21 from address $1 on."""
    lines = [".reg .f32 sum;"]
    for entry in range(64):
        lines += [f"add.rn.f32 sum, ${2 + entry % 16}, ${18 + entry // 16};"]
        lines += [f"st.shared.f32 [$1 + {256 * entry}], sum;"]
    return "\n".join(["{", *lines, "mov.b32 $0, $1;", "}"])


@triton.constexpr_function
def _look_up(offset: int) -> str:
    """Return assembly: $0 the sum of a word's weights; $1 word, $2 the bytes' columns, $7 tables.

    Each of the selectors $3-$6 picks a byte of the word and, below it, one of the columns.
    """
    lines = [".reg .b32 at; .reg .f32 first, second, third, fourth;"]
    for step, name in enumerate(("first", "second", "third", "fourth")):
        lines += [f"prmt.b32 at, $1, $2, ${3 + step};", "add.u32 at, at, $7;"]
        lines += [f"ld.shared.f32 {name}, [at + {offset}];"]
    lines += ["add.rn.f32 first, first, second;", "add.rn.f32 third, third, fourth;"]
    return "\n".join(["{", *lines, "add.rn.f32 $0, first, third;", "}"])


@triton.constexpr_function
def _put_products(offset: int) -> str:
    """Return assembly: store products of pairs $2-$9 and codewords $10-$13 from $1 on."""
    lines = [".reg .f32 none, s<4>;", "mov.f32 none, 0f00000000;"]
    for step, before in ((0, "none, none, none, none"), (1, "s0, s1, s2, s3")):
        first = ", ".join(f"${2 + 4 * step + k}" for k in range(4))
        second = f"${10 + 2 * step}, ${11 + 2 * step}"
        lines += ["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {s0, s1, s2, s3}, "]
        lines += [f"{{{first}}}, {{{second}}}, {{{before}}};"]
    for k in range(4):
        # two codewords, and two columns
        lines += [f"st.shared.f32 [$1 + {offset + k % 2 * 256 + k // 2 * 128}], s{k};"]
    return "\n".join(["{", *lines, "mov.b32 $0, $1;", "}"])


WRITE = tl.constexpr(_write())
ROOM = tl.constexpr("mov.u32 $0, global_smem;")
WRITTEN = tl.constexpr("bar.sync 0; mov.b32 $0, $1;")
WARP = tl.constexpr("{.reg .b32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 5;}")
SWAP = tl.constexpr("prmt.b32 $0, $1, 0, $2;")
OTHER = tl.constexpr("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;")
# every lane stores before the first lane increments; the last increment wraps the counter to 0
HAND_IN = tl.constexpr("""{
.reg .pred is; .reg .b32 t;
bar.warp.sync 0xffffffff;
mov.u32 t, %laneid; setp.eq.u32 is, t, 0;
@is atom.acq_rel.gpu.global.inc.u32 t, [$1], $2;
shfl.sync.idx.b32 $0, t, 0, 0x1f, 0xffffffff;
}""")


@triton.jit(
    do_not_specialize=["num_out", "num_squares", "size_0", "size_1", "size_2", "quads", "eps"]
)
def sums_kernel(
    out, scaled, squares_out, partials, arrivals, tables, x, squares_in,
    source_0, source_1, source_2, scales_0, scales_1, scales_2, codebook_0, codebook_1, codebook_2,
    bias, residual, gamma, num_out, num_squares, size_0, size_1, size_2, quads, eps,
    C: tl.constexpr, LENGTH: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr,
    AHEAD: tl.constexpr, HALVES: tl.constexpr, SPLIT: tl.constexpr, GLU: tl.constexpr,
    SQUARES: tl.constexpr, ORDER: tl.constexpr, ASSEMBLED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program covers 256 or 512 inputs, and each of its W warps STEPS times 32 rows."""
    if OVERLAP:
        gdc_launch_dependents()
    ROWS: tl.constexpr = 32 * STEPS
    lane = tl.arange(0, 32 * W)
    # the part that contains this program's rows
    block, before, size = tl.program_id(1), 0, size_0
    source, scales, codebook = source_0, scales_0, codebook_0
    blocks_0, blocks_1 = tl.cdiv(size_0, ROWS * W), tl.cdiv(size_1, ROWS * W)
    if block >= blocks_0 + blocks_1:
        block, before, size = block - blocks_0 - blocks_1, size_0 + size_1, size_2
        source, scales, codebook = source_2, scales_2, codebook_2
    elif block >= blocks_0:
        block, before, size = block - blocks_0, size_0, size_1
        source, scales, codebook = source_1, scales_1, codebook_1
    row = (block * W + lane // 32) * ROWS
    units, split, splits = quads * 4, tl.program_id(0), tl.num_programs(0)
    # no kernel writes these, so they are loaded before the wait for the previous kernel
    loaded = ()
    for step in tl.static_range(AHEAD):
        after = row + step * 32
        more = _load_ahead(source, scales, after, size, split, lane, units, LENGTH, HALVES)
        loaded = loaded + (more,)
    HAS_LEVELS: tl.constexpr = codebook_0.dtype.element_ty == tl.float32
    numbers = ()
    if HAS_LEVELS:
        for k in tl.static_range(4):
            numbers = numbers + (tl.load(codebook + (k if k < C else C - 1)),)
    else:
        for k in tl.static_range(32 // W):
            place = (lane // 32 * (32 // W) + k) * 16 + lane % 32 // 4 * 2 + lane % 2
            numbers = numbers + (tl.load(codebook + place),)
    # the rows that a lane reduces at the end
    result = (0 if GLU else before) + row + lane % 32 * STEPS
    end = (0 if GLU else before) + size
    biases, up_biases, gains = (), (), ()
    for k in tl.static_range(STEPS):
        is_row = result + k < end
        if bias is not None:
            biases = biases + (tl.load(bias + result + k, mask=is_row, other=0),)
            if GLU:
                other = bias + num_out + result + k
                up_biases = up_biases + (tl.load(other, mask=is_row, other=0),)
        if residual is not None:
            gains = gains + (tl.load(gamma + result + k, mask=is_row, other=0.0),)
    room = _room(tables, partials, num_out, HALVES, ASSEMBLED)
    # x and its squares are written by the previous kernel
    if OVERLAP:
        gdc_wait()
    IS_BF16: tl.constexpr = out.dtype.element_ty == tl.bfloat16
    KIND: tl.constexpr = "split" if SPLIT else "bf16" if IS_BF16 else "f16"
    # issue all of these loads together
    squares = ()
    if squares_in is not None:
        for k in tl.static_range(SQUARES):
            share = k * 32 + lane % 32
            squares = squares + (tl.load(squares_in + share, mask=share < num_squares, other=0.0),)
    if HAS_LEVELS:
        inputs = _inputs(x, lane, split, units, W, HALVES, KIND)
        _write_sums(inputs, room, numbers, lane, W, HALVES, ASSEMBLED)
    else:
        pairs = _pairs(x, lane, split, units, HALVES)
        _write_products(pairs, room, numbers, lane, W, HALVES, ASSEMBLED)
    if ASSEMBLED:
        # later reads depend on this result, so that none is moved above the barrier
        room = run_asm(WRITTEN, "=r,r", (room,))
    if squares_in is not None:
        total = squares[0]
        for k in tl.static_range(1, SQUARES):
            total += squares[k]
        norm = tl.rsqrt(_over(total, 32, W, ASSEMBLED) / (units * 16) + eps)
    # look up: lane 4 r + q ends with the sums of rows 8 q + r of each 32
    q, r = lane % 4, lane % 32 // 4
    places, selectors = _order(q, r)
    warp = tl.program_id(1) * W + lane // 32
    own = partials + (warp * splits + split) * ROWS + q * 8 + r
    for step in tl.static_range(STEPS):
        if step + AHEAD < STEPS:
            after = row + (step + AHEAD) * 32
            more = _load_ahead(source, scales, after, size, split, lane, units, LENGTH, HALVES)
            loaded = loaded + (more,)
        rows = loaded[step]
        total = tl.zeros([32 * W], tl.float32)
        for k in tl.static_range(4):
            y = tl.zeros([32 * W], tl.float32)
            for half in tl.static_range(HALVES):
                words = rows[HALVES * k + half]
                y += _row_sum(words, places, selectors, room, half, r, ASSEMBLED)
            total = tl.where(q == k, _over(y, 4, W, ASSEMBLED), total)
        tl.store(own + step * 32, total * FACTOR if SPLIT else total)
    # gates and their ups have programs of their own, but share a counter
    first = (block if GLU else tl.program_id(1)) * W
    hands = splits * (2 if GLU else 1)
    counter = arrivals + first
    if ASSEMBLED:
        # a scalar, although it is one per warp: whole warps execute what follows
        counter += run_asm(WARP, "=r", ())
        count = run_asm(HAND_IN, "=r,l,r", (counter.to(tl.int64), hands - 1))
    else:
        count = tl.atomic_add(counter, 1)
        tl.store(counter, 0, mask=count == hands - 1)
    # the last warp to store adds all sums in a fixed order; then norm, bias, and the gated unit or
    # the residual sum
    if count == hands - 1:
        WIDE: tl.constexpr = triton.next_power_of_2(STEPS)
        olds = ()
        if residual is not None:
            for k in tl.static_range(STEPS):
                old = residual + result + k
                olds = olds + (tl.load(old, mask=result + k < end, other=0.0),)
        TILES: tl.constexpr = 2 if GLU else 1
        found = partials + (first + lane // 32) * splits * ROWS + lane % 32 * STEPS
        added = _added(found, blocks_0 * W * splits * ROWS, splits, TILES, STEPS, WIDE, W)
        sums, ups = columns(added[0], WIDE), columns(added[TILES - 1], WIDE)
        square = tl.zeros([32 * W], tl.float32)
        for k in tl.static_range(STEPS):
            y, place, is_row = sums[k], result + k, result + k < end
            if squares_in is not None:
                y *= norm
            if bias is not None:
                y += biases[k].to(tl.float32)
            if GLU:
                up = ups[k]
                if squares_in is not None:
                    up *= norm
                if bias is not None:
                    up += up_biases[k].to(tl.float32)
                y = y * tl.sigmoid(y) * up
            if residual is not None:
                y += olds[k]
                tl.store(out + place, y, mask=is_row)
                put_inputs(scaled, 0, place, y * gains[k], is_row, num_out, ORDER)
                square += tl.where(is_row, y * y, 0.0)
            elif SPLIT:
                put_inputs(out, 0, place, y, is_row, num_out, ORDER)
            else:
                tl.store(out + place, rounded(y, KIND, ASSEMBLED), mask=is_row)
        if residual is not None:
            tl.store(squares_out + warp, _over(square, 32, W, ASSEMBLED), mask=lane % 32 == 0)


@triton.jit
def _room(tables, partials, num_out, HALVES: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Return the address of a program's tables in shared memory; a global buffer if interpreted."""
    WORDS: tl.constexpr = HALVES * 64 * 256
    if ASSEMBLED:
        if num_out < 0:
            asked_for(partials, WORDS)
        return run_asm(ROOM, "=r", ())
    else:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        return tables + program * WORDS


@triton.jit
def _inputs(
    x, lane, split, units, W: tl.constexpr, HALVES: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Return the four inputs of each table that a thread writes a part of."""
    found = ()
    for k in tl.static_range(8 * HALVES // W):
        column, half = (lane + k * 32 * W) % 64, (lane + k * 32 * W) // 256
        unit = half * 16 + column // 8 % 4 * 4 + column // 32 * 2 + column // 4 % 2
        unit += split * (16 * HALVES)
        found = found + _four_inputs(x, unit, column % 4, units, KIND)
    return found


@triton.jit
def _write_sums(
    inputs, room, levels, lane, W: tl.constexpr, HALVES: tl.constexpr, ASSEMBLED: tl.constexpr
):  # fmt: skip
    """Write a program's tables of sums for levels."""
    for k in tl.static_range(8 * HALVES // W):
        thread = lane + k * 32 * W
        column, quarter, half = thread % 64, thread // 64 % 4, thread // 256
        last = levels[3]
        for c in tl.static_range(3):
            last = tl.where(quarter == c, levels[c], last)
        last *= inputs[4 * k + 3]
        low, high = (), ()
        for c in tl.static_range(4):
            high = high + (levels[c] * inputs[4 * k + 2] + last,)
            second = levels[c] * inputs[4 * k + 1]
            for first in tl.static_range(4):
                low = low + (levels[first] * inputs[4 * k] + second,)
        # an entry is the sum of two of these numbers
        if ASSEMBLED:
            at = room + half * 65536 + quarter * 16384 + column * 4
            run_asm(WRITE, "=r,r" + ",f" * 20, (at,) + low + high)
        else:
            own = room + half * 16384 + quarter * 4096 + column
            for entry in tl.static_range(64):
                tl.store(own + entry * 64, low[entry % 16] + high[entry // 16])


@triton.jit
def _pairs(x, lane, split, units, HALVES: tl.constexpr):
    """Return pairs of split inputs: the first operand of products, for 64 or 128 columns."""
    row, found = lane % 32 // 4, ()
    first = split * (16 * HALVES) + row // 4
    at = x + first * 8 + row % 4 + lane % 2 * 4 + lane % 4 // 2 * (units * 8)
    for k in tl.static_range(8 * HALVES):
        # column `8 (k // 2) + 32 (k % 2) + row`
        unit = k // 8 * 16 + k // 2 % 4 * 4 + k % 2 * 2
        found = found + (tl.load(at + unit * 8, mask=first + unit < units, other=0),)
    return found


@triton.jit
def _write_products(
    pairs, room, words, lane, W: tl.constexpr, HALVES: tl.constexpr, ASSEMBLED: tl.constexpr
):  # fmt: skip
    """Write a program's tables of sums for codewords, eight codewords per warp at a time.

    An entry is four products, by `mma.m16n8k16`: rows of the first operand are columns of a table,
    with both parts of the split inputs; the second operand holds codewords as float16, exactly.
    """
    # lane 4 r + c gets the results of rows r and r + 8 with the codewords 2 c and 2 c + 1. For 32
    # lanes to use 32 banks, c must select among columns too: the terms of a row are the inputs of
    # four columns, 8 t + r, and a codeword is zero for all but one t, which rotates with c
    c, row = lane % 4, lane % 32 // 4
    for eight in tl.static_range(32 // W):
        entry = (lane // 32 * (32 // W) + eight) * 8 + 2 * c
        own = ()
        for t in tl.static_range(4):
            own = own + (tl.where(row // 2 == t, words[eight], 0),)
        for turn in tl.static_range(4):
            second = ()
            for t in tl.static_range(4):
                second = second + (own[(4 + t - turn) % 4],)
            place = entry * 64 + (c + turn) % 4 * 8 + row
            for half in tl.static_range(HALVES):
                first = ()
                for k in tl.static_range(8):
                    first = first + (pairs[8 * half + k],)
                if ASSEMBLED:
                    run_asm(
                        _put_products(65536 * half), "=r" + ",r" * 13,
                        (room + place * 4,) + first + second
                    )  # fmt: skip
                else:
                    for lower in tl.static_range(2):
                        sums = _products(first, second, lower, W)
                        at = room + half * 16384 + place + 32 * lower
                        tl.store(at, sums[0])
                        tl.store(at + 64, sums[1])


@triton.jit
def _products(first, second, lower: tl.constexpr, W: tl.constexpr):
    """Compute a lane's two numbers in the upper or lower eight rows in the interpreter."""
    total = tl.zeros([W, 8, 8], tl.float32)
    for t in tl.static_range(4):
        for half in tl.static_range(2):
            row, column = half_of(first[2 * t + lower], half), half_of(second[t], half)
            total += lane_products(row, column, W)
    even, odd = tl.split(tl.reshape(total, [W, 8, 4, 2]))
    return tl.reshape(even, [32 * W]), tl.reshape(odd, [32 * W])


@triton.jit
def _four_inputs(x, unit, byte, units, KIND: tl.constexpr):
    """Return the four float32 inputs of a byte of indices; split ones stay divided by 16."""
    if KIND == "split":
        # pairs from even and from odd places; then the lower parts of each
        at, is_unit = x + unit * 8 + byte, unit < units
        even, odd = tl.load(at, mask=is_unit, other=0), tl.load(at + 4, mask=is_unit, other=0)
        at += units * 8
        rest, odd_rest = tl.load(at, mask=is_unit, other=0), tl.load(at + 4, mask=is_unit, other=0)
        return (
            half_of(even, 0) + half_of(rest, 0),
            half_of(odd, 0) + half_of(odd_rest, 0),
            half_of(even, 1) + half_of(rest, 1),
            half_of(odd, 1) + half_of(odd_rest, 1),
        )
    else:
        place = (unit * 8 + byte * 2)[:, None] + tl.arange(0, 2)[None, :]
        pairs = columns(tl.load(x + place, mask=(unit < units)[:, None], other=0), 2)
        return (
            number_of(pairs[0], 0, KIND), number_of(pairs[0], 1, KIND),
            number_of(pairs[1], 0, KIND), number_of(pairs[1], 1, KIND),
        )  # fmt: skip


@triton.jit
def _order(q, r):
    """Return columns of a word's four bytes, for the even and odd word of a pair, and selectors."""
    even, odd, selectors = q * 0, q * 0, ()
    for step in tl.static_range(4):
        byte = step ^ r % 4
        even |= (byte + r // 4 * 4 + q * 8) * 4 << 8 * step
        odd |= (byte + (1 - r // 4) * 4 + q * 8) * 4 << 8 * step
        # the upper half replicates the sign bit of a column byte, which is zero
        selectors = selectors + (0xCC00 | byte << 4 | 4 + step,)
    return (even, odd), selectors


@triton.jit
def _load_ahead(
    source, scales, row, size, split, lane, units, LENGTH: tl.constexpr, HALVES: tl.constexpr
):  # fmt: skip
    """Load a lane's words of four rows and their scales; zeros past the inputs."""
    found = ()
    for k in tl.static_range(4):
        own = tl.minimum(row + 8 * k + lane % 32 // 4, size - 1)  # rows past the last repeat it
        for half in tl.static_range(HALVES):
            unit = split * (16 * HALVES) + half * 16 + lane % 4 * 4
            place = tl.multiple_of(own.to(tl.int64) * units + unit, 4)
            at = source + place[:, None] + tl.arange(0, 4)[None, :]
            words = columns(tl.load(at, mask=(unit < units)[:, None], other=0), 4)
            found = found + ((words, _shares(scales, own, unit, units, place, LENGTH)),)
    return found


@triton.jit
def _shares(scales, row, unit, units, place, LENGTH: tl.constexpr):
    """Load the scales of four units as stored, one by one or packed in one word."""
    if scales.dtype.element_ty == tl.int32:
        return (tl.load(scales + place // 4, mask=unit < units, other=0),)
    else:
        found = shares_of(scales, row, unit, units, LENGTH, 4)
        return columns(found, found.shape[1])


@triton.jit
def _row_sum(
    loaded, places, selectors, room, half: tl.constexpr, r, ASSEMBLED: tl.constexpr
):  # fmt: skip
    """Return the sum over a lane's four words of a row; half the lanes swap the words of a pair."""
    words, shares = loaded
    is_swapped = r // 4 == 1
    factors = _factors(shares, is_swapped, ASSEMBLED)
    y = tl.zeros(r.shape, tl.float32)
    for pair in tl.static_range(2):
        one, two = words[2 * pair], words[2 * pair + 1]
        both = (tl.where(is_swapped, two, one), tl.where(is_swapped, one, two))
        for k in tl.static_range(2):
            found = _word_sum(both[k], places[k], selectors, room, half, pair, ASSEMBLED)
            y += factors[2 * pair + k] * found
    return y


@triton.jit
def _factors(shares, is_swapped, ASSEMBLED: tl.constexpr):
    """Return the scales of four words in the order in which the words are used."""
    COUNT: tl.constexpr = len(shares)
    if shares[0].dtype == tl.int32:  # four scales of 8 bits
        if ASSEMBLED:
            four = tl.inline_asm_elementwise(
                SWAP, "=r,r,r", [shares[0], tl.where(is_swapped, 0x2301, 0x3210)],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            swapped = (shares[0] & 0xFF00FF) << 8 | shares[0] >> 8 & 0xFF00FF
            four = tl.where(is_swapped, swapped, shares[0])
        return (_scale(four << 20), _scale(four << 12), _scale(four << 4), _scale(four >> 4))
    else:
        found = ()
        for k in tl.static_range(4):
            own, other = decoded(shares[k * COUNT // 4]), decoded(shares[(k ^ 1) * COUNT // 4])
            found = found + (tl.where(is_swapped, other, own) if COUNT == 4 else own,)
        return found


@triton.jit
def _scale(bits):
    """Decode an E5M3 scale whose 8 bits are shifted into place already."""
    return (bits & 0x0FF00000).to(tl.float32, bitcast=True) * 2.0**112


@triton.jit
def _word_sum(
    word, places, selectors, room, half: tl.constexpr, pair: tl.constexpr, ASSEMBLED: tl.constexpr
):  # fmt: skip
    """Return the sum of the products of a word's 16 weights, not yet multiplied by their scale."""
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            _look_up(65536 * half + 128 * pair), "=f" + ",r" * 7,
            (word, places) + selectors + (room,), dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        total = tl.zeros(word.shape, tl.float32)
        for step in tl.static_range(4):
            own = selectors[step]
            entry, place = word >> (own >> 4 & 3) * 8 & 255, places >> (own & 3) * 8 & 255
            total += tl.load(room + half * 16384 + entry * 64 + place // 4 + 32 * pair)
        return total


@triton.jit
def _over(y, COUNT: tl.constexpr, W: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Return each lane's sum over its aligned group of COUNT lanes."""
    if ASSEMBLED:
        for k in tl.static_range(5):
            if 2**k < COUNT:
                y += tl.inline_asm_elementwise(
                    OTHER, "=f,f,r", [y, 2**k], dtype=tl.float32, is_pure=True, pack=1
                )
        return y
    else:
        total = tl.sum(tl.reshape(y, [32 * W // COUNT, COUNT]), axis=1)
        return tl.reshape(tl.broadcast_to(total[:, None], [32 * W // COUNT, COUNT]), [32 * W])


@triton.jit
def _added(
    found, apart, splits, TILES: tl.constexpr, STEPS: tl.constexpr, WIDE: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of all programs, twenty loads at a time; the loads bypass the L1 cache.

    Gates and ups, which are `apart` numbers apart, take ten loads each.
    """
    TURN: tl.constexpr = 20 // TILES
    step = tl.arange(0, WIDE)[None, :] + tl.zeros([32 * W, 1], tl.int32)
    totals, places = (), found[:, None] + step
    for _ in tl.static_range(TILES):
        totals = totals + (tl.zeros([32 * W, WIDE], tl.float32),)
    for first in range(0, splits, TURN):
        more, sums = (), ()
        for k in tl.static_range(TILES * TURN):
            split = first + k % TURN
            at = places + k // TURN * apart + split * (32 * STEPS)
            is_there = (step < STEPS) & (split < splits)
            more = more + (tl.load(at, mask=is_there, other=0.0, cache_modifier=".cg"),)
        for t in tl.static_range(TILES):
            total = totals[t]
            for k in tl.static_range(TURN):
                total += more[t * TURN + k]
            sums = sums + (total,)
        totals = sums
    return totals
