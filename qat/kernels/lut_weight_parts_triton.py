"""Triton functions that the kernels of `lut_weight` are made of.

A unit is E consecutive weights of one run: a group, or a row where the scale is of low rank.
"""

from qat.kernels.dispatch import tl, triton
from qat.quant.e5m3 import LARGEST

LARGEST_E5M3 = tl.constexpr(LARGEST)


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
def draw(
    source,
    run,
    column,
    is_unit,
    in_features,
    width,
    LENGTH: tl.constexpr,
    BITS: tl.constexpr,
    E: tl.constexpr,
):
    """What indices come from: latent weights `(units, E)`, or packed indices, a word a unit."""
    first = run * LENGTH + column
    if BITS == 0:
        place = first[:, None] + tl.arange(0, E)[None, :]
        return tl.load(source + place, mask=is_unit[:, None], other=0)
    elif E == 1:
        bit = first % in_features * BITS
        octet = source + first // in_features * width + bit // 8
        is_cut = is_unit & (bit % 8 + BITS > 8)
        word = tl.load(octet, mask=is_unit, other=0).to(tl.int32)
        word |= tl.load(octet + 1, mask=is_cut, other=0).to(tl.int32) << 8
        return word >> bit % 8
    elif BITS == 3:
        octet = source + first // 8 * 3
        word = tl.load(octet, mask=is_unit, other=0).to(tl.int64)
        for k in tl.static_range(1, E * 3 // 8):
            word |= tl.load(octet + k, mask=is_unit, other=0).to(tl.int64) << (8 * k)
        return word
    else:
        return tl.load(source + first // E, mask=is_unit, other=0)


@triton.jit
def low_rank_scale(
    scale_out,
    rank_gain,
    scale_in,
    run,
    column,
    is_unit,
    LENGTH: tl.constexpr,
    R: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    E: tl.constexpr,
):
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
        cut = tl.minimum((bits + 63 + ((bits >> 7) & 1)) >> 7 << 7, LARGEST_E5M3)
        # what is not finite stays so
        kept = tl.where(bits < 0x7C00, cut, bits).to(tl.int16).to(tl.float16, bitcast=True)
        return kept.to(tl.float32)


@triton.jit
def level_tables(codebook, BITS: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr):
    """Levels in the order that the index counts, their middles, and each level's place.

    Packed indices count levels as they lie; a latent weight's index counts them ascending.
    """
    place = tl.arange(0, SLOTS)
    levels = tl.load(codebook + place, mask=place < C, other=float("inf") if BITS == 0 else 0.0)
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
def chosen_index(
    drawn, middles, S, BITS: tl.constexpr, C: tl.constexpr, R: tl.constexpr, E: tl.constexpr
):
    """The index of each weight, `(units, E)`."""
    if BITS > 0:
        word = drawn[:, None] >> (tl.arange(0, E) * BITS)[None, :].to(drawn.dtype)
        return word.to(tl.int32) & (2**BITS - 1)
    else:
        return _nearest(_divide(drawn.to(tl.float32), S, R), middles, C)


@triton.jit
def _divide(latent, S, R: tl.constexpr):
    """`latent / S` as division rounds it, zero where `S` is zero.

    One division a group: a product with the rounded reciprocal, corrected by what it leaves over,
    is the rounded quotient (Markstein) as long as nothing overflows; a scale that was a float16 has
    a normal reciprocal, and so has one in float32 from 2**-126 to 2**126. A quotient that overflows
    needs no correction.
    """
    divisor = tl.where(S == 0, 1.0, S)
    latent = tl.where(S == 0, 0.0, latent)
    if R > 0:
        return tl.div_rn(latent, divisor)
    else:
        reciprocal = tl.div_rn(tl.full(S.shape, 1.0, tl.float32), divisor)
        quotient = latent * reciprocal
        corrected = tl.fma(tl.fma(-quotient, divisor, latent), reciprocal, quotient)
        return tl.where(tl.abs(quotient) < float("inf"), corrected, quotient)


@triton.jit
def _nearest(scaled, middles, C: tl.constexpr):
    """How many middles lie below each value: a binary search, ties to the lower level."""
    SLOTS: tl.constexpr = middles.shape[0]
    index = tl.zeros(scaled.shape, tl.int32)
    for halving in tl.static_range(1, 5):
        if SLOTS >> halving > 0:
            middle = look_up(middles, index + ((SLOTS >> halving) - 1))
            index += tl.where(scaled <= middle, 0, SLOTS >> halving)
    return tl.minimum(index, C - 1)


@triton.jit
def look_up(table, index):
    """`table[index]`."""
    flat = tl.reshape(index, (index.numel,))
    return tl.reshape(tl.gather(table, flat, 0), index.shape)
