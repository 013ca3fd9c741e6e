"""Packed rows times vectors on the tensor cores, for `lut_matvec`: levels of 16 bits, codewords.

A warp takes 16 rows and 64 inputs at a time. Its lane 4 r + c holds the unit c of the rows r and
r + 8, which is what `mma.m16n8k16` wants of its first factor if the inputs of a product's four
steps are those that the lane has: their order within a sum is free. The second factor has 8
columns: in 2 c and 2 c + 1 lie unit c's inputs, upper and lower parts (`lut_rows.split`), and
zeros elsewhere. So a product's column 2 c + h is what unit c adds, and lies in the lane that knows
the unit's scale.

Levels cost 1.3 integer instructions each for 2 bits and 2.6 for 4 (byte permutations pick the lower
and the upper bytes of four levels, and put them together), and nothing else is done for a weight.

A codeword of four float16 is two registers of the first factor, which one load brings from shared
memory: half an integer instruction a weight. 16 lanes are served at once if none needs another
word of the same two of 32 banks; of 256 codewords lying once, three lanes would. So each lane of
the 16 has a copy in banks of its own, 32 KiB in all. Gates and ups have two codebooks, of 8 copies
each: there eight lanes of the 16 read a gate's codewords while the others read an up's.
"""

from qat.kernels.dispatch import tl, triton

UNIT_HALVES = tl.constexpr(16)
"""Inputs of a unit."""
CODEWORDS = tl.constexpr(256)
"""Of a codebook of vectors; a row of shared memory, 128 bytes, holds the copies of one."""


def _two_bits() -> str:
    """Assembly: $8 the word, $9 and $10 the lower and the upper bytes of four levels."""
    lines = [".reg .b32 word, sel, low, high;"]
    # a selector of `prmt` has four nibbles: 16 bits of the word without every other index are one
    for odd in (0, 1):
        lines += [f"shr.u32 word, $8, {2 * odd};", "and.b32 word, word, 0x33333333;"]
        for half in (0, 1):
            lines += [f"shr.u32 sel, word, {16 * half};"]
            lines += ["prmt.b32 low, $9, 0, sel;", "prmt.b32 high, $10, 0, sel;"]
            first = 4 * odd + 2 * half
            # lower and upper bytes in turns: two float16 a register
            lines += [f"prmt.b32 ${first}, low, high, 0x5140;"]
            lines += [f"prmt.b32 ${first + 1}, low, high, 0x7362;"]
    return "\n".join(["{", *lines, "}"])


def _four_bits() -> str:
    """Assembly: $8 and $9 the words, $10-$13 and $14-$17 the bytes of sixteen levels."""
    lines = [".reg .b32 sel, pick, sels, picks, below, above, low, high;"]
    for word in (0, 1):
        # three bits of an index choose a byte among eight, of the levels below and of those above;
        # the fourth chooses between the two: nibble k of `picks` is k, or 4 + k (0xEA: a & b | c)
        lines += [f"and.b32 sels, ${8 + word}, 0x77777777;", f"shr.u32 picks, ${8 + word}, 1;"]
        lines += ["lop3.b32 picks, picks, 0x44444444, 0x32103210, 0xEA;"]
        for half in (0, 1):
            lines += [f"shr.u32 sel, sels, {16 * half};", f"shr.u32 pick, picks, {16 * half};"]
            for name, first in (("low", 10), ("high", 14)):
                lines += [f"prmt.b32 below, ${first}, ${first + 1}, sel;"]
                lines += [f"prmt.b32 above, ${first + 2}, ${first + 3}, sel;"]
                lines += [f"prmt.b32 {name}, below, above, pick;"]
            lines += [f"prmt.b32 ${2 * word + half}, low, high, 0x6240;"]
            lines += [f"prmt.b32 ${4 + 2 * word + half}, low, high, 0x7351;"]
    return "\n".join(["{", *lines, "}"])


def _four_codewords() -> str:
    """Assembly: $8 a word of four indices, $9 the lane's place in the first codeword's row."""
    lines = [".reg .b32 at;"]
    for k in range(4):
        lines += [f"prmt.b32 at, $8, 0, 0x444{k};", "mad.lo.u32 at, at, 128, $9;"]
        lines.append(f"ld.shared.v2.b32 {{${k}, ${4 + k}}}, [at];")
    return "\n".join(["{", *lines, "}"])


def _four_steps() -> str:
    """Assembly: $8-$15, $16-$23 levels of two rows, $24-$31 inputs; what two steps each add up to.

    Two chains, $0-$3 and $4-$7, since a step waits for the one before.
    """
    lines = [".reg .f32 none;", "mov.f32 none, 0f00000000;"]
    for step in range(4):
        first, second, third = (start + 2 * step for start in (8, 16, 24))
        levels = f"{{${first}, ${second}, ${first + 1}, ${second + 1}}}"
        sums = "{" + ", ".join(f"${4 * (step % 2) + k}" for k in range(4)) + "}"
        before = sums if step > 1 else "{none, none, none, none}"
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {sums}, "
            f"{levels}, {{${third}, ${third + 1}}}, {before};"
        )
    return "\n".join(["{", *lines, "}"])


TWO_BITS, FOUR_BITS = tl.constexpr(_two_bits()), tl.constexpr(_four_bits())
FOUR_CODEWORDS, FOUR_STEPS = tl.constexpr(_four_codewords()), tl.constexpr(_four_steps())
# where the room for copies is; a codeword written there twice; all of them are there
ROOM = tl.constexpr(
    "{.shared .align 128 .b8 copies[32768]; bar.warp.sync 0xffffffff; mov.u32 $0, copies;}"
)
PUT_TWICE = tl.constexpr("st.shared.v2.b64 [$1], {$2, $2}; mov.b32 $0, $1;")
ALL_THERE = tl.constexpr("bar.sync 0; mov.b32 $0, $1;")
WORDS_8 = tl.constexpr("=&r," * 8)
INTEGERS_8 = tl.constexpr((tl.int32,) * 8)
FLOATS_8 = tl.constexpr((tl.float32,) * 8)
SUMS = tl.constexpr("=&f," * 8 + ",".join(["r"] * 24))


@triton.jit
def mma_ahead(
    source, scales, first_row, num_out, start, UNITS: tl.constexpr, BITS: tl.constexpr,
    D: tl.constexpr, LENGTH: tl.constexpr, TILES: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Words and scales of the units that a lane computes next, of both of its rows in each tile.

    A tile is 16 rows from `first_row` on, and as many further down, `num_out` rows later.
    """
    lane = tl.arange(0, 32 * W)
    unit = start + lane // 32 * (4 * V) + lane % 4 * V
    found = ()
    for t in tl.static_range(TILES):
        tile = _turn(t, lane // 8, TILES, D)
        begin, last = first_row + tile * num_out, num_out * (tile + 1) - 1
        for half in tl.static_range(2):
            row = tl.minimum(begin + 8 * half + lane % 32 // 4, last)
            words = words_of(source, row, unit, UNITS, BITS, V)
            found = found + ((words, shares_of(scales, row, unit, UNITS, LENGTH, V)),)
    return found


@triton.jit
def _turn(t, eight, TILES: tl.constexpr, D: tl.constexpr):
    """The tile that lanes compute as their t-th: of two of codewords, every other eight swap them.

    Eight lanes are two rows, so that rows' sums are swapped back in the end.
    """
    return (t + eight) % 2 if TILES == 2 and D > 1 else t


@triton.jit
def mma_tables(
    tables, first_row, num_out, second, third, BITS: tl.constexpr, D: tl.constexpr,
    TILES: tl.constexpr, W: tl.constexpr, ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Where each tile's levels or codewords are: words, or one address."""
    lane = tl.arange(0, 32 * W)
    found = ()
    if D > 1 and ASSEMBLED:
        rows = _copied(tables, first_row, num_out, second, third, lane, TILES, W)
    for t in tl.static_range(TILES):
        tile = _turn(t, lane // 8, TILES, D)
        part = _part(first_row + tile * num_out, second, third)
        if D == 1:
            found = found + (_table(tables, part, lane, 2 if BITS == 2 else 8),)
        elif ASSEMBLED:
            found = found + ((rows + (tile * 64 + lane % (16 // TILES) * 8),),)
        else:
            found = found + ((tables + part * CODEWORDS,),)
    return found


@triton.jit
def _part(row, second, third):
    """Of which matrix under the others a row is."""
    return (row >= second).to(tl.int32) + (row >= third).to(tl.int32)


@triton.jit
def _copied(
    tables, first_row, num_out, second, third, lane, TILES: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Copy codewords to shared memory: the address of the first one's row.

    A row's first half is the first tile's, the second the last's. A lane writes a whole row, 16
    bytes at a time, each lane of eight beginning elsewhere; or a part where there are more lanes.
    """
    TOGETHER: tl.constexpr = (W + 7) // 8
    TIMES: tl.constexpr = (8 + W - 1) // W
    own, last = lane % CODEWORDS, first_row + (TILES - 1) * num_out
    ones, others = (), ()
    for k in tl.static_range(TIMES):
        place = tables + own + k * 32 * W
        ones = ones + (tl.load(place + _part(first_row, second, third) * CODEWORDS),)
        others = others + (tl.load(place + _part(last, second, third) * CODEWORDS),)
    # a number, not one a lane, which the compiler might do twice; and loads are under way before it
    room = tl.inline_asm_elementwise(ROOM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    for j in tl.static_range(8 // TOGETHER):
        eighth = (lane + lane // CODEWORDS * (8 // TOGETHER) + j) % 8
        for k in tl.static_range(TIMES):
            word = ones[k] if TILES == 1 else tl.where(eighth < 4, ones[k], others[k])
            tl.inline_asm_elementwise(
                PUT_TWICE, "=r,r,l", [room + (own + k * 32 * W) * 128 + eighth * 16, word],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    # what is read from there needs this result, so that nothing is read before
    return tl.inline_asm_elementwise(
        ALL_THERE, "=r,r", [room], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def mma_dots(
    x, source, scales, table, factors, drawn, first_row, num_out, second, third,
    UNITS: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr,
    LENGTH: tl.constexpr, TILES: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """`W[row] @ x[b]` of each tile's 16 rows, `(16,)` float32 by b, then by tile."""
    SPAN: tl.constexpr = 4 * V * W
    WORDS: tl.constexpr = BITS // 2
    lane = tl.arange(0, 32 * W)
    factor = ()
    for t in tl.static_range(TILES):
        factor = factor + (tl.load(factors + _part(first_row + t * num_out, second, third)),)
    sums = ()
    for _ in tl.static_range(2 * TILES * B):
        sums = sums + (tl.zeros([32 * W], tl.float32),)
    inputs = _inputs_ahead(x, 0, lane, UNITS, B, V)
    for start in range(0, UNITS, SPAN):
        rows, pairs = drawn, inputs
        if UNITS > SPAN:
            drawn = mma_ahead(
                source, scales, first_row, num_out, start + SPAN,
                UNITS, BITS, D, LENGTH, TILES, V, W,
            )  # fmt: skip
            inputs = _inputs_ahead(x, start + SPAN, lane, UNITS, B, V)
        words, shares = (), ()
        GROUPS: tl.constexpr = rows[0][1].shape[1]
        for r in tl.static_range(2 * TILES):
            words = words + (columns(rows[r][0], V * WORDS),)
            shares = shares + (columns(rows[r][1], GROUPS),)
        for v in tl.static_range(V):
            more = ()
            for t in tl.static_range(TILES):
                first = _levels(words[2 * t], table[t], v, BITS, D, ASSEMBLED)
                other = _levels(words[2 * t + 1], table[t], v, BITS, D, ASSEMBLED)
                share = decoded(shares[2 * t][v * GROUPS // V])
                other_share = decoded(shares[2 * t + 1][v * GROUPS // V])
                for b in tl.static_range(B):
                    pair = pairs[b * V + v]
                    both = columns(pair[0], 4) + columns(pair[1], 4)
                    added, other_added = _products(first, other, both, W, ASSEMBLED)
                    more = more + (sums[2 * (t * B + b)] + added * share,)
                    more = more + (sums[2 * (t * B + b) + 1] + other_added * other_share,)
            sums = more
    rows = ()
    for i in tl.static_range(TILES * B):
        upper, lower = _row_sums(sums[2 * i], W), _row_sums(sums[2 * i + 1], W)
        rows = rows + (tl.reshape(tl.trans(tl.join(upper, lower)), [16]),)
    found = ()
    for t in tl.static_range(TILES):
        for b in tl.static_range(B):
            own = rows[t * B + b]
            if TILES == 2 and D > 1:
                is_swapped = tl.arange(0, 16) // 2 % 2 == 1
                own = tl.where(is_swapped, rows[(1 - t) * B + b], own)
            found = found + (own * factor[t],)
    return found


@triton.jit
def _table(tables, part, lane, SIZE: tl.constexpr):
    """A part's words, one for each lane: what an assembled line reads has the lanes' shape."""
    found = ()
    for t in tl.static_range(SIZE):
        found = found + (tl.load(tables + part * SIZE + t + lane * 0),)
    return found


@triton.jit
def _levels(
    words, table, v: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, ASSEMBLED: tl.constexpr
):
    """Levels of the indices that unit v of a lane holds, or its codewords."""
    if D > 1:
        return _codewords(words[v], table[0], ASSEMBLED)
    elif BITS == 2:
        return _levels_of_two(words[v], table, ASSEMBLED)
    else:
        return _levels_of_four(words[2 * v], words[2 * v + 1], table, ASSEMBLED)


@triton.jit
def _inputs_ahead(x, start, lane, UNITS: tl.constexpr, B: tl.constexpr, V: tl.constexpr):
    """Inputs of the units that a lane computes next, by vector, then by unit."""
    unit = start + lane // 32 * (4 * V) + lane % 4 * V
    found = ()
    for b in tl.static_range(B):
        for v in tl.static_range(V):
            found = found + (_inputs(x + b * UNITS * UNIT_HALVES, unit + v, lane, UNITS),)
    return found


@triton.jit
def _row_sums(lanes, W: tl.constexpr):
    """`(8,)`: over the warps and a row's four lanes."""
    return tl.sum(tl.sum(tl.reshape(lanes, [W, 8, 4]), axis=2), axis=0)


@triton.jit
def words_of(source, row, unit, units, BITS: tl.constexpr, V: tl.constexpr):
    """`(lanes, V * BITS / 2)` int32: consecutive units of a row."""
    N: tl.constexpr = V * (BITS // 2)
    place = row.to(tl.int64) * (units * (BITS // 2)) + unit * (BITS // 2)
    at = place[:, None] + tl.arange(0, N)[None, :]
    return tl.load(source + at, mask=(unit < units)[:, None], other=0)


@triton.jit
def shares_of(scales, row, unit, units, LENGTH: tl.constexpr, V: tl.constexpr):
    """`(lanes, V)`: the scales of consecutive units, as stored; zeros outside the row.

    Fewer columns where groups are whole units of a lane, or a lane's units are in one group.
    """
    place = row.to(tl.int64)[:, None] * (units // LENGTH)
    if V % LENGTH == 0:
        N: tl.constexpr = V // LENGTH
        # the compiler would not know that these lie side by side in whole words
        group = tl.multiple_of(unit // LENGTH, N)[:, None] + tl.arange(0, N)[None, :]
    elif LENGTH % V == 0:
        group = (unit // LENGTH)[:, None]
    else:
        group = (unit[:, None] + tl.arange(0, V)[None, :]) // LENGTH
    return tl.load(scales + place + group, mask=(unit < units)[:, None], other=0)


@triton.jit
def decoded(scale):
    """A scale in float32."""
    if scale.dtype == tl.uint8:
        # the bits of a float16 without its last seven: as a float32, less 112 in the exponent
        return (scale.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 2.0**112
    else:
        return scale.to(tl.float32)


@triton.jit
def _inputs(x, unit, lane, UNITS: tl.constexpr):
    """Eight pairs of a unit's inputs: of lane 4 n + c those of column n, if unit c's lie there."""
    column = lane % 32 // 4
    is_own = (column // 2 == lane % 4) & (unit < UNITS)
    place = column % 2 * (UNITS * UNIT_HALVES // 2) + unit * (UNIT_HALVES // 2)
    # 16 bytes at a time, the most that a lane can read
    at = place[:, None] + tl.arange(0, 4)[None, :]
    low = tl.load(x + at, mask=is_own[:, None], other=0)
    return low, tl.load(x + at + 4, mask=is_own[:, None], other=0)


@triton.jit
def columns(rows, N: tl.constexpr):
    """Each lane's N values one by one, `(lanes,)` each."""
    if N == 1:
        return (tl.reshape(rows, [rows.shape[0]]),)
    else:
        even, odd = tl.split(tl.reshape(rows, [rows.shape[0], N // 2, 2]))
        evens, odds = columns(even, N // 2), columns(odd, N // 2)
        found = ()
        for n in tl.static_range(N // 2):
            found = found + (evens[n], odds[n])
        return found


@triton.jit
def _levels_of_two(word, table, ASSEMBLED: tl.constexpr):
    """Eight pairs of levels of a word's 16 indices: 0 2, 4 6, ..., 14; then 1 3, ..., 15."""
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            TWO_BITS, WORDS_8 + "r,r,r", [word, table[0], table[1]],
            dtype=INTEGERS_8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = ()
        for pair in tl.static_range(8):
            j = pair % 4 * 4 + pair // 4
            one, two = word >> 2 * j & 3, word >> 2 * (j + 2) & 3
            level = _byte(table[0], one) | _byte(table[1], one) << 8
            level |= _byte(table[0], two) << 16 | _byte(table[1], two) << 24
            found = found + (level,)
        return found


@triton.jit
def _levels_of_four(low, high, table, ASSEMBLED: tl.constexpr):
    """The same of indices of 4 bits, in two words."""
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            FOUR_BITS, WORDS_8 + "r,r,r,r,r,r,r,r,r,r",
            [low, high, table[0], table[1], table[2], table[3],
             table[4], table[5], table[6], table[7]],
            dtype=INTEGERS_8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = ()
        for pair in tl.static_range(8):
            j = pair % 4 * 4 + pair // 4
            word = low if j < 8 else high
            one, two = word >> 4 * (j % 8) & 15, word >> 4 * (j % 8 + 2) & 15
            level = _byte_of_16(table, 0, one) | _byte_of_16(table, 4, one) << 8
            level |= _byte_of_16(table, 0, two) << 16 | _byte_of_16(table, 4, two) << 24
            found = found + (level,)
        return found


@triton.jit
def _codewords(word, table, ASSEMBLED: tl.constexpr):
    """The same eight pairs of a word's four codewords, whose pairs lie so (`short_codewords`)."""
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            FOUR_CODEWORDS, WORDS_8 + "r,r", [word, table],
            dtype=INTEGERS_8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        even, odd = (), ()
        for k in tl.static_range(4):
            codeword = tl.load(table + _byte(word, k))
            even = even + (codeword.to(tl.int32),)
            odd = odd + ((codeword >> 32).to(tl.int32),)
        return even + odd


@triton.jit
def _byte(word, place):
    return word >> 8 * place & 255


@triton.jit
def _byte_of_16(table, FIRST: tl.constexpr, place):
    below = tl.where(place < 4, table[FIRST], table[FIRST + 1])
    above = tl.where(place < 12, table[FIRST + 2], table[FIRST + 3])
    return _byte(tl.where(place < 8, below, above), place % 4)


@triton.jit
def _products(first, second, inputs, W: tl.constexpr, ASSEMBLED: tl.constexpr):
    """What a lane's unit adds to its two rows."""
    if ASSEMBLED:
        sums = tl.inline_asm_elementwise(
            FOUR_STEPS, SUMS,
            [first[0], first[1], first[2], first[3], first[4], first[5], first[6], first[7],
             second[0], second[1], second[2], second[3],
             second[4], second[5], second[6], second[7],
             inputs[0], inputs[1], inputs[2], inputs[3],
             inputs[4], inputs[5], inputs[6], inputs[7]],
            dtype=FLOATS_8, is_pure=True, pack=1,
        )  # fmt: skip
        # a row's upper and lower parts in both chains
        return (sums[0] + sums[1]) + (sums[4] + sums[5]), (sums[2] + sums[3]) + (sums[6] + sums[7])
    else:
        return _product(first, inputs, W), _product(second, inputs, W)


@triton.jit
def _product(levels, inputs, W: tl.constexpr):
    """A row's part of `mma.m16n8k16`, lane by lane: what the interpreter runs."""
    total = tl.zeros([W, 8, 8], tl.float32)
    for pair in tl.static_range(8):
        for half in tl.static_range(2):
            level = tl.reshape(half_of(levels[pair], half), [W, 8, 1, 4])
            column = tl.reshape(half_of(inputs[pair], half), [W, 1, 8, 4])
            total += tl.sum(level * column, axis=3)
    upper, lower = tl.split(tl.reshape(total, [W, 8, 4, 2]))
    return tl.reshape(upper + lower, [32 * W])


@triton.jit
def half_of(word, half: tl.constexpr):
    """One of the two float16 of a word, in float32."""
    return (word >> 16 * half).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def number_of(pair, half: tl.constexpr, KIND: tl.constexpr):
    """One of a pair of numbers, in float32."""
    if KIND == "bf16":
        return (pair >> 16 << 16 if half else pair << 16).to(tl.float32, bitcast=True)
    else:
        return half_of(pair, half)


@triton.jit
def rounded(value, KIND: tl.constexpr, ASSEMBLED: tl.constexpr):
    """A float32 rounded to nearest even, which the interpreter does for no bfloat16."""
    if KIND == "f16":
        return value.to(tl.float16)
    elif ASSEMBLED:
        return value.to(tl.bfloat16)
    else:
        bits = value.to(tl.int32, bitcast=True)
        bits += 0x7FFF + (bits >> 16 & 1)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
