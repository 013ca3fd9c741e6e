"""Packed rows times vectors on the tensor cores, for `lut_matvec`: levels of 16 bits.

A warp takes 16 rows and 64 inputs at a time. Its lane 4 r + c holds the unit c of the rows r and
r + 8, which is what `mma.m16n8k16` wants of its first factor if the inputs of a product's four
steps are those that the lane has: their order within a sum is free. The second factor has 8
columns: in 2 c and 2 c + 1 lie unit c's inputs, upper and lower parts (`lut_matvec.split`), and
zeros elsewhere. So a product's column 2 c + h is what unit c adds, and lies in the lane that knows
the unit's scale.

Levels cost 1.3 integer instructions each for 2 bits and 2.6 for 4 (byte permutations pick the lower
and the upper bytes of four levels, and put them together), and nothing else is done for a weight.
"""

import triton
import triton.language as tl

UNIT_HALVES = tl.constexpr(16)
"""Inputs of a unit."""


def _two_bits() -> str:
    """Assembly: $8 the word, $9 and $10 the lower and the upper bytes of four levels."""
    lines = [".reg .b32 word, sel, low, high;"]
    for odd in (0, 1):
        lines += [f"shr.u32 word, $8, {2 * odd};", "and.b32 word, word, 0x33333333;"]
        for half in (0, 1):
            lines += [f"shr.u32 sel, word, {16 * half};"]
            lines += ["prmt.b32 low, $9, 0, sel;", "prmt.b32 high, $10, 0, sel;"]
            first = 4 * odd + 2 * half
            lines += [f"prmt.b32 ${first}, low, high, 0x5140;"]
            lines += [f"prmt.b32 ${first + 1}, low, high, 0x7362;"]
    return "\n".join(["{", *lines, "}"])


def _four_bits() -> str:
    """Assembly: $8 and $9 the words, $10-$13 and $14-$17 the bytes of sixteen levels."""
    lines = [".reg .b32 sel, pick, sels, picks, below, above, low, high;"]
    for word in (0, 1):
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


def _four_steps() -> str:
    """Assembly: $4-$11, $12-$19 levels of two rows, $20-$27 inputs; $0-$3 what they add up to."""
    lines = [".reg .f32 none;", "mov.f32 none, 0f00000000;"]
    for step in range(4):
        first, second, third = (start + 2 * step for start in (4, 12, 20))
        levels = f"{{${first}, ${second}, ${first + 1}, ${second + 1}}}"
        before = "{none, none, none, none}" if step == 0 else "{$0, $1, $2, $3}"
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, "
            f"{levels}, {{${third}, ${third + 1}}}, {before};"
        )
    return "\n".join(["{", *lines, "}"])


TWO_BITS, FOUR_BITS = tl.constexpr(_two_bits()), tl.constexpr(_four_bits())
FOUR_STEPS = tl.constexpr(_four_steps())
WORDS_8 = tl.constexpr("=&r," * 8)
INTEGERS_8 = tl.constexpr((tl.int32,) * 8)
FLOATS_4 = tl.constexpr((tl.float32,) * 4)
SUMS = tl.constexpr("=&f,=&f,=&f,=&f," + ",".join(["r"] * 24))


@triton.jit
def mma_ahead(
    source, scales, first_row, last_row, start,
    UNITS: tl.constexpr, BITS: tl.constexpr, LENGTH: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Words and scales of the units that a lane computes next, of both of its rows."""
    lane = tl.arange(0, 32 * W)
    row = tl.minimum(first_row + lane % 32 // 4, last_row)
    other = tl.minimum(first_row + 8 + lane % 32 // 4, last_row)
    unit = start + lane // 32 * (4 * V) + lane % 4 * V
    return (
        _words(source, row, unit, UNITS, BITS, V),
        _words(source, other, unit, UNITS, BITS, V),
        _shares(scales, row, unit, UNITS, LENGTH, V),
        _shares(scales, other, unit, UNITS, LENGTH, V),
    )


@triton.jit
def mma_dots(
    x, source, scales, tables, factors, drawn, first_row, last_row, second, third,
    UNITS: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, LENGTH: tl.constexpr,
    V: tl.constexpr, W: tl.constexpr, ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """`W[row] @ x[b]` of 16 rows, `(16,)` float32 for each b; all rows are of one part."""
    SPAN: tl.constexpr = 4 * V * W
    TABLES: tl.constexpr = 2 if BITS == 2 else 8
    WORDS: tl.constexpr = BITS // 2
    lane = tl.arange(0, 32 * W)
    part = (first_row >= second).to(tl.int32) + (first_row >= third).to(tl.int32)
    table = ()
    for t in tl.static_range(TABLES):
        # one for each lane: what an assembled line reads has the lanes' shape
        table = table + (tl.load(tables + part * TABLES + t + lane * 0),)
    firsts, seconds = (), ()
    for _b in tl.static_range(B):
        firsts = firsts + (tl.zeros([32 * W], tl.float32),)
        seconds = seconds + (tl.zeros([32 * W], tl.float32),)
    for start in range(0, UNITS, SPAN):
        words, others, shares, other_shares = drawn
        if UNITS > SPAN:
            drawn = mma_ahead(
                source, scales, first_row, last_row, start + SPAN, UNITS, BITS, LENGTH, V, W
            )
        words, others = _columns(words, V * WORDS), _columns(others, V * WORDS)
        shares, other_shares = _columns(shares, V), _columns(other_shares, V)
        unit = start + lane // 32 * (4 * V) + lane % 4 * V
        for v in tl.static_range(V):
            if BITS == 2:
                first = _levels_of_two(words[v], table, ASSEMBLED)
                second_row = _levels_of_two(others[v], table, ASSEMBLED)
            else:
                first = _levels_of_four(words[2 * v], words[2 * v + 1], table, ASSEMBLED)
                second_row = _levels_of_four(others[2 * v], others[2 * v + 1], table, ASSEMBLED)
            share, other_share = decoded(shares[v]), decoded(other_shares[v])
            more, others_more = (), ()
            for b in tl.static_range(B):
                inputs = _inputs(x + b * UNITS * UNIT_HALVES, unit + v, lane, UNITS)
                upper, lower, other_upper, other_lower = _products(
                    first, second_row, inputs, W, ASSEMBLED
                )
                more = more + (firsts[b] + (upper + lower) * share,)
                others_more = others_more + (
                    seconds[b] + (other_upper + other_lower) * other_share,
                )
            firsts, seconds = more, others_more
    factor = tl.load(factors + part)
    found = ()
    for b in tl.static_range(B):
        both = tl.join(_row_sums(firsts[b], W), _row_sums(seconds[b], W))
        found = found + (tl.reshape(tl.trans(both), [16]) * factor,)
    return found


@triton.jit
def _row_sums(lanes, W: tl.constexpr):
    """`(8,)`: over the warps and a row's four lanes."""
    return tl.sum(tl.sum(tl.reshape(lanes, [W, 8, 4]), axis=2), axis=0)


@triton.jit
def _words(source, row, unit, UNITS: tl.constexpr, BITS: tl.constexpr, V: tl.constexpr):
    """`(lanes, V * BITS / 2)` int32: consecutive units of a row."""
    N: tl.constexpr = V * (BITS // 2)
    place = row.to(tl.int64) * (UNITS * (BITS // 2)) + unit * (BITS // 2)
    at = place[:, None] + tl.arange(0, N)[None, :]
    return tl.load(source + at, mask=(unit < UNITS)[:, None], other=0)


@triton.jit
def _shares(scales, row, unit, UNITS: tl.constexpr, LENGTH: tl.constexpr, V: tl.constexpr):
    """`(lanes, V)`: the scales of consecutive units, as stored; zeros outside the row."""
    place = row.to(tl.int64)[:, None] * (UNITS // LENGTH)
    if LENGTH == 1:
        at = place + unit[:, None] + tl.arange(0, V)[None, :]
    else:
        at = place + (unit[:, None] + tl.arange(0, V)[None, :]) // LENGTH
    return tl.load(scales + at, mask=(unit < UNITS)[:, None], other=0)


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
    return _columns(low, 4) + _columns(tl.load(x + at + 4, mask=is_own[:, None], other=0), 4)


@triton.jit
def _columns(rows, N: tl.constexpr):
    """Each lane's N values one by one, `(lanes,)` each."""
    if N == 1:
        return (tl.reshape(rows, [rows.shape[0]]),)
    else:
        even, odd = tl.split(tl.reshape(rows, [rows.shape[0], N // 2, 2]))
        evens, odds = _columns(even, N // 2), _columns(odd, N // 2)
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
def _byte(word, place):
    return word >> 8 * place & 255


@triton.jit
def _byte_of_16(table, FIRST: tl.constexpr, place):
    below = tl.where(place < 4, table[FIRST], table[FIRST + 1])
    above = tl.where(place < 12, table[FIRST + 2], table[FIRST + 3])
    return _byte(tl.where(place < 8, below, above), place % 4)


@triton.jit
def _products(first, second, inputs, W: tl.constexpr, ASSEMBLED: tl.constexpr):
    """What a lane's unit adds to its two rows: by upper and by lower parts of the inputs."""
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            FOUR_STEPS, SUMS,
            [first[0], first[1], first[2], first[3], first[4], first[5], first[6], first[7],
             second[0], second[1], second[2], second[3],
             second[4], second[5], second[6], second[7],
             inputs[0], inputs[1], inputs[2], inputs[3],
             inputs[4], inputs[5], inputs[6], inputs[7]],
            dtype=FLOATS_4, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return _product(first, inputs, W) + _product(second, inputs, W)


@triton.jit
def _product(levels, inputs, W: tl.constexpr):
    """A row's part of `mma.m16n8k16`, lane by lane: what the interpreter runs."""
    total = tl.zeros([W, 8, 8], tl.float32)
    for pair in tl.static_range(8):
        for half in tl.static_range(2):
            level = tl.reshape(_half(levels[pair], half), [W, 8, 1, 4])
            column = tl.reshape(_half(inputs[pair], half), [W, 1, 8, 4])
            total += tl.sum(level * column, axis=3)
    upper, lower = tl.split(tl.reshape(total, [W, 8, 4, 2]))
    return tl.reshape(upper, [32 * W]), tl.reshape(lower, [32 * W])


@triton.jit
def _half(word, half: tl.constexpr):
    return (word >> 16 * half).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
