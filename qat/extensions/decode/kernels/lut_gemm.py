"""Multiply a packed matrix and a batch: `y = x @ W.T`, `W = codebook[indices] * S`.

`W` has exactly the numbers that `form` gives in the dtype of `x`, bfloat16 or float16; sums are
float32. Levels are looked up in registers and multiplied by tensor cores, and no weight is written
to memory. A single vector may be multiplied by float32 weights instead, with a smaller error
(`lut_sums`). For large batches, where all of this is slower, `W` is formed once and a library
multiplies; a per-device table holds the batch size at which that starts (`tuned`).

The kernel:

    program   32 rows per warp and the vectors of a tile; programs may share the inputs (split-K)
    warp      32 rows x 64 inputs at a time
    lane      4 g + c holds unit c (16 weights that share one scale) of the rows g, g + 8, g + 16
              and g + 24: the first operand of `mma.m16n8k16` with permuted inputs, as the order
              within a sum is free
    slice     64 inputs of a tile's vectors, the second operand: all warps of a program share it,
              copied to shared memory a few slices ahead
    span      V slices, whose indices a lane reads at once, 16 or 24 bytes, one span ahead

On Hopper, for 64 vectors or more, `wgmma` multiplies 64 rows of four warps and reads the vectors
from shared memory (`lut_wgmma`). A kernel that runs before lays the vectors out, and a kernel that
runs afterwards reduces split-K partial sums on all multiprocessors.

At 2.5 bits per weight the bound is the latency of a warp's own results, and from 64 vectors on the
tensor cores as well. It is neither the memory, 6 us of the 22 us that one vector took this way at
8192 x 8192 (one H100), nor the instructions, 8 us.

Shapes: M vectors, O out_features, I in_features, C levels, V units of a row that a lane reads.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.backend.device import on
from qat.extensions.decode.kernels.launch import (
    IS_COMPILED,
    gdc_launch_dependents,
    gdc_wait,
    has_warpgroups,
    overlapping,
)
from qat.extensions.decode.kernels.lut_mma import (
    asm_values,
    columns,
    decoded,
    lane_products,
    look_up_4,
    number_of,
    rounded,
    run_asm,
    shares_of,
    words_of,
)
from qat.extensions.decode.kernels.lut_rows import MOST_PARTS, UNIT, LutRows
from qat.extensions.decode.kernels.lut_sums import INPUTS as SUMMED
from qat.extensions.decode.kernels.lut_sums import (
    WARPS,
    Source,
    SumsTile,
    add_up,
    arrivals,
    steps_for,
)
from qat.extensions.decode.kernels.lut_wgmma import (
    BEHIND,
    LAY_BLOCK,
    STAGES,
    arrived,
    asked_for,
    barriers,
    begin,
    declared,
    end,
    fetch,
    lay_kernel,
    lay_own,
    release,
    room_for,
)
from qat.kernels.dispatch import tl, triton, use_triton
from qat.kernels.lut_weight import form
from qat.kernels.tuned import chosen
from qat.quant.weight import PackedIndices, Scales, from_stored

BITS = (2, 3, 4)
"""Bits per index that the kernel can read."""
INPUTS = 64
"""Inputs per slice; the rows of a matrix must be a multiple of it."""
ROWS = {1: 32, 4: 16}
"""Rows per warp, keyed by the number of warps that are multiplied together."""
WIDTHS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Vectors per tile; 24 is absent because it was slower than 32 in all nine shapes timed."""
WIDEST_APART = 128
"""The largest number of vectors per tile if each warp multiplies its own rows."""
RESIDENT = {8: 4, 16: 3}
"""Resident programs of four warps per multiprocessor by width, limited by registers; 2 otherwise.

Compiled by Triton 3.6 for Hopper with 2 bits, a thread uses 126, 154, 170, 228 and 254 registers at
widths 8, 16, 32, 48 and 64, without spills. 4 bits use about as many; 3 bits use 160 at width 8,
where three programs fit. From 96 on a thread uses 255 and spills a few, and a program has eight
warps, so that only one fits.
"""
SMALL = {96: 5 * 2**20, 128: 12 * 2**20}
"""Weights below which a matrix is formed, keyed by width; `2**20` for other widths.

Forming and the library's product took 96 vectors 16.6 us at 4096 x 1024, where the kernel takes
17.2, and 20.2 against 18.9 at 6144 x 1024; 128 vectors took 28.6 against 31.3 at 2560 x 4096, and
38.3 against 35.8 at 6144 x 2560. For up to 64 vectors the kernel won in all nine shapes, from
1024 x 2048 on; smaller shapes were not timed (one NVIDIA H100).
"""
LEAST_TOGETHER, MOST_TOGETHER = 64, 512
"""Widths between which Hopper multiplies the rows of four warps together."""
SMALL_TOGETHER, SMALL_COLUMNS = 2**23, 64
"""Weights below which `wgmma` tiles are limited, and their largest number of vectors.

With tiles of 128 vectors the programs were too few or too short: 10.9 us against 9.4 at 4096 x 1024
and 128 vectors, and 18.0 against 12.7 with 256 vectors (one NVIDIA H200).
"""
RESIDENT_TOGETHER = {16: 4, 32: 4, 48: 4, 64: 4, 96: 3, 128: 3}
"""Resident `wgmma` programs of four warps per multiprocessor, keyed by columns.

Wider tiles use programs of eight warps, which share the vectors; one of them fits.
"""
SHARED_BYTES = 48 * 1024
"""The largest amount of shared memory that a program may declare."""


Room = Callable[[torch.Size, torch.dtype, torch.device], Tensor]
"""A function that allocates memory for a formed weight."""


class Part(NamedTuple):
    """A packed weight as a checkpoint stores it; its group size is a multiple of 16."""

    octets: Tensor
    """`(O, packed_width)` uint8."""
    scales: Tensor
    """`(O, G)`: uint8 (E5M3), float16 or float32."""
    codebook: Tensor
    """`(C,)` float32, C at most `2**bits`."""
    bits: int

    @property
    def shape(self) -> torch.Size:
        """`(O, I)`."""
        return torch.Size((self.octets.shape[0], self.octets.shape[1] * 8 // self.bits))

    @classmethod
    def of(cls, rows: LutRows) -> list[Self]:
        """Return views of the parts of a joined matrix."""
        parts = [rows.part(index) for index in range(len(rows.starts))]
        return [cls(p.octets, p.scales, p.codebooks[0], p.bits) for p in parts]

    def formed(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return `W`, `(O, I)`."""
        bits = 8 * self.scales.element_size()
        scales = Scales(from_stored("scales", self.scales, bits), bits=bits)
        source = PackedIndices(self.octets, self.bits, self.shape[1])
        return form(source, self.codebook, scales, dtype, out=out)


class GemmTile(NamedTuple):
    """The tiling of a product.

    `columns` also selects the method: `lut_sums` for 1, a formed weight for 0.
    """

    columns: int
    """Vectors per tile; 1: look up sums; 0: form the weight and let a library multiply."""
    warps: int = 4
    """Warps per program, 32 rows each."""
    splits: int = 1
    """Programs that share the inputs of a tile (split-K). If sums are looked up, `SumsTile.steps`;
    if the weight is formed, the slabs of rows that are formed one at a time."""
    stages: int = 4
    """Slices of 64 inputs in shared memory."""
    registers: int = 0
    """Register limit per thread; 0: no limit."""
    together: int = 1
    """Warps whose rows are multiplied together: 1, or 4 on Hopper (`wgmma`)."""
    own: int = 0
    """1: a `wgmma` program lays out all of its slices itself, each in a stage of its own."""


FORMED = GemmTile(0, 0, 1, 0)


def is_format(bits: int, d: int, group_size: int, in_features: int) -> bool:
    """Return whether the kernel reads indices of `bits` for d weights each with this group size."""
    is_whole = group_size % UNIT == 0 and in_features % INPUTS == 0
    return bits in BITS and d == 1 and is_whole


def width_for(num_vectors: int) -> int:
    """Return the narrowest tile width that fits; above the widest, the next power of two."""
    if num_vectors > WIDTHS[-1]:
        return triton.next_power_of_2(num_vectors)
    return next(width for width in WIDTHS if width >= num_vectors)


def tile_for(
    out_features: int, in_features: int, bits: int, width: int, *, has_groups: bool = False
) -> GemmTile:
    """Return the default tile for `width_for(M)`: as many programs as a large GPU can run at once.

    With half as many the kernel is bound by its own latency: at 8192 x 8192, 64 vectors, 128
    programs took 55.0 us; 256 programs took 30.4 us for 48 vectors, and a library with bfloat16
    50.4 us (one NVIDIA H100, 2 bits per weight, groups of 16).

    The weight is formed for more vectors than the widest tile, and where that is faster (`SMALL`).
    """
    if has_groups and LEAST_TOGETHER <= width <= MOST_TOGETHER:
        is_small = out_features * in_features < SMALL_TOGETHER
        columns = min(width, SMALL_COLUMNS if is_small else WIDTHS[-1])
        warps = 4 if columns in RESIDENT_TOGETHER else 8
        blocks = triton.cdiv(out_features, ROWS[4] * warps) * triton.cdiv(width, columns)
        resident = 132 * RESIDENT_TOGETHER.get(columns, 1)
        splits = splits_for(blocks, in_features, bits, resident)[0]
        return GemmTile(columns, warps, splits, STAGES, together=4)
    if width > WIDEST_APART or out_features * in_features < SMALL.get(width, 2**20):
        return FORMED
    if has_groups and width == 1 and bits == 2:  # Hopper's shared memory holds the tables
        return GemmTile(1, WARPS, steps_for(out_features, in_features), 0)
    width = max(width, WIDTHS[1])
    warps = 8 if width > 64 else 4
    blocks = triton.cdiv(out_features, ROWS[1] * warps)
    spans = triton.cdiv(in_features, 4 * UNIT * units_ahead(bits))
    programs = 132 * min(RESIDENT.get(width, 8 // warps), 3 if bits == 3 else 4)
    splits = max(min(programs // blocks, spans // 2, 16), 1)
    return GemmTile(width, warps, splits, stages_for(width))


def splits_for(blocks: int, in_features: int, bits: int, resident: int) -> list[int]:
    """Return split-K counts for the inputs of each block, those with the fewest steps first.

    Steps are the spans computed one after another if a GPU runs `resident` programs at once, plus
    two for the start and the end of a program.
    """
    spans = triton.cdiv(in_features, 4 * UNIT * units_ahead(bits))
    steps = {
        s: triton.cdiv(blocks * s, resident) * (triton.cdiv(spans, s) + 2)
        for s in range(1, min(spans, 16) + 1)
    }
    return sorted(steps, key=steps.__getitem__)


def stages_for(width: int) -> int:
    """Return the number of slices that fit in shared memory, at most six."""
    return min(SHARED_BYTES // (2 * INPUTS * width), 6)


def units_ahead(bits: int) -> int:
    """Return the units of a row that a lane reads at a time: 16 bytes, or 24 for 3 bits."""
    return 2 if bits == 4 else 4


def lut_gemm(
    x: Tensor,
    parts: Sequence[Part],
    bias: Tensor | None = None,
    *,
    room: Room | None = None,
) -> Tensor:
    """Return `x @ W.T + bias`, `(..., I)` to `(..., O)` in `x.dtype`, with the parts' rows stacked.

    The kernel adds a bias in the bias' own dtype before it rounds; a library adds it in `x.dtype`,
    as a model's own linear does.

    The weight is formed where that is faster, where no kernel is available, and where
    `is_one_product` is false. `room` allocates the memory for it; by default a new tensor is made.
    """
    O, I = sum(part.shape[0] for part in parts), parts[0].shape[1]
    flat = x.reshape(-1, I)
    tile = _tile(flat, parts, O)
    if tile.columns:
        flat = flat.contiguous()
        flat = flat if flat.data_ptr() % 16 == 0 else flat.clone()  # it is read 16 bytes at a time
        if tile.columns > 1:
            return _multiplied(flat, parts, bias, tile).view(*x.shape[:-1], O)
        # one vector: look up sums of products of weights and inputs
        out = flat.new_empty(1, O)
        sources = [Source(part.octets, part.scales, part.codebook) for part in parts]
        add_up(out, flat, sources, bias, SumsTile(SUMMED, tile.splits, tile.warps))
        return out.view(*x.shape[:-1], O)
    room = _own_room if room is None else room
    if tile.splits > 1:
        return _by_slabs(flat, parts, bias, -(-O // tile.splits), room).view(*x.shape[:-1], O)
    weight = room(torch.Size((O, I)), x.dtype, x.device)
    start = 0
    for part in parts:
        end = start + part.shape[0]
        part.formed(x.dtype, out=weight[start:end])
        start = end
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _own_room(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _by_slabs(
    x: Tensor, parts: Sequence[Part], bias: Tensor | None, most: int, room: Room
) -> Tensor:
    """Multiply by at most `most` rows of the weight at a time, which then stay in a cache."""
    out = x.new_empty(len(x), sum(part.shape[0] for part in parts))
    start = 0
    for part in parts:
        for octets, scales in zip(part.octets.split(most), part.scales.split(most), strict=True):
            slab = part._replace(octets=octets, scales=scales)
            formed = slab.formed(x.dtype, out=room(slab.shape, x.dtype, x.device))
            columns = slice(start, start + len(octets))
            if bias is None:
                torch.mm(x, formed.T, out=out[:, columns])
            else:
                torch.addmm(bias[columns].to(x.dtype), x, formed.T, out=out[:, columns])
            start = columns.stop
    return out


def is_one_product(parts: Sequence[Part], dtype: torch.dtype) -> bool:
    """Return whether one launch of the kernel can multiply all parts by vectors of `dtype`."""
    kinds = {
        (p.bits, len(p.codebook), p.scales.dtype, p.scales.shape[1], p.shape[1]) for p in parts
    }
    I = parts[0].shape[1]
    return (
        len(kinds) == 1
        and len(parts) <= MOST_PARTS
        and dtype in (torch.bfloat16, torch.float16)
        and is_format(parts[0].bits, 1, I // parts[0].scales.shape[1], I)
    )


def _tile(flat: Tensor, parts: Sequence[Part], O: int) -> GemmTile:
    if not (use_triton(flat, __name__) and is_one_product(parts, flat.dtype) and len(flat)):
        return FORMED
    # `mma.m16n8k16` came with Ampere, as bfloat16 did
    if flat.is_cuda and not on(flat.device).has_bf16():
        return FORMED
    key = (O, flat.shape[1], parts[0].bits, width_for(len(flat)))
    default = tile_for(*key, has_groups=has_warpgroups(flat.device))
    return chosen("lut_gemm", key, default, flat.device)


def _multiplied(x: Tensor, parts: Sequence[Part], bias: Tensor | None, tile: GemmTile) -> Tensor:
    (M, I), bits = x.shape, parts[0].bits
    sizes = [part.shape[0] for part in parts]
    out = x.new_empty(M, sum(sizes))
    together = tile.together if IS_COMPILED else 1
    rows = ROWS[together] * tile.warps
    grid = (sum(triton.cdiv(n, rows) for n in sizes), tile.splits, triton.cdiv(M, tile.columns))
    partials = counts = None
    if tile.splits > 1:
        size = grid[0] * grid[1] * grid[2] * rows * tile.columns
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
        counts = arrivals(x.device, grid[0] * grid[2]) if together == 1 else None
    # the kernel takes MOST_PARTS parts; missing ones have size 0
    none = MOST_PARTS - len(parts)
    padded = [*parts, *parts[-1:] * none]
    ends = dict(zip(("size_0", "size_1", "size_2"), [*sizes, *[0] * none], strict=True))
    capped = {"maxnreg": tile.registers} if IS_COMPILED and tile.registers else {}
    length, V = I // parts[0].scales.shape[1] // UNIT, units_ahead(bits)
    laid = None
    if together > 1:
        spans = triton.cdiv(I, 4 * UNIT * V)
        if not tile.own:
            laid = _laid(x, tile.columns, V, is_spread=bits == 2)
        elif tile.stages < V * triton.cdiv(spans, tile.splits):
            raise ValueError(f"{tile} has too few stages for {I} inputs")
        room, words = room_for(2 * INPUTS * tile.columns * tile.stages)
    else:
        room, words = declared(2 * INPUTS * tile.columns * tile.stages), 0
    options = {"NT": tile.columns // 8, "W": tile.warps, "ASSEMBLED": IS_COMPILED}
    options |= {"num_warps": tile.warps, **overlapping(x.device)}
    _gemm_kernel[grid](
        out, partials, counts, x.view(torch.int32), laid,
        *(part.octets.view(torch.int32) for part in padded), *(part.scales for part in padded),
        *(part.codebook for part in padded), bias,
        num_vectors=M, num_out=out.shape[1], **ends, quads=I // INPUTS, BITS=bits,
        C=len(parts[0].codebook), LENGTH=length, V=V, STAGES=tile.stages, ROOM=room, WORDS=words,
        TOGETHER=together, num_stages=1, **capped, **options,
    )  # fmt: skip
    if tile.splits > 1 and together > 1:
        _add_kernel[(grid[0], tile.columns // 8, grid[2])](
            out, partials, bias, num_vectors=M, num_out=out.shape[1], **ends, splits=tile.splits,
            KIND="bf16" if x.dtype == torch.bfloat16 else "f16", **options,
        )  # fmt: skip
    return out


def _laid(x: Tensor, columns: int, V: int, *, is_spread: bool) -> Tensor:
    """Return all slices of tiles of `columns` vectors in the layout that `lut_wgmma` reads."""
    M, I = x.shape
    spans, tiles = triton.cdiv(I, 4 * UNIT * V), triton.cdiv(M, columns)
    octets = tiles * spans * V * columns * 2 * INPUTS
    laid = torch.empty(octets, dtype=torch.uint8, device=x.device)
    tasks = octets // 64
    lay_kernel[(triton.cdiv(tasks, LAY_BLOCK),)](
        laid, x.view(torch.int32), num_vectors=M, units=I // UNIT, spans=spans, tasks=tasks,
        N=columns, V=V, IS_SPREAD=is_spread, BLOCK=LAY_BLOCK, num_warps=LAY_BLOCK // 32,
        **overlapping(x.device),
    )  # fmt: skip
    return laid


# Inline assembly: operates on a lane's registers.


@triton.constexpr_function
def _table(bits: int, kind: str) -> str:
    """Return assembly for the table of rounded level * scale that look-ups read.

    4 levels take two registers of two numbers each. More levels are stored as bytes: the lower
    bytes of four levels per register, followed by registers of the upper bytes.
    """
    C = 2**bits
    pairs = C // 2
    outputs = 2 if bits == 2 else pairs
    lines = [".reg .f32 one, two;", ".reg .b32 " + ", ".join(f"p{k}" for k in range(pairs)) + ";"]
    for k in range(pairs):
        lines += [f"mul.rn.f32 one, ${outputs}, ${outputs + 1 + 2 * k};"]
        lines += [f"mul.rn.f32 two, ${outputs}, ${outputs + 2 + 2 * k};"]
        lines += [f"cvt.rn.{kind}x2.f32 p{k}, two, one;"]
    if bits == 2:
        lines += ["mov.b32 $0, p0;", "mov.b32 $1, p1;"]
    else:
        for k in range(pairs // 2):
            lines += [f"prmt.b32 ${k}, p{2 * k}, p{2 * k + 1}, 0x6420;"]
            lines += [f"prmt.b32 ${pairs // 2 + k}, p{2 * k}, p{2 * k + 1}, 0x7531;"]
    return "\n".join(["{", *lines, "}"])


def _look_up_2(is_spread: bool) -> str:
    """Return assembly: $0-$7 are the weights 0 1, 2 3, ..., 14 15; $8 the word; $9, $10 the table.

    If `is_spread`, the pairs are 0 4, ..., 3 7, 8 12, ..., 11 15, which saves an instruction for
    every four weights.
    """
    lines = [".reg .b32 sel;"]
    for k in range(4):
        if is_spread:
            lines += [f"shr.u32 sel, $8, {2 * k};"]
        else:
            # two adjacent indices, from the lower and from the upper half of the word
            lines += [f"shr.u32 sel, $8, {4 * k};", "and.b32 sel, sel, 0x000F000F;"]
            lines += ["mul.lo.u32 sel, sel, 65;"]
        # one index per byte, then the positions of a level's two bytes among the table's eight
        lines += ["and.b32 sel, sel, 0x03030303;"]
        lines += ["mad.lo.u32 sel, sel, 34, 0x10101010;", f"prmt.b32 ${k}, $9, $10, sel;"]
        lines += ["shr.u32 sel, sel, 16;", f"prmt.b32 ${4 + k}, $9, $10, sel;"]
    return "\n".join(["{", *lines, "}"])


def _look_up_3() -> str:
    """Return the same for 3 bits; $8 and $9 hold eight indices each, $10-$13 the table."""
    lines = [".reg .b32 sel, more, low, high;"]
    for word in (0, 1):
        # spread 24 bits to 12 per half of the register, 6 per byte, 3 per nibble
        lines += [f"and.b32 sel, ${8 + word}, 0x00000FFF;"]
        lines += [f"and.b32 more, ${8 + word}, 0x00FFF000;", "mad.lo.u32 sel, more, 16, sel;"]
        lines += ["and.b32 more, sel, 0x0FC00FC0;", "mad.lo.u32 sel, more, 3, sel;"]
        lines += ["and.b32 more, sel, 0x38383838;", "add.u32 sel, more, sel;"]
        for half in (0, 1):
            lines += ["shr.u32 sel, sel, 16;"] if half else []
            lines += ["prmt.b32 low, $10, $11, sel;", "prmt.b32 high, $12, $13, sel;"]
            # interleave lower and upper bytes: two numbers per register
            lines += [f"prmt.b32 ${4 * word + 2 * half}, low, high, 0x5140;"]
            lines += [f"prmt.b32 ${4 * word + 2 * half + 1}, low, high, 0x7362;"]
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def _steps(kind: str) -> str:
    """Return four mma steps: $0-$3 sums, $4-$19 weights, $20-$27 inputs, $28-$31 addends."""
    lines = []
    for step in range(4):
        first, second, third = (start + 2 * step for start in (4, 12, 20))
        before = "{$28, $29, $30, $31}" if step == 0 else "{$0, $1, $2, $3}"
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, "
            f"{{${first}, ${second}, ${first + 1}, ${second + 1}}}, "
            f"{{${third}, ${third + 1}}}, {before};"
        )
    return "\n".join(lines)


# instructions per weight: 0.5 for the table of level * scale, and for a look-up among 4, 8 and 16
# levels (byte permutations and masks) 1.4, 1.6 and 2.6
LOOK_UP_2, LOOK_UP_3, LOOK_UP_4 = (
    tl.constexpr(text) for text in (_look_up_2(False), _look_up_3(), look_up_4(is_spread=False))
)
SPREAD_2 = tl.constexpr(_look_up_2(True))


@triton.constexpr_function
def _constraints(outputs: str, inputs: str) -> str:
    """Return constraints; `3f` is three float registers. No result shares an input's register."""
    made = [f"=&{outputs[-1]}"] * int(outputs[:-1])
    for group in inputs.split():
        made += [group[-1]] * int(group[:-1])
    return ",".join(made)


FETCH = tl.constexpr("cp.async.cg.shared.global [$1], [$2], 16, $3; mov.b32 $0, $1;")
FETCHED = tl.constexpr("cp.async.commit_group; mov.b32 $0, $1;")
READ = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
# the compiler needs minutes to coalesce this many plain stores and loads; the loads bypass the L1
# cache, which does not see stores of other multiprocessors
PUT_FOUR = tl.constexpr("st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;")
GET_FOUR = tl.constexpr("ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];")
# every thread stores before the first thread increments the counter; the others read the count
# from the memory of the slices, into which no copy is in flight by then. Triton's own atomic
# addition would need more shared memory, of which none may be left
HAND_IN = tl.constexpr("""{
.reg .pred is; .reg .b32 t;
cp.async.wait_all; bar.sync 0;
mov.u32 t, %tid.x; setp.eq.u32 is, t, 0;
@is atom.acq_rel.gpu.global.add.u32 t, [$1], 1;
@is st.shared.b32 [$2], t;
bar.sync 0; ld.shared.b32 $0, [$2];
}""")
PUT_SHORT = tl.constexpr(
    "{.reg .pred is; setp.ne.u32 is, $3, 0; @is st.global.b16 [$1], $2; mov.b32 $0, 0;}"
)
INTEGERS_4 = tl.constexpr((tl.int32,) * 4)
INTEGERS_8 = tl.constexpr((tl.int32,) * 8)
FLOATS_4 = tl.constexpr((tl.float32,) * 4)


@triton.constexpr_function
def _arrived(stages: int) -> str:
    """Return assembly: wait for the oldest slice and for all warps to finish the one before."""
    return f"cp.async.wait_group {stages - 2}; bar.sync 0; mov.b32 $0, $1;"


@triton.jit(do_not_specialize=["num_vectors", "num_out", "size_0", "size_1", "size_2", "quads"])
def _gemm_kernel(
    out, partials, arrivals, x, laid, source_0, source_1, source_2, scales_0, scales_1, scales_2,
    levels_0, levels_1, levels_2, bias, num_vectors, num_out, size_0, size_1, size_2, quads,
    BITS: tl.constexpr, C: tl.constexpr, LENGTH: tl.constexpr, V: tl.constexpr,
    NT: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, ROOM: tl.constexpr,
    WORDS: tl.constexpr, TOGETHER: tl.constexpr, ASSEMBLED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    lane = tl.arange(0, 32 * W)
    R: tl.constexpr = 2 if TOGETHER > 1 else 4  # rows per lane, eight apart
    # the part that contains this program's rows
    block, before, size = tl.program_id(0), 0, size_0
    source, scales, levels = source_0, scales_0, levels_0
    blocks_0, blocks_1 = tl.cdiv(size_0, 8 * R * W), tl.cdiv(size_1, 8 * R * W)
    if block >= blocks_0 + blocks_1:
        block, before, size = block - blocks_0 - blocks_1, size_0 + size_1, size_2
        source, scales, levels = source_2, scales_2, levels_2
    elif block >= blocks_0:
        block, before, size = block - blocks_0, size_0, size_1
        source, scales, levels = source_1, scales_1, levels_1
    row = block * (8 * R * W) + lane // 32 * (8 * R) + lane % 32 // 4
    column = tl.program_id(2) * (8 * NT)
    units = quads * 4  # units per row, a multiple of four so that words are aligned
    spans, splits = tl.cdiv(units, 4 * V), tl.num_programs(1)
    first = tl.program_id(1) * spans // splits
    last = (tl.program_id(1) + 1) * spans // splits
    # no kernel writes these, so they are loaded before the wait for the previous kernel
    loaded = _load_ahead(source, scales, row, size, first, lane, units, BITS, LENGTH, V, R)
    table = ()
    for k in tl.static_range(2**BITS):
        table = table + (tl.load(levels + (k if k < C else C - 1) + lane * 0),)
    KIND: tl.constexpr = "bf16" if out.dtype.element_ty == tl.bfloat16 else "f16"
    # x is written by the previous kernel
    if OVERLAP:
        gdc_wait()
    shared = 0
    if ASSEMBLED:
        # a scalar: the compiler might compute one value per lane twice
        shared = run_asm(ROOM, "=r", ())
    if ASSEMBLED and TOGETHER > 1:
        sums = _sums_of_four_warps(
            x, laid, loaded, source, scales, row, size, first, last, spans, table, levels, shared,
            column, num_vectors, lane, units, BITS, LENGTH, V, NT, W, STAGES, KIND,
        )  # fmt: skip
    else:
        sums = _sums(
            x, loaded, source, scales, row, size, first, last, table, levels, shared, column,
            num_vectors, lane, units, BITS, LENGTH, V, NT, W, STAGES, KIND, ASSEMBLED,
        )  # fmt: skip
    if partials is None:
        total = sums
        is_last = True
    # split-K: every program stores its sums
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        FOURS: tl.constexpr = R // 2 * NT
        own = partials + tile.to(tl.int64) * (FOURS * 128 * W) * splits + lane * 4
        for k in tl.static_range(FOURS):
            place = own + (tl.program_id(1) * FOURS + k) * (128 * W)
            _leave(place, sums[k], ASSEMBLED)
        total = _zeros(FOURS, W)
        is_last = False
        # the last program of a tile adds them in a fixed order; for `wgmma`, `_add_kernel` does
        if arrivals is not None:
            is_last = _hand_in(arrivals + tile, shared, ASSEMBLED) == splits - 1
            if is_last:
                for split in range(splits):
                    added = ()
                    for k in tl.static_range(FOURS):
                        place = own + (split * FOURS + k) * (128 * W)
                        added = added + (_added(total[k], place, ASSEMBLED),)
                    total = added
                tl.store(arrivals + tile, 0)
    if is_last:
        _put(
            out, total, bias, row, size, before, column, num_vectors, num_out, lane,
            NT, R, KIND, ASSEMBLED,
        )  # fmt: skip
    # never true: it only makes Triton request shared memory
    if WORDS > 0:
        if num_vectors < 0:
            asked_for(out, WORDS)


@triton.jit
def _sums(
    x, loaded, source, scales, row, size, first, last, table, levels, shared, column, num_vectors,
    lane, units, BITS: tl.constexpr, LENGTH: tl.constexpr, V: tl.constexpr, NT: tl.constexpr,
    W: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr, ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Add up the products of a program's spans, warp by warp."""
    SLICE: tl.constexpr = 1024 * NT
    # the byte offset of the current slice in a ring of STAGES slices
    slot = 0
    room = shared + lane * 0
    if ASSEMBLED:
        for k in tl.static_range(STAGES - 1):
            _fetch(x, room + k * SLICE, first, k, column, num_vectors, lane, units, V, NT, W)
    sums = _zeros(2 * NT, W)
    for span in range(first, last):
        rows = loaded
        loaded = _load_ahead(source, scales, row, size, span + 1, lane, units, BITS, LENGTH, V, 4)
        for v in tl.static_range(V):
            weights = ()
            for r in tl.static_range(4):
                looked_up = _weights(rows[r], v, table, levels, BITS, V, KIND, False, ASSEMBLED)
                weights = weights + (looked_up,)
            here = room + slot
            if ASSEMBLED:
                here = run_asm(_arrived(STAGES), "=r,r", (here,))
                free = tl.where(slot == 0, (STAGES - 1) * SLICE, slot - SLICE)
                _fetch(
                    x, room + free, span, v + STAGES - 1, column, num_vectors, lane,
                    units, V, NT, W,
                )  # fmt: skip
                slot = tl.where(slot == (STAGES - 1) * SLICE, 0, slot + SLICE)
            more = ()
            for n in tl.static_range(NT):
                pairs = _inputs(x, here, n, span, v, column, num_vectors, lane, units, V, ASSEMBLED)
                for m in tl.static_range(2):
                    added = _products(
                        weights[2 * m], weights[2 * m + 1], pairs, sums[2 * n + m],
                        W, KIND, ASSEMBLED,
                    )  # fmt: skip
                    more = more + (added,)
            sums = more
    return sums


@triton.jit
def _sums_of_four_warps(
    x, laid, loaded, source, scales, row, size, first, last, spans, table, levels, shared, column,
    num_vectors, lane, units, BITS: tl.constexpr, LENGTH: tl.constexpr, V: tl.constexpr,
    NT: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Add up the products of a program's spans for four warps at a time (`lut_wgmma`): 64 rows.

    While one slice is multiplied, the weights of the next one are looked up.
    """
    SLICE: tl.constexpr = 1024 * NT
    IS_SPREAD: tl.constexpr = BITS == 2
    # keep one product pending if there are registers for the weights of two slices
    PENDING: tl.constexpr = 0 if W > 8 and NT > 12 else 1
    count = (last - first) * V
    slices, bars, thread = 0, 0, 0
    if laid is None:
        lay_own(x, shared, first, count, column, num_vectors, lane, units, V, IS_SPREAD, NT, W)
    else:
        begun = (tl.program_id(2) * spans + first).to(tl.int64)
        slices = (laid + begun * (V * SLICE)).to(tl.int64)
        bars, thread = barriers(STAGES, W)
        for s in tl.static_range(STAGES):
            fetch(slices, shared, bars, s, s, 1, thread, s < count, SLICE)
    # `used` are the weights that a pending product still reads
    none = tl.zeros([32 * W], tl.float32)
    sums, used = (), ()
    for _ in tl.static_range(4 * NT):
        sums = sums + (none,)
    for _ in tl.static_range(16):
        used = used + (lane * 0,)
    # slots are reused in rounds of STAGES slices; the parity of their barriers flips each round
    turn, parity, passed = 0, 0, 0
    for span in range(first, last):
        rows = loaded
        loaded = _load_ahead(source, scales, row, size, span + 1, lane, units, BITS, LENGTH, V, 2)
        for v in tl.static_range(V):
            weights = ()
            for r in tl.static_range(2):
                weights = weights + _weights(
                    rows[r], v, table, levels, BITS, V, KIND, IS_SPREAD, True
                )
            slot = turn * V + v
            if laid is not None:
                arrived(bars, slot, parity)
            sums = begin(sums, weights, shared + slot * SLICE, KIND, NT)
            if PENDING == 0:
                sums = end(sums, weights, 0, NT)
            else:
                sums = end(sums, used, 1, NT)
                used = weights
            if laid is not None:
                last_slot, free, free_parity = slot - 1, slot - 1 - BEHIND, parity
                if v == 0:
                    last_slot = tl.where(turn == 0, STAGES - 1, last_slot)
                release(bars, last_slot, thread, passed + v > 0)
                if v < 1 + BEHIND:  # the slot may belong to the previous round
                    free = tl.where(turn == 0, free + STAGES, free)
                    free_parity = tl.where(turn == 0, parity ^ 1, parity)
                index = passed + (v - 1 - BEHIND + STAGES)
                is_due = (index >= STAGES) & (index < count)
                fetch(slices, shared, bars, free, index, free_parity, thread, is_due, SLICE)
        passed += V
        is_round = turn == STAGES // V - 1
        turn = tl.where(is_round, 0, turn + 1)
        parity = tl.where(is_round, parity ^ 1, parity)
    sums = end(sums, used, 0, NT)
    total = ()
    for n in tl.static_range(NT):
        total = total + (_four(sums, n),)
    return total


@triton.jit(do_not_specialize=["num_vectors", "num_out", "size_0", "size_1", "size_2", "splits"])
def _add_kernel(
    out, partials, bias, num_vectors, num_out, size_0, size_1, size_2, splits,
    NT: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, ASSEMBLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add the split-K partial sums of eight of a tile's vectors in a fixed order."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    lane, e = tl.arange(0, 32 * W), tl.arange(0, 4)[None, :]
    block, before, size = tl.program_id(0), 0, size_0
    blocks_0, blocks_1 = tl.cdiv(size_0, 16 * W), tl.cdiv(size_1, 16 * W)
    if block >= blocks_0 + blocks_1:
        block, before, size = block - blocks_0 - blocks_1, size_0 + size_1, size_2
    elif block >= blocks_0:
        block, before, size = block - blocks_0, size_0, size_1
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    own = partials + (tile.to(tl.int64) * splits * NT + tl.program_id(1)) * (128 * W)
    place = own + lane[:, None] * 4 + e
    total = tl.zeros([32 * W, 4], tl.float32)
    for split in range(0, splits, 4):
        fours = ()
        for k in tl.static_range(4):  # issue all loads before the first is used
            at = place + (split + k) * (NT * 128 * W)
            fours = fours + (tl.load(at, mask=split + k < splits, other=0),)
        for k in tl.static_range(4):
            total += fours[k]
    row = block * (16 * W) + (lane // 32 * 16 + lane % 32 // 4)[:, None] + e // 2 * 8
    vector = (tl.program_id(2) * NT + tl.program_id(1)) * 8 + (lane % 4 * 2)[:, None] + e % 2
    if bias is not None:
        total += tl.load(bias + before + row, mask=row < size, other=0).to(tl.float32)
    tl.store(
        out + vector.to(tl.int64) * num_out + before + row, rounded(total, KIND, ASSEMBLED),
        mask=(row < size) & (vector < num_vectors),
    )  # fmt: skip


@triton.jit
def _four(sums, n: tl.constexpr):
    """Return a lane's four sums for vectors `8 n` to `8 n + 7`."""
    return (sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3])


@triton.jit
def _zeros(COUNT: tl.constexpr, W: tl.constexpr):
    """Return COUNT zero accumulators for 16 rows and 8 vectors each, four numbers per lane."""
    zeros = ()
    for _ in tl.static_range(COUNT):
        none = tl.zeros([32 * W], tl.float32)
        zeros = zeros + ((none, none, none, none),)
    return zeros


@triton.jit
def _hand_in(arrivals, shared, ASSEMBLED: tl.constexpr):
    """Increment a tile's counter; return how many programs stored their partial sums before."""
    if ASSEMBLED:
        return run_asm(HAND_IN, "=r,l,r", (arrivals.to(tl.int64), shared))
    else:
        return tl.atomic_add(arrivals, 1)


@triton.jit
def _leave(place, sums, ASSEMBLED: tl.constexpr):
    """Store a lane's four numbers contiguously."""
    if ASSEMBLED:
        run_asm(PUT_FOUR, "=r,l,f,f,f,f", (place.to(tl.int64),) + sums)
    else:
        for k in tl.static_range(4):
            tl.store(place + k, sums[k])


@triton.jit
def _added(total, place, ASSEMBLED: tl.constexpr):
    """Add a program's partial sums to `total`."""
    if ASSEMBLED:
        found = asm_values(GET_FOUR, "=f,=f,=f,=f,l", (place.to(tl.int64),), FLOATS_4, False)
    else:
        found = (tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3))
    return (total[0] + found[0], total[1] + found[1], total[2] + found[2], total[3] + found[3])


@triton.jit
def _load_ahead(
    source, scales, row, size, span, lane, units,
    BITS: tl.constexpr, LENGTH: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Load words and scales of V units of each of a lane's R rows; zeros past the end of a row."""
    unit = span * (4 * V) + lane % 4 * V
    found = ()
    for r in tl.static_range(R):
        own = tl.minimum(row + 8 * r, size - 1)  # rows past the last repeat it
        if BITS == 3:
            words = ()
            base = own.to(tl.int64) * (units // 2 * 3) + unit // 2 * 3
            for k in tl.static_range(3):
                place = base[:, None] + (2 * k + tl.arange(0, 2))[None, :]
                pair = tl.load(source + place, mask=(unit < units)[:, None], other=0)
                words = words + columns(pair, 2)
        else:
            words = columns(words_of(source, own, unit, units, BITS, V), V * BITS // 2)
        shares = shares_of(scales, own, unit, units, LENGTH, V)
        found = found + ((words, columns(shares, shares.shape[1])),)
    return found


@triton.jit
def _weights(
    loaded, v: tl.constexpr, table, levels, BITS: tl.constexpr, V: tl.constexpr,
    KIND: tl.constexpr, IS_SPREAD: tl.constexpr, ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Return unit v of a row as eight pairs of `round(level * scale)`: adjacent, or four apart."""
    words, shares = loaded
    GROUPS: tl.constexpr = len(shares)
    scale = decoded(shares[v * GROUPS // V])
    if BITS == 2:
        halves = (words[v],)
    elif BITS == 4:
        halves = (words[2 * v], words[2 * v + 1])
    else:  # 24 bits per half unit
        AT: tl.constexpr = v // 2 * 3 + v % 2
        one, two = words[AT], words[AT + 1]
        if v % 2 == 0:
            halves = (one & 0xFFFFFF, one >> 24 & 0xFF | two << 8)
        else:
            halves = (one >> 16 & 0xFFFF | two << 16, two >> 8 & 0xFFFFFF)
    if ASSEMBLED:
        COUNT: tl.constexpr = 2 if BITS == 2 else 2 ** (BITS - 1)
        scaled = asm_values(
            _table(BITS, KIND), _constraints(f"{COUNT}r", f"{2**BITS + 1}f"), (scale,) + table,
            _integers(COUNT)
        )  # fmt: skip
        OF_TWO_BITS: tl.constexpr = SPREAD_2 if IS_SPREAD else LOOK_UP_2
        return asm_values(
            OF_TWO_BITS if BITS == 2 else LOOK_UP_3 if BITS == 3 else LOOK_UP_4,
            _constraints("8r", f"{len(halves) + COUNT}r"), halves + scaled, INTEGERS_8
        )  # fmt: skip
    else:
        found = ()
        for pair in tl.static_range(8):
            both = ()
            for i in tl.static_range(2):
                half = halves[(2 * pair + i) * len(halves) // 16]
                index = half >> (2 * pair + i) % (16 // len(halves)) * BITS & 2**BITS - 1
                weight = rounded(tl.load(levels + index) * scale, KIND, ASSEMBLED)
                both = both + (weight.to(tl.int16, bitcast=True).to(tl.int32),)
            found = found + (both[0] & 0xFFFF | both[1] << 16,)
        return found


@triton.constexpr_function
def _integers(count: int) -> tuple[object, ...]:
    return (tl.int32,) * count


@triton.jit
def _fetch(
    x, room, span, v: tl.constexpr, column, num_vectors, lane, units,
    V: tl.constexpr, NT: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Start to copy the inputs of slice v of a span, or of a later span, to shared memory.

    Chunk q (16 bytes, of eight) of vector n is stored at `128 n + 16 (q ^ n % 2)`, so that no two
    lanes use the same bank; surplus lanes repeat other lanes' chunks.
    """
    CHUNKS: tl.constexpr = 64 * NT
    for k in tl.static_range((CHUNKS + 32 * W - 1) // (32 * W)):
        chunk = (lane + k * 32 * W) % CHUNKS
        n, q = chunk // 8, chunk % 8
        unit = (span + v // V) * (4 * V) + q // 2 * V + v % V
        is_there = (column + n < num_vectors) & (unit < units)
        place = (column + n).to(tl.int64) * (8 * units) + (unit * 8 + q % 2 * 4)
        source = (x + tl.where(is_there, place, 0)).to(tl.int64)
        num_bytes = tl.where(is_there, 16, 0)  # the copy fills the rest of 16 bytes with zeros
        run_asm(FETCH, "=r,r,l,r", (room + n * 128 + (q ^ n % 2) * 16, source, num_bytes))
    run_asm(FETCHED, "=r,r", (room,))


@triton.jit
def _inputs(
    x, here, n: tl.constexpr, span, v: tl.constexpr, column, num_vectors, lane, units,
    V: tl.constexpr, ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Return eight pairs of inputs of vector `8 n + g` for the unit of lane `4 g + c`."""
    g, c = lane % 32 // 4, lane % 4
    if ASSEMBLED:
        at = here + (g * 128 + (2 * c ^ g % 2) * 16) + n * 1024
        low = asm_values(READ, "=r,=r,=r,=r,r", (at,), INTEGERS_4, False)
        high = asm_values(READ, "=r,=r,=r,=r,r", (at ^ 16,), INTEGERS_4, False)
        return low + high
    else:
        unit = span * (4 * V) + c * V + v
        vector = column + 8 * n + g
        found = ()
        for k in tl.static_range(8):
            place = vector * (8 * units) + unit * 8 + k
            is_there = (vector < num_vectors) & (unit < units)
            found = found + (tl.load(x + place, mask=is_there, other=0),)
        return found


@triton.jit
def _products(
    first, second, pairs, sums, W: tl.constexpr, KIND: tl.constexpr, ASSEMBLED: tl.constexpr
):  # fmt: skip
    """Run four steps of `mma.m16n8k16`: add the products of two rows' units to `sums`."""
    if ASSEMBLED:
        return asm_values(
            _steps(KIND), _constraints("4f", "24r 4f"), first + second + pairs + sums, FLOATS_4
        )  # fmt: skip
    else:
        upper, lower = _product(first, pairs, W, KIND), _product(second, pairs, W, KIND)
        return (sums[0] + upper[0], sums[1] + upper[1], sums[2] + lower[0], sums[3] + lower[1])


@triton.jit
def _product(weights, pairs, W: tl.constexpr, KIND: tl.constexpr):
    """Compute one row's part of `_products` in the interpreter, lane by lane."""
    total = tl.zeros([W, 8, 8], tl.float32)
    for k in tl.static_range(8):
        for half in tl.static_range(2):
            weight, x = number_of(weights[k], half, KIND), number_of(pairs[k], half, KIND)
            total += lane_products(weight, x, W)
    return tl.split(tl.reshape(total, [32 * W, 2]))  # from `(W, 8, 8)`: two numbers per lane


@triton.jit
def _put(
    out, sums, bias, row, size, before, column, num_vectors, num_out, lane,
    NT: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr, ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Write a tile; lane `4 g + c` holds rows g and g + 8 of vectors 2 c and 2 c + 1."""
    for r in tl.static_range(R):
        is_row = row + 8 * r < size
        place = before + row + 8 * r
        added = tl.zeros([lane.shape[0]], tl.float32)
        if bias is not None:
            added = tl.load(bias + place, mask=is_row, other=0).to(tl.float32)
        for n in tl.static_range(NT):
            for i in tl.static_range(2):
                vector = column + 8 * n + lane % 4 * 2 + i
                y = sums[R // 2 * n + r // 2][r % 2 * 2 + i] + added
                at = out + vector.to(tl.int64) * num_out + place
                is_there = is_row & (vector < num_vectors)
                short = rounded(y, KIND, ASSEMBLED)
                if ASSEMBLED:
                    bits = short.to(tl.int16, bitcast=True)
                    run_asm(PUT_SHORT, "=r,l,h,r", (at.to(tl.int64), bits, is_there.to(tl.int32)))
                else:
                    tl.store(at, short, mask=is_there)
