"""One vector times packed rows, for `lut_gemm`: sums of four weights are looked up, not weights.

A byte of 2-bit indices names four levels, and what these add up to with the four inputs they meet
is one of 256 numbers. A program writes such a table for each of the 128 bytes of 512 inputs to
shared memory, 128 KiB in all, and then reads the same bytes of many rows. Everything is float32,
and no level is rounded. A weight costs 1.3 instructions (compiled by Triton 3.6 for Hopper) where
decoding it for tensor cores costs 3.4; what bounds it then is shared memory, of which each byte of
indices reads four, and how soon rows arrive: a warp asks for 64 before it computes the first 32,
and for none beyond its own, which a warp that ends would wait for.

A table is a column of 256 words, and 64 columns lie beside each other, so that an address is a byte
of indices above the column's: one byte permutation makes it. The 32 lanes of a warp need 32 banks.
Lane 4 r + q has the words 4 q to 4 q + 3 of sixteen of row r, and takes the bytes of a word, and
the words of a pair, in an order that depends on r. The column of byte b of word 4 q + j is
therefore `b + 4 (j % 2) + 8 q + 32 (j / 2)`; the other sixteen words have columns of their own.

A row is shared by as many programs as it has times 512 inputs. A warp hands in the sums of its
rows, and the last one adds them up in their order.
"""

from qat.kernels.dispatch import gdc_launch_dependents, gdc_wait, tl, triton
from qat.kernels.lut_mma import columns, decoded, number_of, rounded, shares_of
from qat.kernels.lut_wgmma import asked_for

INPUTS = 512
"""Of which a program has tables."""
TABLE_WORDS = tl.constexpr(2 * 64 * 256)
"""Of a program's tables."""
WARPS = 8
"""Of a program, one of which a multiprocessor has room for."""
AHEAD = tl.constexpr(2)
"""Times 32 rows that a warp asks for before it computes the first."""
MOST_STEPS = 4
"""Times 32 rows of a warp: as many numbers a lane adds up in the end."""


def _write() -> str:
    """Assembly: sums of one of $2-$17, by four bits, and one of $18-$21 to the place $1 and on."""
    lines = [".reg .f32 sum;"]
    for entry in range(64):
        lines += [f"add.rn.f32 sum, ${2 + entry % 16}, ${18 + entry // 16};"]
        lines += [f"st.shared.f32 [$1 + {256 * entry}], sum;"]
    return "\n".join(["{", *lines, "mov.b32 $0, $1;", "}"])


@triton.constexpr_function
def _look_up(offset: int) -> str:
    """Assembly: $0 the sum of a word's weights; $1 the word, $2 the bytes' columns, $7 the room.

    The selectors $3-$6 take a byte of the word, and below it one of the columns'.
    """
    lines = [".reg .b32 at; .reg .f32 first, second, third, fourth;"]
    for step, name in enumerate(("first", "second", "third", "fourth")):
        lines += [f"prmt.b32 at, $1, $2, ${3 + step};", "add.u32 at, at, $7;"]
        lines += [f"ld.shared.f32 {name}, [at + {offset}];"]
    lines += ["add.rn.f32 first, first, second;", "add.rn.f32 third, third, fourth;"]
    return "\n".join(["{", *lines, "add.rn.f32 $0, first, third;", "}"])


WRITE = tl.constexpr(_write())
ROOM = tl.constexpr("mov.u32 $0, global_smem;")
WRITTEN = tl.constexpr("bar.sync 0; mov.b32 $0, $1;")
WARP = tl.constexpr("{.reg .b32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 5;}")
SWAP = tl.constexpr("prmt.b32 $0, $1, 0, $2;")
OTHER = tl.constexpr("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;")
# every lane has stored before the first of them says so; the last one begins anew with 0
HAND_IN = tl.constexpr("""{
.reg .pred is; .reg .b32 t;
bar.warp.sync 0xffffffff;
mov.u32 t, %laneid; setp.eq.u32 is, t, 0;
@is atom.acq_rel.gpu.global.inc.u32 t, [$1], $2;
shfl.sync.idx.b32 $0, t, 0, 0x1f, 0xffffffff;
}""")


@triton.jit(do_not_specialize=["num_out", "size_0", "size_1", "size_2", "quads"])
def sums_kernel(
    out, partials, arrivals, tables, x, source_0, source_1, source_2, scales_0, scales_1, scales_2,
    levels_0, levels_1, levels_2, bias, num_out, size_0, size_1, size_2, quads,
    C: tl.constexpr, LENGTH: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr,
    ASSEMBLED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has 512 inputs, and each of its W warps STEPS times 32 rows."""
    if OVERLAP:
        gdc_launch_dependents()
    ROWS: tl.constexpr = 32 * STEPS
    lane = tl.arange(0, 32 * W)
    # the part of which a program's rows are
    block, before, size = tl.program_id(1), 0, size_0
    source, scales, levels = source_0, scales_0, levels_0
    blocks_0, blocks_1 = tl.cdiv(size_0, ROWS * W), tl.cdiv(size_1, ROWS * W)
    if block >= blocks_0 + blocks_1:
        block, before, size = block - blocks_0 - blocks_1, size_0 + size_1, size_2
        source, scales, levels = source_2, scales_2, levels_2
    elif block >= blocks_0:
        block, before, size = block - blocks_0, size_0, size_1
        source, scales, levels = source_1, scales_1, levels_1
    row = (block * W + lane // 32) * ROWS
    units, split, splits = quads * 4, tl.program_id(0), tl.num_programs(0)
    # what no kernel writes, so that it need not wait for the one before
    drawn = ()
    for step in tl.static_range(AHEAD if AHEAD < STEPS else STEPS):
        drawn = drawn + (_ahead(source, scales, row + step * 32, size, split, lane, units, LENGTH),)
    four = ()
    for k in tl.static_range(4):
        four = four + (tl.load(levels + (k if k < C else C - 1)),)
    KIND: tl.constexpr = "bf16" if out.dtype.element_ty == tl.bfloat16 else "f16"
    room = _room(tables, partials, num_out, ASSEMBLED)
    if OVERLAP:
        gdc_wait()
    room = _tables(x, room, four, lane, split, units, W, KIND, ASSEMBLED)
    q, r = lane % 4, lane % 32 // 4
    places, selectors = _order(q, r)
    warp = tl.program_id(1) * W + lane // 32
    own = partials + (warp * splits + split) * ROWS + q * 8 + r
    for step in tl.static_range(STEPS):
        if step + AHEAD < STEPS:
            after = row + (step + AHEAD) * 32
            drawn = drawn + (_ahead(source, scales, after, size, split, lane, units, LENGTH),)
        rows = drawn[step]
        total = tl.zeros([32 * W], tl.float32)
        for k in tl.static_range(4):
            y = _row_sum(rows[2 * k], places, selectors, room, 0, r, ASSEMBLED)
            y += _row_sum(rows[2 * k + 1], places, selectors, room, 1, r, ASSEMBLED)
            total = tl.where(q == k, _over_four(y, W, ASSEMBLED), total)
        tl.store(own + step * 32, total)
    counter = arrivals + tl.program_id(1) * W
    if ASSEMBLED:
        # a number, though one a warp: what follows is done by whole warps
        counter += tl.inline_asm_elementwise(WARP, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        count = tl.inline_asm_elementwise(
            HAND_IN, "=r,l,r", [counter.to(tl.int64), splits - 1],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        count = tl.atomic_add(counter, 1)
        tl.store(counter, 0, mask=count == splits - 1)
    if count == splits - 1:
        WIDE: tl.constexpr = triton.next_power_of_2(STEPS)
        found = partials + warp * splits * ROWS + lane % 32 * STEPS
        sums = columns(_added(found, splits, STEPS, WIDE, W), WIDE)
        for k in tl.static_range(STEPS):
            place = row + lane % 32 * STEPS + k
            y, is_row = sums[k], place < size
            if bias is not None:
                y += tl.load(bias + before + place, mask=is_row, other=0).to(tl.float32)
            tl.store(out + before + place, rounded(y, KIND, ASSEMBLED), mask=is_row)


@triton.jit
def _room(tables, partials, num_out, ASSEMBLED: tl.constexpr):
    """Where a program's tables are: in shared memory; interpreted, behind each other."""
    if ASSEMBLED:
        if num_out < 0:
            asked_for(partials, TABLE_WORDS)
        return tl.inline_asm_elementwise(ROOM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        return tables + program * TABLE_WORDS


@triton.jit
def _tables(
    x, room, levels, lane, split, units, W: tl.constexpr, KIND: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Write a program's tables: the room, when all are there."""
    for k in tl.static_range(16 // W):
        thread = lane + k * 32 * W
        column, quarter, half = thread % 64, thread // 64 % 4, thread // 256
        unit = split * 32 + half * 16 + column // 8 % 4 * 4 + column // 32 * 2 + column // 4 % 2
        place = (unit * 8 + column % 4 * 2)[:, None] + tl.arange(0, 2)[None, :]
        pairs = columns(tl.load(x + place, mask=(unit < units)[:, None], other=0), 2)
        last = levels[3]
        for c in tl.static_range(3):
            last = tl.where(quarter == c, levels[c], last)
        last *= number_of(pairs[1], 1, KIND)
        low, high = (), ()
        for c in tl.static_range(4):
            high = high + (levels[c] * number_of(pairs[1], 0, KIND) + last,)
            second = levels[c] * number_of(pairs[0], 1, KIND)
            for first in tl.static_range(4):
                low = low + (levels[first] * number_of(pairs[0], 0, KIND) + second,)
        if ASSEMBLED:
            at = room + half * 65536 + quarter * 16384 + column * 4
            tl.inline_asm_elementwise(
                WRITE, "=r,r" + ",f" * 20, (at,) + low + high,
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            own = room + half * 16384 + quarter * 4096 + column
            for entry in tl.static_range(64):
                tl.store(own + entry * 64, low[entry % 16] + high[entry // 16])
    if ASSEMBLED:
        # what is read from there needs this result, so that nothing is read before
        return tl.inline_asm_elementwise(
            WRITTEN, "=r,r", [room], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return room


@triton.jit
def _order(q, r):
    """Places of a word's four columns, for a pair's even and its odd word, and their selectors."""
    even, odd, selectors = q * 0, q * 0, ()
    for step in tl.static_range(4):
        byte = step ^ r % 4
        even |= (byte + r // 4 * 4 + q * 8) * 4 << 8 * step
        odd |= (byte + (1 - r // 4) * 4 + q * 8) * 4 << 8 * step
        # the upper half is the sign of a place, which has none
        selectors = selectors + (0xCC00 | byte << 4 | 4 + step,)
    return (even, odd), selectors


@triton.jit
def _ahead(source, scales, row, size, split, lane, units, LENGTH: tl.constexpr):
    """A lane's eight words of each of four rows, and their scales; beyond the inputs, zeros."""
    found = ()
    for k in tl.static_range(4):
        own = tl.minimum(row + 8 * k + lane % 32 // 4, size - 1)  # beyond the last the last again
        for half in tl.static_range(2):
            unit = split * 32 + half * 16 + lane % 4 * 4
            place = tl.multiple_of(own.to(tl.int64) * units + unit, 4)
            at = source + place[:, None] + tl.arange(0, 4)[None, :]
            words = columns(tl.load(at, mask=(unit < units)[:, None], other=0), 4)
            found = found + ((words, _shares(scales, own, unit, units, place, LENGTH)),)
    return found


@triton.jit
def _shares(scales, row, unit, units, place, LENGTH: tl.constexpr):
    """The scales of four units, as stored, or in one word."""
    if scales.dtype.element_ty == tl.int32:
        return (tl.load(scales + place // 4, mask=unit < units, other=0),)
    else:
        found = shares_of(scales, row, unit, units, LENGTH, 4)
        return columns(found, found.shape[1])


@triton.jit
def _row_sum(
    drawn, places, selectors, room, half: tl.constexpr, r, ASSEMBLED: tl.constexpr
):  # fmt: skip
    """What four words of a row add up to; of a pair of words, half the lanes swap them."""
    words, shares = drawn
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
    """The scales of four words in their order."""
    COUNT: tl.constexpr = len(shares)
    if shares[0].dtype == tl.int32:  # four of 8 bits
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
    """As `decoded`, of 8 bits that are in their place."""
    return (bits & 0x0FF00000).to(tl.float32, bitcast=True) * 2.0**112


@triton.jit
def _word_sum(
    word, places, selectors, room, half: tl.constexpr, pair: tl.constexpr, ASSEMBLED: tl.constexpr
):  # fmt: skip
    """What a word's 16 weights add up to, but for their scale."""
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
def _over_four(y, W: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Each lane's sum over the four lanes of its row."""
    if ASSEMBLED:
        for apart in tl.static_range(1, 3):
            y += tl.inline_asm_elementwise(
                OTHER, "=f,f,r", [y, apart], dtype=tl.float32, is_pure=True, pack=1
            )
        return y
    else:
        total = tl.sum(tl.reshape(y, [8 * W, 4]), axis=1)
        return tl.reshape(tl.broadcast_to(total[:, None], [8 * W, 4]), [32 * W])


@triton.jit
def _added(found, splits, STEPS: tl.constexpr, WIDE: tl.constexpr, W: tl.constexpr):
    """What all programs handed in, sixteen of them at a time; past the first-level cache."""
    step = tl.arange(0, WIDE)[None, :] + tl.zeros([32 * W, 1], tl.int32)
    total, places = tl.zeros([32 * W, WIDE], tl.float32), found[:, None] + step
    for first in range(0, splits, 16):
        more = ()
        for k in tl.static_range(16):
            at = places + (first + k) * (32 * STEPS)
            is_there = (step < STEPS) & (first + k < splits)
            more = more + (tl.load(at, mask=is_there, other=0.0, cache_modifier=".cg"),)
        for k in tl.static_range(16):
            total += more[k]
    return total
