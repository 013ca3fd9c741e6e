"""The kernels of `lut_weight` for codebooks of vectors: choose, form and pull back.

    choose     index = argmin_c |w - s c| = argmax_c (w s) . c - s^2 . c^2 / 2
    form       W = codebook[index] * S
    pull back  d_codebook[c] = sum of dW * S over vectors of index c, dS = dW * codebook[index]

A unit of a tile (`lut_tiles`) is a vector. 440 million weights as vectors of 4 with 256 codewords
are 28 billion scores. Compiled for Hopper, `choose` takes 600 instructions per warp for 64 vectors,
of which 330 (140 maxima) run in a pipe of 16 lanes: 4.7 ms at 1.8 GHz on 132 multiprocessors, with
1.1 ms of products in parallel. Scores in float32 without tensor cores would take four more steps
each; in float64, over 9 ms. The pull-back takes 490 instructions per warp for 128 vectors: 1.8 ms.

Shapes: V vectors of a tile, d weights of a vector, C codewords, K terms of a score.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton
from qat.kernels.lut_tiles import (
    FormTile,
    Tiling,
    as_stored,
    low_rank_scale,
    read_gradient,
    scale_operands,
    units_of_tile,
)
from qat.kernels.tuned import chosen
from qat.quant.weight import CODEWORD_STEPS, PackedIndices, Scales

SPREAD = 792  # programs of `choose` for a small weight: six for each multiprocessor of a large GPU
HELD = 4096
"""The most sums of a codebook for which four warps have registers; more take eight."""


class ChooseTile(NamedTuple):
    """The tiling of `choose`."""

    vectors: int = 128
    """Vectors per tile."""
    chunk: int = 64
    """Codewords whose scores are held at a time: 64 numbers per thread with 128 vectors."""
    few: int = 4
    """Codewords per group; the best of the best group is then found one by one."""
    tiles: int = 8
    """Tiles per program, which spreads the cost of preparing the codebook."""
    warps: int = 4

    @classmethod
    def of(cls, num_vectors: int, C: int) -> Self:
        """Return the default: larger chunks of many codewords, fewer tiles of a small weight."""
        tile = cls() if C <= 256 else cls(vectors=64, chunk=128)
        return tile._replace(tiles=min(tile.tiles, triton.cdiv(num_vectors, SPREAD * tile.vectors)))


class ReduceTile(NamedTuple):
    """The tiling of `reduce`."""

    vectors: int = 128
    programs: int = 396
    """Programs that share all tiles: three for each multiprocessor of a large GPU."""

    @classmethod
    def of(cls, C: int, d: int) -> Self:
        """Return the default: fewer vectors if the sums take most registers."""
        return cls() if C * d <= HELD else cls(vectors=64)


def choose(latent: Tensor, codebook: Tensor, scales: Scales, out: Tensor) -> None:
    """Write the index of each vector of a latent weight `(O, I)` into `out`, `(O, I / d)`.

    The result is that of `qat.quant.codebook.nearest_codewords` under the stored scales, to the
    bit.
    """
    C, d = codebook.shape
    key = (*latent.shape, C, d)
    cut = chosen("vectors_choose", key, ChooseTile.of(out.numel(), C), out.device)
    tiling = Tiling.of(latent.shape, scales, cut.vectors * d, d, cuts=True)
    parts = max(4 if tiling.rank == 0 else 8, 16 // d)
    chunk = min(max(C, 16), cut.chunk)
    _choose_kernel[(triton.cdiv(tiling.num_tiles, cut.tiles),)](
        out, latent.contiguous(), codebook, *scale_operands(scales),
        num_tiles=tiling.num_tiles, **tiling.constants(), TILES=cut.tiles,
        C=C, CHUNK=chunk, PARTS=parts, FEW=min(cut.few, C, chunk // 4),
        enable_fp_fusion=False, num_warps=cut.warps,
    )  # fmt: skip


def form(source: PackedIndices, codebook: Tensor, scales: Scales, out: Tensor) -> None:
    """Write `codebook[indices] * S` into `out`, `(O, I)`."""
    cut = chosen("lut_form", (*source.shape, source.bits, codebook.numel()), FormTile(), out.device)
    tiling = Tiling.of(source.shape, scales, cut.weights, codebook.shape[1], cuts=True)
    _form_kernel[(tiling.num_tiles,)](
        out, source.octets.contiguous(), codebook, *scale_operands(scales),
        in_features=source.in_features, width=source.octets.shape[1], BITS=source.bits,
        **tiling.constants(), enable_fp_fusion=False,
        num_warps=4,
    )  # fmt: skip


def reduce(
    dW: Tensor,
    source: PackedIndices,
    codebook: Tensor,
    scales: Scales,
    wants_codebook: bool,
    wants_scales: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return `d_codebook`, and the gradient of group scales `(O, G)` or else `dS` `(O, I)`.

    `dW` is read once. The result is deterministic: programs' float32 sums are added in float64.
    """
    C, d = codebook.shape
    cut = chosen("vectors_reduce", (*source.shape, C, d), ReduceTile.of(C, d), dW.device)
    tiling = Tiling.of(source.shape, scales, cut.vectors * d, d)
    num_programs = min(tiling.num_tiles, cut.programs)
    # rows and columns of the product: a row costs one comparison per vector, a column about four
    low = max(16 // d, 2 ** ((C // (4 * d)).bit_length() // 2))
    high = max(triton.cdiv(C, low), 16)
    new = {"device": dW.device, "dtype": torch.float32}
    partials = torch.empty(num_programs, high * low * d, **new) if wants_codebook else None
    d_scales = None
    if wants_scales:
        d_scales = torch.empty(dW.shape if scales.scales is None else scales.scales.shape, **new)
    _reduce_kernel[(num_programs,)](
        partials, d_scales, dW.contiguous(), source.octets.contiguous(), codebook,
        *scale_operands(scales),
        in_features=source.in_features, width=source.octets.shape[1], num_tiles=tiling.num_tiles,
        BITS=source.bits, HIGH=high, LOW=low,
        **tiling.constants(),
        num_warps=max(tiling.num_warps, 8 if high * low * d > HELD else 4),
    )  # fmt: skip
    if partials is None:
        return None, d_scales
    d_codebook = torch.empty(C, d, **new)
    _total_kernel[(triton.cdiv(C * d, 8),)](
        d_codebook, partials, num_programs, high * low * d, C * d,
        ROWS=triton.next_power_of_2(num_programs), num_warps=4,
    )  # fmt: skip
    return d_codebook, d_scales


def round_codewords(codebook: Tensor, out: Tensor) -> None:
    """Write the nearest multiples of `1 / CODEWORD_STEPS` below 2; one kernel replaces four.

    The result is that of `qat.quant.weight.round_levels` with 8 bits, to the bit.
    """
    count = codebook.numel()
    _round_kernel[(triton.cdiv(count, 1024),)](
        out, codebook, count, STEPS=CODEWORD_STEPS, BLOCK=1024, num_warps=4
    )


@triton.jit
def _choose_kernel(
    indices, latent, codebook, scales, scale_out, rank_gain, scale_in, num_runs, num_tiles,
    LENGTH: tl.constexpr, R: tl.constexpr, SCALE_BITS: tl.constexpr, N: tl.constexpr,
    U: tl.constexpr, E: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    SPAN: tl.constexpr = min(C, 4 * CHUNK)
    # the first SPAN codewords stay in registers; later spans are read again for every tile
    held, most, most_half = _span(codebook, 0, R, E, C, CHUNK, PARTS, FEW, SPAN)
    for start in range(SPAN, C, SPAN):
        _, more, more_half = _span(codebook, start, R, E, C, CHUNK, PARTS, FEW, SPAN)
        most, most_half = tl.maximum(most, more), tl.maximum(most_half, more_half)
    tile = tl.program_id(0) * TILES
    end = tl.minimum(tile + TILES, num_tiles)
    next_w, next_S = _read_latent(tile, latent, scales, num_runs, LENGTH, R, N, U, E)
    while tile < end:
        w, S = next_w, as_stored(next_S, SCALE_BITS)[:, None]
        # prefetch the next tile while this one is computed
        next_w, next_S = _read_latent(tile + 1, latent, scales, num_runs, LENGTH, R, N, U, E)
        run, column, is_unit = units_of_tile(tile, num_runs, LENGTH, N, U, E)
        if R > 0:
            S = low_rank_scale(
                scale_out, rank_gain, scale_in, run, column, is_unit, LENGTH, R, SCALE_BITS, E
            )
        # the score divided by max |s|^2: sum_j p_j c_j - u_j^2 c_j^2 / 2
        p, u, largest = _scaled(w, S)
        margin = _margin(tl.sum(tl.abs(p), axis=1), most, most_half, PARTS * E)
        pulls = _pulls(p, u, R, PARTS)
        # scores on tensor cores: the groups whose best score is within the margin of the best. The
        # nearest codeword is in one of them.
        best, found = _search(pulls, held, margin, 0, C, CHUNK, FEW, SPAN)
        for start in range(SPAN, C, SPAN):
            later, _, _ = _span(codebook, start, R, E, C, CHUNK, PARTS, FEW, SPAN)
            top, in_span = _search(pulls, later, margin, start, C, CHUNK, FEW, SPAN)
            # groups found before do not count if a new best score exceeds theirs by the margin
            now = tl.maximum(best, top)
            found = tl.where(best >= now - margin, found, 0.0)
            found += tl.where(top >= now - margin, in_span, 0.0)
            best = now
        few, is_one_group = _one_of(found, C // FEW)
        # score the FEW codewords of the best group one by one in float32
        word = few[:, None] * FEW + tl.arange(0, FEW)[None, :]
        words = tl.load(codebook + word[:, :, None] * E + tl.arange(0, E)[None, None, :])
        pulled = words * (p[:, None, :] - words * (u * u * 0.5)[:, None, :])
        scores = tl.sum(pulled, axis=2)
        enough = (tl.max(scores, axis=1) - margin)[:, None]
        named = 2.0 * FEW + tl.arange(0, FEW).to(tl.float32)[None, :]
        place, is_one = _one_of(tl.sum(tl.where(scores >= enough, named, 0.0), axis=1), FEW)
        # all codewords are equal if every scale is zero, and for vectors past the weight
        index = tl.where(largest > 0, few * FEW + place, 0)
        is_sure = is_one_group & is_one & (margin < float("inf"))
        unsure = tl.where(is_sure | (largest == 0), 0, 1)
        # decide the vectors with another candidate within the margin (0.2 % of all) in float64, one
        # by one, as the reference does: the result therefore equals the reference's
        unit = tl.arange(0, N * U)
        while tl.max(unsure, axis=0) > 0:
            one = tl.argmax(unsure, axis=0)
            exact = _exact_index(
                latent, codebook, scales, scale_out, rank_gain, scale_in, tile, one,
                LENGTH, R, SCALE_BITS, N, U, E, C,
            )  # fmt: skip
            index = tl.where(unit == one, exact, index)
            unsure = tl.where(unit == one, 0, unsure)
        vector = (run * LENGTH + column) // E
        tl.store(indices + vector, index.to(indices.dtype.element_ty), mask=is_unit)
        tile += 1


@triton.jit
def _read_latent(
    tile, latent, scales, num_runs,
    LENGTH: tl.constexpr, R: tl.constexpr, N: tl.constexpr, U: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Load a tile's latent weights and group scales, as stored."""
    run, column, is_unit = units_of_tile(tile, num_runs, LENGTH, N, U, E)
    place = (run * LENGTH + column)[:, None] + tl.arange(0, E)[None, :]
    # convert to float32 here, so that tiles are carried in float32: a bfloat16 was divided again
    # for each layout that needs the quotient
    w = tl.load(latent + place, mask=is_unit[:, None], other=0).to(tl.float32)
    if R > 0:
        return w, tl.full([1], 1.0, tl.float32)
    else:
        return w, tl.load(scales + run, mask=is_unit, other=0)


@triton.jit
def _scaled(w, S):
    """Return `p` and `u`, and the largest |S| of each vector."""
    largest = tl.max(tl.abs(S), axis=1)
    inverse = (1.0 / tl.where(largest == 0, 1.0, largest))[:, None]
    u = S * inverse
    return w * inverse * u, u, largest


@triton.jit
def _pulls(p, u, R: tl.constexpr, PARTS: tl.constexpr):
    """Return the left operand of a tile's scores, `(V, K)`; `_entries` is the right one.

    p and the squares u^2 are each a float16 and its float16 remainder. With group scales u^2 is 1,
    and the codeword's sum of squares is one number, so that d = 4 fills one step of K = 16.
    """
    V: tl.constexpr = p.shape[0]
    E: tl.constexpr = p.shape[1]
    high = p.to(tl.float16)
    low = (p - high.to(tl.float32)).to(tl.float16)
    part = tl.arange(0, PARTS)[None, :, None]
    if R == 0:
        rest = tl.full([V, 1, E], 1.0, tl.float16)
    else:
        square = u * u
        top = square.to(tl.float16)
        left = (square - top.to(tl.float32)).to(tl.float16)
        rest = tl.where(part < 4, top[:, None, :], left[:, None, :])
    pulls = tl.where(part == 0, high[:, None, :], tl.where(part == 1, low[:, None, :], rest))
    return tl.reshape(pulls, (V, PARTS * E))


@triton.jit
def _entries(
    codebook, start,
    R: tl.constexpr, E: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Return a chunk of codewords as right operand `(K, CHUNK)`; the largest |c| and |c|^2 / 2.

    K consists of parts: the codewords twice, for the high and the low part of p; then their
    squares, also as high and low parts. The order of columns puts the scores of FEW consecutive
    codewords into one thread, for `_search`.
    """
    column = tl.arange(0, CHUNK)
    block, within = column // (4 * FEW), column % (4 * FEW)
    lane, pair = within % 8 // 2, within // 8 * 2 + within % 2
    word = (start + (block * 4 + lane) * FEW + pair)[:, None]
    words = tl.load(codebook + word * E + tl.arange(0, E)[None, :], mask=word < C, other=0)
    part = tl.arange(0, PARTS)[None, :, None]
    halves = words * words * 0.5
    totals = tl.sum(halves, axis=1)
    half = totals[:, None] if R == 0 else halves
    high = half.to(tl.float16)
    low = (half - high.to(tl.float32)).to(tl.float16)
    if R == 0:
        place = tl.arange(0, E)[None, :]
        both = tl.where(place == 0, -high, tl.where(place == 1, -low, 0.0))[:, None, :]
        squares = tl.where(part == 2, both, 0.0)
    else:
        is_high = (part == 2) | (part == 4)
        squares = tl.where(is_high, -high[:, None, :], tl.where(part == 3, -low[:, None, :], 0.0))
    entries = tl.where(part < 2, words.to(tl.float16)[:, None, :], squares.to(tl.float16))
    most = tl.max(tl.max(tl.abs(words), axis=1), axis=0)
    return tl.trans(tl.reshape(entries, (CHUNK, PARTS * E))), most, tl.max(totals, axis=0)


@triton.jit
def _span(
    codebook, start,
    R: tl.constexpr, E: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    FEW: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Return the chunks of SPAN codewords, and the largest |c| and |c|^2 / 2 among them."""
    chunks = ()
    most, most_half = 0.0, 0.0
    for k in tl.static_range((SPAN + CHUNK - 1) // CHUNK):
        entries, more, more_half = _entries(codebook, start + k * CHUNK, R, E, C, CHUNK, PARTS, FEW)
        chunks = chunks + (entries,)
        most, most_half = tl.maximum(most, more), tl.maximum(most_half, more_half)
    return chunks, most, most_half


@triton.jit
def _search(
    pulls, chunks, margin, start,
    C: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Return the best score of a span, and a sum encoding the groups near it (`_one_of`), `(V,)`.

    A group is FEW consecutive codewords. Tensor cores leave columns 8 j + 2 lane + 0 and 1 of a
    row in one thread: a maximum over a group's scores there needs no other thread.
    """
    V: tl.constexpr = pulls.shape[0]
    BLOCKS: tl.constexpr = CHUNK // (4 * FEW)
    COUNT: tl.constexpr = (SPAN + CHUNK - 1) // CHUNK
    tops = ()
    for k in tl.static_range(COUNT):
        in_groups = tl.reshape(tl.dot(pulls, chunks[k]), (V, BLOCKS, FEW // 2, 4, 2))
        top = tl.reshape(tl.max(tl.max(in_groups, axis=4), axis=2), (V, BLOCKS * 4))
        if C < CHUNK:
            is_group = tl.arange(0, BLOCKS * 4) < C // FEW
            top = tl.where(is_group[None, :], top, -float("inf"))
        tops = tops + (top,)
    highest = tops[0]
    for k in tl.static_range(1, COUNT):
        highest = tl.maximum(highest, tops[k])
    best = tl.max(highest, axis=1)
    enough = (best - margin)[:, None]
    found = tl.zeros([V, BLOCKS * 4], tl.float32)
    for k in tl.static_range(COUNT):
        group = (start + k * CHUNK) // FEW + tl.arange(0, BLOCKS * 4)
        named = (2.0 * (C // FEW) + group.to(tl.float32))[None, :]
        found += tl.where(tops[k] >= enough, named, 0.0)
    return best, tl.sum(found, axis=1)


@triton.jit
def _one_of(found, COUNT: tl.constexpr):
    """Decode a sum of 2 COUNT + i over the found i: return i, and whether it is the only one."""
    is_one = (found >= 2.0 * COUNT) & (found < 4.0 * COUNT)
    return tl.where(is_one, found - 2.0 * COUNT, 0.0).to(tl.int32), is_one


@triton.jit
def _margin(total, most, most_half, K: tl.constexpr):
    """Return 2 E: how far the nearest codeword's score may be below the best, `(V,)`.

    With a = `most` and H = `most_half`, no term of a score is larger than M = a * sum |p| + H, nor
    is the sum of all. A score errs by
    - 2^-20 M: p and u^2 are products of up to four rounded numbers, quotients good to two units in
      the last place; |c|^2 / 2 is rounded nine times;
    - 2^-20 M: the remainder of a p or a square after two parts, 2^-22 of it, and the product of
      both low parts of squares;
    - 2^-22 (a + 1): the same below the smallest normal float16, 2^-25 for each of up to 8 terms;
    - (K + 1) 2^-22 M: tensor cores align 16 products at a time, which are exact, with the sum so
      far, and truncate below 2^-23 of the largest.
    E = (K + 16) 2^-22 M + 2^-22 (a + 1) covers these, and the rounding of the compared numbers; in
    float32 (a few codewords, one by one) the error is smaller. It is infinite if float16 might
    not hold a p or the squares, or if they are not numbers: such vectors are scored in float64.
    """
    M = most * total + most_half
    E = (K + 16) * 2.0**-22 * M + 2.0**-22 * (most + 1.0)
    return tl.where(tl.maximum(total, most_half) < 60000.0, 2 * E, float("inf"))


@triton.jit
def _exact_index(
    latent, codebook, scales, scale_out, rank_gain, scale_in, tile, one,
    LENGTH: tl.constexpr, R: tl.constexpr, SCALE_BITS: tl.constexpr, N: tl.constexpr,
    U: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return the best codeword of unit `one` of a tile by scores in float64; ties: the lowest."""
    ACROSS: tl.constexpr = (LENGTH + U * E - 1) // (U * E)
    run = tile // ACROSS * N + one // U
    column = (tile % ACROSS * U + one % U) * E
    word = tl.arange(0, C)
    scores = tl.zeros([C], tl.float64)
    squares = tl.zeros([C], tl.float64)
    for j in tl.static_range(E):
        if R == 0:
            S = as_stored(tl.load(scales + run + tl.arange(0, 1)), SCALE_BITS)
        else:
            at, is_unit = column + j, tl.full([1], 1, tl.int1)
            S = low_rank_scale(
                scale_out, rank_gain, scale_in, run + tl.arange(0, 1), at + tl.arange(0, 1),
                is_unit, LENGTH, R, SCALE_BITS, 1,
            )  # fmt: skip
            S = tl.reshape(S, (1,))
        s = S.to(tl.float64)
        w = tl.load(latent + run * LENGTH + column + j + tl.arange(0, 1)).to(tl.float64)
        c = tl.load(codebook + word * E + j).to(tl.float64)
        scores += (w * s) * c
        squares += (s * s * -0.5) * (c * c)
    scores += squares
    best = tl.max(scores, axis=0)
    return tl.minimum(tl.min(tl.where(scores == best, word, C), axis=0), C - 1)


@triton.jit
def _form_kernel(
    out, octets, codebook, scales, scale_out, rank_gain, scale_in, num_runs, in_features, width,
    LENGTH: tl.constexpr, R: tl.constexpr, SCALE_BITS: tl.constexpr, N: tl.constexpr,
    U: tl.constexpr, E: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    run, column, is_unit = units_of_tile(tl.program_id(0), num_runs, LENGTH, N, U, E)
    index = _read_index(octets, run, column, is_unit, in_features, width, LENGTH, BITS, E)
    if R == 0:
        S = as_stored(tl.load(scales + run, mask=is_unit, other=1), SCALE_BITS)[:, None]
    else:
        S = low_rank_scale(
            scale_out, rank_gain, scale_in, run, column, is_unit, LENGTH, R, SCALE_BITS, E
        )
    place = (run * LENGTH + column)[:, None] + tl.arange(0, E)[None, :]
    W = _words(codebook, index, E) * S
    tl.store(out + place, W.to(out.dtype.element_ty), mask=is_unit[:, None])


@triton.jit
def _reduce_kernel(
    partials, d_scales, dW, octets, codebook, scales, scale_out, rank_gain, scale_in, num_runs,
    in_features, width, num_tiles,
    LENGTH: tl.constexpr, R: tl.constexpr, SCALE_BITS: tl.constexpr, N: tl.constexpr,
    U: tl.constexpr, E: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    sums = tl.zeros([HIGH, LOW * E], tl.float32)
    tile, step = tl.program_id(0), tl.num_programs(0)
    next_dW, next_index, next_S = _read_tile(
        tile, dW, octets, scales, num_runs, in_features, width, LENGTH, R, N, U, E, BITS
    )
    while tile < num_tiles:
        values, index = next_dW.to(tl.float32), next_index
        S = as_stored(next_S, SCALE_BITS)[:, None]
        # prefetch the next tile while this one is computed
        next_dW, next_index, next_S = _read_tile(
            tile + step, dW, octets, scales, num_runs, in_features, width, LENGTH, R, N, U, E, BITS,
        )  # fmt: skip
        run, column, is_unit = units_of_tile(tile, num_runs, LENGTH, N, U, E)
        if partials is not None:
            if R > 0:
                S = low_rank_scale(
                    scale_out, rank_gain, scale_in, run, column, is_unit, LENGTH, R, SCALE_BITS, E
                )
            sums += _sum_by_word(values * S, index, HIGH, LOW)
        if d_scales is not None:
            product = values * _words(codebook, index, E)
            if R > 0:
                place = (run * LENGTH + column)[:, None] + tl.arange(0, E)[None, :]
                tl.store(d_scales + place, product, mask=is_unit[:, None])
            else:
                runs = tile * N + tl.arange(0, N)
                by_run = tl.sum(tl.reshape(tl.sum(product, axis=1), (N, U)), axis=1)
                tl.store(d_scales + runs, by_run, mask=runs < num_runs)
        tile += step
    if partials is not None:
        slot = tl.arange(0, HIGH)[:, None] * (LOW * E) + tl.arange(0, LOW * E)[None, :]
        tl.store(partials + tl.program_id(0) * (HIGH * LOW * E) + slot, sums)


@triton.jit
def _total_kernel(d_codebook, partials, programs, width, count, ROWS: tl.constexpr):
    """Add up all programs' sums in float64, for eight numbers of the codebook."""
    row, column = tl.arange(0, ROWS)[:, None], tl.program_id(0) * 8 + tl.arange(0, 8)
    is_one = (row < programs) & (column < count)[None, :]
    sums = tl.load(partials + row * width + column[None, :], mask=is_one, other=0).to(tl.float64)
    tl.store(d_codebook + column, tl.sum(sums, axis=0).to(tl.float32), mask=column < count)


@triton.jit
def _round_kernel(out, codebook, count, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.load(codebook + place, mask=place < count, other=0) * STEPS
    steps = tl.clamp(steps, -127.0, 127.0, propagate_nan=tl.PropagateNan.ALL)
    # round to the nearest integer, ties to even: float32 numbers of this size have no fraction
    whole = (steps + 12582912.0) - 12582912.0
    tl.store(out + place, whole / STEPS, mask=place < count)


@triton.jit
def _read_tile(
    tile, dW, octets, scales, num_runs, in_features, width,
    LENGTH: tl.constexpr, R: tl.constexpr, N: tl.constexpr, U: tl.constexpr, E: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Load a tile's gradient, indices and group scales, as stored."""
    run, column, is_unit, dW, S = read_gradient(tile, dW, scales, num_runs, LENGTH, R, N, U, E)
    index = _read_index(octets, run, column, is_unit, in_features, width, LENGTH, BITS, E)
    return dW, index, S


@triton.jit
def _read_index(
    octets, run, column, is_unit, in_features, width,
    LENGTH: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Load the index of each unit, `(V,)`: BITS bits."""
    first = run * LENGTH + column
    bit = first % in_features // E * BITS
    octet = octets + first // in_features * width + (bit >> 3)
    word = tl.load(octet, mask=is_unit, other=0).to(tl.int32)
    if 8 % BITS > 0:  # an index may span two octets
        is_cut = is_unit & ((bit & 7) + BITS > 8)
        word |= tl.load(octet + 1, mask=is_cut, other=0).to(tl.int32) << 8
    return (word >> (bit & 7)) & (2**BITS - 1)


@triton.jit
def _words(codebook, index, E: tl.constexpr):
    """Load `codebook[index]`, `(V, d)`; a codeword is contiguous, and the codebook stays cached."""
    return tl.load(codebook + index[:, None] * E + tl.arange(0, E)[None, :])


@triton.jit
def _sum_by_word(values, index, HIGH: tl.constexpr, LOW: tl.constexpr):
    """Sum a tile's `values` by codeword, `(HIGH, LOW * d)`, as a product with one-hot rows.

    With index = high * LOW + low: `(HIGH, V) x (V, LOW * d)`, whose second operand holds each
    vector in the columns of its `low`: a third of C comparisons per vector.
    """
    V: tl.constexpr = values.shape[0]
    E: tl.constexpr = values.shape[1]
    low = tl.arange(0, LOW)[None, :, None]
    is_low = (index & (LOW - 1))[:, None, None] == low
    spread = tl.reshape(tl.where(is_low, values[:, None, :], 0.0), (V, LOW * E))
    is_high = (index // LOW)[None, :] == tl.arange(0, HIGH)[:, None]
    rows = tl.where(is_high, 1.0, 0.0)
    # 11 bits of each number, and 11 of its remainder: a tf32 product reads no more
    high = (spread.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    rest = spread - high
    rest = (rest.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return tl.dot(rows, high, tl.dot(rows, rest, input_precision="tf32"), input_precision="tf32")
