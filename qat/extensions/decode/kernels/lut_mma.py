"""Packed rows times vectors on tensor cores for `lut_matvec`: float16 levels or codewords.

A warp takes 16 rows and 64 inputs at a time. Its lane 4 r + c holds unit c of the rows r and r + 8.
This matches the first operand of `mma.m16n8k16` if the inputs of the four steps are permuted in the
same way; the order within a sum is free. The second operand has 8 columns: columns 2 c and 2 c + 1
hold the inputs of unit c, upper and lower parts (`lut_rows.split`), and zeros elsewhere. Column
2 c + h of the product is then the contribution of unit c, in the lane that has the unit's scale.

A level costs 1.3 integer instructions for 2 bits and 2.6 for 4: byte permutations pick the lower
and the upper bytes of four levels and combine them. A codeword of four float16 fills two registers
of the first operand and is loaded from shared memory at once, for half an instruction per weight.
Nothing else is done per weight.
"""

from qat.kernels.dispatch import tl, triton

UNIT_HALVES = tl.constexpr(16)
"""Inputs per unit."""
CODEWORDS = tl.constexpr(256)
"""Entries in a codebook of vectors; a row of shared memory, 128 bytes, holds the copies of one."""


@triton.jit
def run_asm(code: tl.constexpr, constraints: tl.constexpr, operands):
    """Run assembly that has an effect in every lane; return its $0, an int32."""
    return tl.inline_asm_elementwise(
        code, constraints, operands, dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def asm_values(
    code: tl.constexpr, constraints: tl.constexpr, operands, dtypes: tl.constexpr,
    IS_PURE: tl.constexpr = True,
):  # fmt: skip
    """Return the results of assembly, one for each of `dtypes`."""
    return tl.inline_asm_elementwise(
        code, constraints, operands, dtype=dtypes, is_pure=IS_PURE, pack=1
    )


def _two_bits() -> str:
    """Return assembly: $8 the word, $9 and $10 the lower and the upper bytes of four levels."""
    lines = [".reg .b32 word, sel, low, high;"]
    # `prmt` takes a selector of four nibbles: 16 bits of the word with every other index masked out
    for odd in (0, 1):
        lines += [f"shr.u32 word, $8, {2 * odd};", "and.b32 word, word, 0x33333333;"]
        for half in (0, 1):
            lines += [f"shr.u32 sel, word, {16 * half};"]
            lines += ["prmt.b32 low, $9, 0, sel;", "prmt.b32 high, $10, 0, sel;"]
            first = 4 * odd + 2 * half
            # interleave lower and upper bytes: two float16 per register
            lines += [f"prmt.b32 ${first}, low, high, 0x5140;"]
            lines += [f"prmt.b32 ${first + 1}, low, high, 0x7362;"]
    return "\n".join(["{", *lines, "}"])


def look_up_4(*, is_spread: bool) -> str:
    """Return assembly: $8 and $9 the words, $10-$13 and $14-$17 the bytes of sixteen levels.

    $0-$7 are the weights 0 1, 2 3, ..., 14 15 as pairs of float16. If `is_spread`, the pairs are
    0 2, 4 6, ..., 12 14, and then 1 3, 5 7, ..., 13 15.
    """
    lines = [".reg .b32 sel, pick, sels, picks, below, above, low, high;"]
    for word in (0, 1):
        # three bits of an index choose one of eight bytes, among the lower and among the upper
        # levels; the fourth bit chooses between the two: nibble k of `picks` is k, or 4 + k (0xEA:
        # a & b | c)
        lines += [f"and.b32 sels, ${8 + word}, 0x77777777;", f"shr.u32 picks, ${8 + word}, 1;"]
        lines += ["lop3.b32 picks, picks, 0x44444444, 0x32103210, 0xEA;"]
        for half in (0, 1):
            lines += [f"shr.u32 sel, sels, {16 * half};", f"shr.u32 pick, picks, {16 * half};"]
            for name, first in (("low", 10), ("high", 14)):
                lines += [f"prmt.b32 below, ${first}, ${first + 1}, sel;"]
                lines += [f"prmt.b32 above, ${first + 2}, ${first + 3}, sel;"]
                lines += [f"prmt.b32 {name}, below, above, pick;"]
            # interleave lower and upper bytes: two float16 per register
            for k, order in enumerate(("0x6240", "0x7351") if is_spread else ("0x5140", "0x7362")):
                place = 4 * k + 2 * word + half if is_spread else 4 * word + 2 * half + k
                lines += [f"prmt.b32 ${place}, low, high, {order};"]
    return "\n".join(["{", *lines, "}"])


def _four_codewords() -> str:
    """Return assembly: $8 a word of four indices, $9 the lane's address for codeword 0."""
    lines = [".reg .b32 at;"]
    for k in range(4):
        lines += [f"prmt.b32 at, $8, 0, 0x444{k};", "mad.lo.u32 at, at, 128, $9;"]
        lines.append(f"ld.shared.v2.b32 {{${k}, ${4 + k}}}, [at];")
    return "\n".join(["{", *lines, "}"])


def _four_steps() -> str:
    """Return assembly for four mma steps: $8-$23 levels of two rows, $24-$31 inputs.

    The steps form two independent chains, with sums $0-$3 and $4-$7, since a step waits for the
    result of the one before.
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


TWO_BITS, FOUR_BITS = tl.constexpr(_two_bits()), tl.constexpr(look_up_4(is_spread=True))
FOUR_CODEWORDS, FOUR_STEPS = tl.constexpr(_four_codewords()), tl.constexpr(_four_steps())
# the address of the copies; two copies of a codeword; a barrier after all are written
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
def mma_load_ahead(
    source, scales, first_row, num_out, start, UNITS: tl.constexpr, BITS: tl.constexpr,
    D: tl.constexpr, LENGTH: tl.constexpr, TILES: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Load words and scales of the units that a lane computes next, for both its rows in each tile.

    A tile is the 16 rows from `first_row` on; the second tile is `num_out` rows further down.
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
    """Return the tile that lanes compute t-th; with two tiles of codewords, every other eight swap.

    Eight lanes are two rows; the sums of swapped rows are swapped back at the end.
    """
    return (t + eight) % 2 if TILES == 2 and D > 1 else t


@triton.jit
def mma_tables(
    tables, first_row, num_out, second, third, BITS: tl.constexpr, D: tl.constexpr,
    TILES: tl.constexpr, W: tl.constexpr, ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Return each tile's table: words that hold the levels, or the address of the codewords."""
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
    """Return the index of the stacked matrix that contains a row."""
    return (row >= second).to(tl.int32) + (row >= third).to(tl.int32)


@triton.jit
def _copied(
    tables, first_row, num_out, second, third, lane, TILES: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Copy codewords to shared memory; return the address of the first one's row, 128 bytes each.

    16 lanes are served together unless one of them needs another word of the same two of the 32
    banks; with a single copy of 256 codewords, three lanes would collide. So each of the 16 reads a
    copy in banks of its own, 32 KiB in all. Gates and ups have two codebooks with 8 copies each,
    the first and the second half of a row: eight lanes read a gate's while the others read an up's.
    """
    TOGETHER: tl.constexpr = (W + 7) // 8
    TIMES: tl.constexpr = (8 + W - 1) // W
    own, last = lane % CODEWORDS, first_row + (TILES - 1) * num_out
    ones, others = (), ()
    for k in tl.static_range(TIMES):
        place = tables + own + k * 32 * W
        ones = ones + (tl.load(place + _part(first_row, second, third) * CODEWORDS),)
        others = others + (tl.load(place + _part(last, second, third) * CODEWORDS),)
    # a scalar: the compiler might compute one value per lane twice; the loads above are in flight
    room = run_asm(ROOM, "=r", ())
    # a lane writes a whole row (with more lanes, a part of one) 16 bytes at a time, each of eight
    # lanes starting elsewhere
    for j in tl.static_range(8 // TOGETHER):
        eighth = (lane + lane // CODEWORDS * (8 // TOGETHER) + j) % 8
        for k in tl.static_range(TIMES):
            word = ones[k] if TILES == 1 else tl.where(eighth < 4, ones[k], others[k])
            run_asm(PUT_TWICE, "=r,r,l", (room + (own + k * 32 * W) * 128 + eighth * 16, word))
    # later reads depend on this result, so that none is moved above the barrier
    return run_asm(ALL_THERE, "=r,r", (room,))


@triton.jit
def mma_dots(
    x, source, scales, table, factors, loaded, first_row, num_out, second, third,
    UNITS: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr,
    LENGTH: tl.constexpr, TILES: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Return `W[row] @ x[b]` of each tile's 16 rows, `(16,)` float32 each, by tile, then by b."""
    SPAN: tl.constexpr = 4 * V * W
    WORDS: tl.constexpr = BITS // 2
    lane = tl.arange(0, 32 * W)
    factor = ()
    for t in tl.static_range(TILES):
        factor = factor + (tl.load(factors + _part(first_row + t * num_out, second, third)),)
    sums = ()
    for _ in tl.static_range(2 * TILES * B):
        sums = sums + (tl.zeros([32 * W], tl.float32),)
    inputs = _load_inputs_ahead(x, 0, lane, UNITS, B, V)
    for start in range(0, UNITS, SPAN):
        rows, pairs = loaded, inputs
        if UNITS > SPAN:
            loaded = mma_load_ahead(
                source, scales, first_row, num_out, start + SPAN,
                UNITS, BITS, D, LENGTH, TILES, V, W,
            )  # fmt: skip
            inputs = _load_inputs_ahead(x, start + SPAN, lane, UNITS, B, V)
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
    """Load a part's words, broadcast to all lanes, as inline assembly needs them."""
    found = ()
    for t in tl.static_range(SIZE):
        found = found + (tl.load(tables + part * SIZE + t + lane * 0),)
    return found


@triton.jit
def _levels(
    words, table, v: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, ASSEMBLED: tl.constexpr
):
    """Return the levels, or the codewords, of the indices in unit v of a lane."""
    if D > 1:
        return _codewords(words[v], table[0], ASSEMBLED)
    elif BITS == 2:
        return _levels_of_two(words[v], table, ASSEMBLED)
    else:
        return _levels_of_four(words[2 * v], words[2 * v + 1], table, ASSEMBLED)


@triton.jit
def _load_inputs_ahead(x, start, lane, UNITS: tl.constexpr, B: tl.constexpr, V: tl.constexpr):
    """Load inputs of the units that a lane computes next, by vector, then by unit."""
    unit = start + lane // 32 * (4 * V) + lane % 4 * V
    found = ()
    for b in tl.static_range(B):
        for v in tl.static_range(V):
            found = found + (_inputs(x + b * UNITS * UNIT_HALVES, unit + v, lane, UNITS),)
    return found


@triton.jit
def _row_sums(lanes, W: tl.constexpr):
    """Sum over the warps and over a row's four lanes: `(8,)`."""
    return tl.sum(tl.sum(tl.reshape(lanes, [W, 8, 4]), axis=2), axis=0)


@triton.jit
def words_of(source, row, unit, units, BITS: tl.constexpr, V: tl.constexpr):
    """Load `(lanes, V * BITS / 2)` int32: the words of V consecutive units of a row."""
    N: tl.constexpr = V * (BITS // 2)
    place = row.to(tl.int64) * (units * (BITS // 2)) + unit * (BITS // 2)
    at = place[:, None] + tl.arange(0, N)[None, :]
    return tl.load(source + at, mask=(unit < units)[:, None], other=0)


@triton.jit
def shares_of(scales, row, unit, units, LENGTH: tl.constexpr, V: tl.constexpr):
    """Load `(lanes, V)` scales of consecutive units, as stored; zeros past the end of a row.

    There are fewer columns if a group spans several units of a lane, or all of them.
    """
    place = row.to(tl.int64)[:, None] * (units // LENGTH)
    if V % LENGTH == 0:
        N: tl.constexpr = V // LENGTH
        # a hint: the compiler cannot infer that these are contiguous and aligned
        group = tl.multiple_of(unit // LENGTH, N)[:, None] + tl.arange(0, N)[None, :]
    elif LENGTH % V == 0:
        group = (unit // LENGTH)[:, None]
    else:
        group = (unit[:, None] + tl.arange(0, V)[None, :]) // LENGTH
    return tl.load(scales + place + group, mask=(unit < units)[:, None], other=0)


@triton.jit
def decoded(scale):
    """Decode a stored scale to float32."""
    if scale.dtype == tl.uint8:
        # E5M3 bits are those of a float16 without its last seven; as float32 the exponent is 112
        # less
        return (scale.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 2.0**112
    else:
        return scale.to(tl.float32)


@triton.jit
def _inputs(x, unit, lane, UNITS: tl.constexpr):
    """Load eight pairs of inputs of unit c in lane 4 n + c; zeros unless n is 2 c or 2 c + 1."""
    column = lane % 32 // 4
    is_own = (column // 2 == lane % 4) & (unit < UNITS)
    place = column % 2 * (UNITS * UNIT_HALVES // 2) + unit * (UNIT_HALVES // 2)
    # 16 bytes at a time, the most that a lane can load
    at = place[:, None] + tl.arange(0, 4)[None, :]
    low = tl.load(x + at, mask=is_own[:, None], other=0)
    return low, tl.load(x + at + 4, mask=is_own[:, None], other=0)


@triton.jit
def columns(rows, N: tl.constexpr):
    """Split rows of N values per lane into N tensors `(lanes,)`."""
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
    """Return eight pairs of levels of a word's 16 indices: 0 2, 4 6, ..., 14; then 1 3, ..., 15."""
    if ASSEMBLED:
        return asm_values(TWO_BITS, WORDS_8 + "r,r,r", (word, table[0], table[1]), INTEGERS_8)
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
    """Return eight pairs of levels of 16 indices of 4 bits in two words; see `_levels_of_two`."""
    if ASSEMBLED:
        constraints: tl.constexpr = WORDS_8 + "r,r,r,r,r,r,r,r,r,r"
        return asm_values(FOUR_BITS, constraints, (low, high) + table, INTEGERS_8)
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
    """Return the eight pairs for a word's four codewords, in the order of `short_codewords`."""
    if ASSEMBLED:
        return asm_values(FOUR_CODEWORDS, WORDS_8 + "r,r", (word, table), INTEGERS_8)
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
    """Return the contributions of a lane's unit to the lane's two rows."""
    if ASSEMBLED:
        sums = asm_values(FOUR_STEPS, SUMS, first + second + inputs, FLOATS_8)
        # a row's upper and lower parts, from both chains
        return (sums[0] + sums[1]) + (sums[4] + sums[5]), (sums[2] + sums[3]) + (sums[6] + sums[7])
    else:
        return _product(first, inputs, W), _product(second, inputs, W)


@triton.jit
def _product(levels, inputs, W: tl.constexpr):
    """Compute a row's part of `mma.m16n8k16` in the interpreter, lane by lane."""
    total = tl.zeros([W, 8, 8], tl.float32)
    for pair in tl.static_range(8):
        for half in tl.static_range(2):
            level, column = half_of(levels[pair], half), half_of(inputs[pair], half)
            total += lane_products(level, column, W)
    upper, lower = tl.split(tl.reshape(total, [W, 8, 4, 2]))
    return tl.reshape(upper + lower, [32 * W])


@triton.jit
def lane_products(rows, columns, W: tl.constexpr):
    """Return `(W, 8, 8)`: what `mma` adds up for one number of each lane, for the interpreter."""
    return tl.sum(tl.reshape(rows, [W, 8, 1, 4]) * tl.reshape(columns, [W, 1, 8, 4]), axis=3)


@triton.jit
def half_of(word, half: tl.constexpr):
    """Return one of the two float16 of a word in float32."""
    return (word >> 16 * half).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def number_of(pair, half: tl.constexpr, KIND: tl.constexpr):
    """Return one of a pair of 16-bit numbers in float32."""
    if KIND == "bf16":
        return (pair >> 16 << 16 if half else pair << 16).to(tl.float32, bitcast=True)
    else:
        return half_of(pair, half)


@triton.jit
def rounded(value, KIND: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Round float32 to nearest even; the interpreter does not do that for bfloat16."""
    if KIND == "f16":
        return value.to(tl.float16)
    elif ASSEMBLED:
        return value.to(tl.bfloat16)
    else:
        bits = value.to(tl.int32, bitcast=True)
        bits += 0x7FFF + (bits >> 16 & 1)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
