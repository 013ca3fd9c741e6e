"""Attention of one new token per sequence over keys and values packed in 8 or 4 bits.

The keys and values that are multiplied are exactly those of `dequantize_heads` in 16 bits, formed
in registers. The other operand, queries or softmax weights, is split into two numbers of 16 bits,
rounded and remainder. Sums are float32.

The kernel: with many sequences or few positions, each warp of a program takes a key head of its own
and writes the result. Otherwise warps share the positions of a key head, and so do programs if the
GPU has room for more; their softmaxes are merged. Warps do not synchronize. Each takes 16 or 32
positions at a time while it prefetches the next ones. Codes are loaded from memory directly by the
lane that multiplies them, 16 bytes per lane, and no number passes through shared memory. That works
because the order within a sum is free. Lane 4 g + c:

    scores    `mma.m16n8k16`: rows are queries (g: upper parts, g + 8: remainders), columns are
              positions; the lane has column g, and of its key the c-th quarter of each half
    weights   the lane then has those of query g at positions 2 c and 2 c + 1 of each 8, which is
              the layout of the second operand of the second product
    values    rows are numbers of a head, columns are queries: up to 4 in two parts each, or 8 whose
              parts take two products. The lane has the g-th eighth of each half at its positions

Column 2 c + e of tile t (8 positions) is position 2 TILES c + 2 t + e of the iteration, so that a
lane's values are contiguous.

Shapes: B sequences, H query heads, J key heads, N positions of the cache, D width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.backend.device import on
from qat.extensions.decode.kernels.cache import EXPONENTS, Cache, scale_of
from qat.extensions.decode.kernels.launch import (
    IS_COMPILED,
    gdc_launch_dependents,
    gdc_wait,
    overlapping,
)
from qat.extensions.decode.kernels.lut_mma import asm_values, columns, lane_products
from qat.extensions.decode.kernels.lut_rows import put_inputs
from qat.kernels.dispatch import tl, triton
from qat.quant.kv import PackedHeads

WARPS = 4


class Cut(NamedTuple):
    """The tiling of the positions."""

    tiles: int
    """Tiles of 8 positions that a warp takes per iteration."""
    programs: int
    """The most programs that share the cache: as many as a large GPU has registers for."""
    registers: int
    """Register limit per thread."""


CUTS = {4: Cut(4, 3 * 132, 168), 8: Cut(2, 3 * 132, 168)}
"""Tilings by bits."""
WIDEST_CAPPED = 128
"""The largest head width to which the register limit applies."""
MOST_QUERIES = 8
"""The most query heads per key head."""
LEAST_WIDTH = 64
"""The smallest head width: with 4 bits, a lane's share of a value is then a whole word."""
TOGETHER = 32
"""Splits whose sums are added up at a time."""
MERGED = 256
"""The most additional positions that a warp reads to avoid a second kernel that merges splits.

This saved 4 us per layer with 64 slots of 32 query heads and up to 256 positions (one H200, 8
bits).
"""
LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)
"""The softmax peak for no keys; finite, so that differences of peaks are not NaN."""
KINDS = (torch.bfloat16, torch.float16)


def is_read_packed(cache: Cache, num_queries: int) -> bool:
    """Return whether `packed_attention` supports this cache and queries per key head."""
    keys = cache.keys
    if not isinstance(keys, PackedHeads):
        return False
    # `mma.m16n8k16` came with Ampere, as bfloat16 did
    is_device = not keys.codes.is_cuda or on(keys.codes.device).has_bf16()
    is_head = keys.width >= LEAST_WIDTH and num_queries <= MOST_QUERIES
    return keys.dtype in KINDS and is_device and is_head


def packed_attention(
    out: Tensor, query: Tensor, cache: Cache, positions: Tensor, scaling: float, *, order: int
) -> Tensor:
    """Write `softmax(scaling * q @ k) @ v` over positions 0 ... `positions[b]` to `out` `(B, H D)`.

    `query` is `(B, H, D)`; `positions` is `(B,)` int64, or `(1,)` for all. `out` has the layout of
    `spread` with `order`, and is returned.
    """
    B, H, D = query.shape
    _, J, N, _ = cache.shape
    (keys, key_steps, values, value_steps), kept = cache.for_kernel()
    cut = CUTS[kept["BITS"]]
    capped = {"maxnreg": cut.registers} if IS_COMPILED and D <= WIDEST_CAPPED else {}
    programs = B * J
    splits = max(1, min(cut.programs // programs, triton.cdiv(N, 8 * cut.tiles * WARPS)))
    is_busy = 2 * programs >= cut.programs * WARPS
    is_whole = J % WARPS == 0 and (is_busy or N - N // (splits * WARPS) <= MERGED)
    if is_whole:
        programs, splits, parts = programs // WARPS, 1, (None,) * 3
    else:
        parts = empty_parts(B * H, splits * WARPS, D, query.device)
    _packed_kernel[(programs, splits)](
        out, *parts, query, keys.view(torch.int32), key_steps, values.view(torch.int32),
        value_steps, positions, N, scaling * LOG2_E,
        H=H, J=J, D=D, TILES=cut.tiles, W=WARPS, SPLITS=splits, STRIDE=int(len(positions) > 1),
        ORDER=order, ASSEMBLED=IS_COMPILED, **kept, num_warps=WARPS, num_stages=1, **capped,
        **overlapping(query.device),
    )  # fmt: skip
    return out if is_whole else merge(out, *parts, order=order)


def empty_parts(heads: int, splits: int, D: int, device: torch.device) -> tuple[Tensor, ...]:
    """Allocate float32 partial results for splits of the positions, the inputs of `merge`."""
    parts = torch.empty(heads, splits, D, device=device)
    return parts, *torch.empty(2, heads, splits, device=device)


def merge(out: Tensor, parts: Tensor, peaks: Tensor, sums: Tensor, *, order: int) -> Tensor:
    """Merge the softmaxes of splits into `out` `(B, H D)`, in the layout of `spread`.

    `parts` `(B H, splits, D)` are sums of values times `exp(score - peak)`; `peaks` and `sums`, the
    sums of `exp(score - peak)`, are `(B H, splits)`.
    """
    heads, splits, D = parts.shape
    room = triton.next_power_of_2(splits)
    _merge_kernel[(heads,)](
        out, parts, peaks, sums, H=heads // len(out), D=D, SPLITS=splits, ROOM=room,
        TOGETHER=min(room, TOGETHER), ORDER=order, num_warps=4, **overlapping(parts.device),
    )  # fmt: skip
    return out


@triton.jit
def _merge_kernel(
    out, parts, peaks, sums,
    H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, ROOM: tl.constexpr,
    TOGETHER: tl.constexpr, ORDER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    split, whole = tl.arange(0, ROOM), tl.arange(0, D)
    peaks, sums = peaks + head * SPLITS, sums + head * SPLITS
    peak = tl.load(peaks + split, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(peak, axis=0)
    every = tl.load(sums + split, mask=split < SPLITS, other=0.0)
    total = tl.sum(tl.exp(peak - top) * every, axis=0)
    y = tl.zeros([D], tl.float32)
    for start in range(0, SPLITS, TOGETHER):
        some = start + tl.arange(0, TOGETHER)
        is_some = some < SPLITS
        weight = tl.exp(tl.load(peaks + some, mask=is_some, other=float("-inf")) - top)
        place = (head * SPLITS + some)[:, None] * D + whole[None, :]
        found = tl.load(parts + place, mask=is_some[:, None], other=0.0)
        y += tl.sum(found * weight[:, None], axis=0)
    column = head % H * D + whole
    put_inputs(out, head // H, column, y / total, column < H * D, H * D, ORDER)


@triton.jit
def _packed_kernel(
    out, parts, peaks, sums, query, keys, key_steps, values, value_steps, positions, N, scaling,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, W: tl.constexpr,
    SPLITS: tl.constexpr, STRIDE: tl.constexpr, ORDER: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, ASSEMBLED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute one split for all query heads of a key head.

    Without `parts` the program computes all positions, with a key head per warp.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = H // J
    IS_FOLDED: tl.constexpr = GROUP <= 4
    SHARING: tl.constexpr = 1 if parts is None else W
    SPAN: tl.constexpr = 8 * TILES * SHARING
    WORDS: tl.constexpr = D * BITS // 32
    pair, split = tl.program_id(0).to(tl.int64) * (W // SHARING), tl.program_id(1)
    b, head = pair // J, pair * GROUP
    end = tl.load(positions + b * STRIDE).to(tl.int32) + 1
    lane = tl.arange(0, 32 * W)
    g, c = lane % 32 // 4, lane % 4
    of_program, sharer = lane // (32 * SHARING), lane // 32 % SHARING
    keys, values = keys + pair * N * WORDS, values + pair * N * WORDS
    key_steps, value_steps = key_steps + pair * N, value_steps + pair * N
    Q = _queries(
        query + head * D + of_program * (GROUP * D), g % (4 if IS_FOLDED else 8), c, scaling,
        GROUP, D, KIND, ASSEMBLED,
    )  # fmt: skip
    peak = tl.full([32 * W], LOWEST, tl.float32)
    total = tl.zeros([32 * W], tl.float32)
    found = ()
    for _ in tl.static_range(D // 4):
        found = found + (tl.zeros([32 * W], tl.float32),)
    # positions of this split, a multiple of SPAN so that only the last is partial
    share = tl.cdiv(tl.cdiv(end, SPLITS), SPAN) * SPAN
    first, last = split * share, tl.minimum(end, (split + 1) * share)
    # the key heads of a program are contiguous, N positions each
    own = of_program * N + sharer * (8 * TILES)
    last_own = of_program * N + last
    loaded = _load_ahead(
        keys, key_steps, values, value_steps, own + first, last_own, g, c, TILES, D, BITS
    )
    for start in range(first, last, SPAN):
        key, key_step, value, value_step = loaded
        begin = own + start
        loaded = _load_ahead(
            keys, key_steps, values, value_steps, begin + SPAN, last_own, g, c, TILES, D, BITS
        )
        # scores of query g at the lane's positions, in base 2
        score, most = (), peak
        for t in tl.static_range(TILES):
            of_tile = _scores(Q, key[t], key_step[t], D, W, BITS, KIND, ASSEMBLED)
            seen = begin + 2 * TILES * c + 2 * t
            for e in tl.static_range(2):
                one = tl.where(seen + e < last_own, of_tile[e], float("-inf"))
                most = tl.maximum(most, one)
                score = score + (one,)
        # online softmax: rescale the sums if the peak of the row's four lanes rises
        most = _of_four(most, W, False, ASSEMBLED)
        old, peak = tl.exp2(peak - most), most
        total *= old
        less = _by_column(old, W, ASSEMBLED)
        mass, rest = (), ()
        for t in tl.static_range(TILES):
            one, two = tl.exp2(score[2 * t] - peak), tl.exp2(score[2 * t + 1] - peak)
            total += one + two
            upper, left = _in_two_parts(one, two, KIND, ASSEMBLED)
            if IS_FOLDED:  # columns from 4 on hold the remainders of the first four
                mass = mass + (tl.where(g < 4, upper, left),)
            else:
                mass, rest = mass + (upper,), rest + (left,)
        more = ()
        for k in tl.static_range(D // 4):
            more = more + (found[k] * less[k % 2],)
        for s in tl.static_range(TILES // 2):
            more = _add_values(
                more, value, value_step, 4 * s, mass[2 * s], mass[2 * s + 1], D, W, BITS, KIND,
                ASSEMBLED,
            )  # fmt: skip
            if not IS_FOLDED:
                more = _add_values(
                    more, value, value_step, 4 * s, rest[2 * s], rest[2 * s + 1], D, W, BITS, KIND,
                    ASSEMBLED,
                )  # fmt: skip
        found = more
    if parts is None:
        whole = _by_column(_of_four(total, W, True, ASSEMBLED), W, ASSEMBLED)
    else:  # a warp's softmax is a split of its own
        ROOM: tl.constexpr = SPLITS * SHARING
        of_query = tl.arange(0, 8 * W)
        row, warp = of_query % 8, of_query // 8
        place = (head + row) * ROOM + split * SHARING + warp
        # ln 2: `merge` expects peaks in base e
        top = tl.max(tl.reshape(peak, [8 * W, 4]), axis=1) * 0.6931471805599453
        tl.store(peaks + place, top, mask=row < GROUP)
        tl.store(sums + place, tl.sum(tl.reshape(total, [8 * W, 4]), axis=1), mask=row < GROUP)
    for e in tl.static_range(2):
        of_column = 2 * c + e
        own_head = head + of_program * GROUP + of_column
        for half in tl.static_range(2):
            for m in tl.static_range(D // 16):
                number = g * (D // 16) + half * (D // 2) + m
                y = found[4 * m + 2 * half + e]
                if IS_FOLDED:
                    y = _with_rest(y, W, ASSEMBLED)
                if parts is None:
                    column = (own_head - b * H) * D + number
                    put_inputs(out, b, column, y / whole[e], of_column < GROUP, H * D, ORDER)
                else:
                    place = own_head * ROOM + split * SHARING + sharer
                    tl.store(parts + place * D + number, y, mask=of_column < GROUP)


@triton.jit
def _queries(
    query, row, c, scaling, GROUP: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Load queries as first operands of the products in `_scores`: four words each."""
    found = ()
    for half in tl.static_range(2):
        place = row * D + half * (D // 2) + c * (D // 8)
        at = (query + place)[:, None] + tl.arange(0, D // 8)[None, :]
        x = tl.load(at, mask=(row < GROUP)[:, None], other=0.0).to(tl.float32) * scaling
        x = columns(x, D // 8)
        for m in tl.static_range(D // 32):
            words = ()
            for i in tl.static_range(2):
                words = words + _in_two_parts(x[4 * m + i], x[4 * m + i + 2], KIND, ASSEMBLED)
            found = found + (words,)
    return found


@triton.jit
def _load_ahead(
    keys, key_steps, values, value_steps, begin, end, g, c,
    TILES: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Load codes and steps of a lane's keys, one per tile, and of its values, two per tile."""
    WORDS: tl.constexpr = D * BITS // 32
    key, key_step, value, value_step = (), (), (), ()
    # further positions are at constant word offsets, which a load adds for free
    seen = begin + 2 * TILES * (g // 2) + g % 2
    at = keys + (seen * WORDS + c * (D // 32))[:, None] + tl.arange(0, D // 32)[None, :]
    for t in tl.static_range(TILES):
        is_seen = seen + 2 * t < end
        key = key + (_words(at + 2 * t * WORDS, is_seen, D, BITS),)
        key_step = key_step + (tl.load(key_steps + seen + 2 * t, mask=is_seen, other=0),)
    seen = begin + 2 * TILES * c
    at = values + (seen * WORDS + g * (D // 64))[:, None] + tl.arange(0, D // 64)[None, :]
    for i in tl.static_range(2 * TILES):
        is_seen = seen + i < end
        value = value + (_words(at + i * WORDS, is_seen, D, BITS),)
        value_step = value_step + (tl.load(value_steps + seen + i, mask=is_seen, other=0),)
    return key, key_step, value, value_step


@triton.jit
def _words(at, is_seen, D: tl.constexpr, BITS: tl.constexpr):
    """Load the words of each half of a head (one for 4 bits); masked lanes are undefined."""
    low = tl.load(at, mask=is_seen[:, None])
    if BITS == 4:
        return (low,)
    else:
        return low, tl.load(at + D * BITS // 64, mask=is_seen[:, None])


@triton.jit
def _scores(
    Q, key, step, D: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Return the scores of query g at positions 2 c and 2 c + 1 of a tile."""
    zero = tl.zeros([32 * W], tl.float32)
    upper = (zero, zero, zero, zero)
    for half in tl.static_range(2):
        words = columns(key[half * BITS // 8], D // 32)
        constants = _step_constants(step, step, half, BITS, KIND, ASSEMBLED)
        for m in tl.static_range(D // 32):
            one = _numbers(words[m], half * (8 - BITS), constants, BITS, KIND, ASSEMBLED)
            two = _numbers(words[m], half * (8 - BITS) + 8, constants, BITS, KIND, ASSEMBLED)
            q = Q[half * (D // 32) + m]
            upper = _product(upper, q, one, two, W, KIND, ASSEMBLED)
    return upper[0] + upper[2], upper[1] + upper[3]


@triton.jit
def _add_values(
    out, value, step, i: tl.constexpr, one, two, D: tl.constexpr, W: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Add to `out` a lane's values i ... i + 3 times their weights, which are in two words."""
    N: tl.constexpr = D // 64
    words, constants = (), ()
    for p in tl.static_range(2):
        for half in tl.static_range(2):
            first = columns(value[i + 2 * p][half * BITS // 8], N)
            second = columns(value[i + 2 * p + 1][half * BITS // 8], N)
            both = ()
            for n in tl.static_range(N):
                for selector in tl.static_range(0x5410, 0x7633, 0x2222):
                    both = both + (_octets(first[n], second[n], selector, ASSEMBLED),)
            words = words + (both,)
            steps = step[i + 2 * p], step[i + 2 * p + 1]
            constants = constants + (
                _step_constants(steps[0], steps[1], half, BITS, KIND, ASSEMBLED),
            )
    found = ()
    for m in tl.static_range(D // 16):
        row = ()
        for k in tl.static_range(4):
            row = row + (_numbers(
                words[k][m // 2], m % 2 * 8 + k % 2 * (8 - BITS), constants[k],
                BITS, KIND, ASSEMBLED,
            ),)  # fmt: skip
        before = out[4 * m], out[4 * m + 1], out[4 * m + 2], out[4 * m + 3]
        found = found + _product(before, row, one, two, W, KIND, ASSEMBLED)
    return found


@triton.jit
def _step_constants(
    one, two, half: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, ASSEMBLED: tl.constexpr
):
    """Convert the steps of two positions to the constants that `_numbers` needs."""
    if BITS == 4 and KIND == tl.bfloat16:
        both = _octets(one, two, 0x7632 if half else 0x5410, ASSEMBLED)
        scale = ((both & 0x00FF00FF) << 4) + (EXPONENTS << 4) * 0x10001
        whole = _nibbles(both >> 12, LESS_128, ASSEMBLED)
        rest = _nibbles(both >> 8, LESS_128, ASSEMBLED)
        rest = _fma(rest, ONES, PLUS_128, KIND, ASSEMBLED)
        # times a sixteenth of the scale: subtract four from the exponent
        return scale, whole, _fma(rest, scale - 4 * 0x800080, 0, KIND, ASSEMBLED)
    else:
        one, two = one >> 16 * half, two >> 16 * half
        scale1, scale2 = scale_of(one & 255), scale_of(two & 255)
        FINE: tl.constexpr = 8 if BITS == 8 else 4
        low1 = ((one >> 8 & 255) << FINE | LARGE).to(tl.float32, bitcast=True)
        low2 = ((two >> 8 & 255) << FINE | LARGE).to(tl.float32, bitcast=True)
        return scale1, scale1 * -low1, scale2, scale2 * -low2


@triton.jit
def _numbers(
    both, SHIFT: tl.constexpr, constants, BITS: tl.constexpr, KIND: tl.constexpr,
    ASSEMBLED: tl.constexpr,
):  # fmt: skip
    """Dequantize the codes at a bit of both halves of a word to a word of two numbers."""
    if BITS == 4 and KIND == tl.bfloat16:
        # 2 instructions per number: from the bits of 128 + code subtract 128 + the integer part of
        # the zero, multiply by the scale and subtract the zero's fraction times the scale; all of
        # this is exact except for the last rounding
        code = _nibbles(both >> SHIFT, PLUS_128, ASSEMBLED)
        code = _fma(code, ONES, constants[1], KIND, ASSEMBLED)
        return _fma(code, constants[0], constants[2], KIND, ASSEMBLED)
    else:
        # 4 instructions: from the bits of 2**15 + code as float32, times the scale, subtract
        # (2**15 + zero) times the scale
        if BITS == 8:
            one = _octets(both, LARGE, 0x7404 + 2 * SHIFT, ASSEMBLED)
            two = _octets(both, LARGE, 0x7424 + 2 * SHIFT, ASSEMBLED)
        else:
            one = (both >> SHIFT & 15) << 8 | LARGE
            two = (both >> SHIFT + 16 & 15) << 8 | LARGE
        one, two = one.to(tl.float32, bitcast=True), two.to(tl.float32, bitcast=True)
        return _packed(
            one * constants[0] + constants[1], two * constants[2] + constants[3], KIND, ASSEMBLED
        )


def _step(kind: str) -> str:
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )


STEP_BF16, STEP_F16 = tl.constexpr(_step("bf16")), tl.constexpr(_step("f16"))
PACK_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
PACK_F16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
FMA_BF16 = tl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
OCTETS = tl.constexpr("prmt.b32 $0, $1, $2, $3;")
NIBBLES = tl.constexpr("lop3.b32 $0, $1, 0x000F000F, $2, 0xEA;")  # a & b | c
# constants: 1, 128 and -128 as two bfloat16 in a word; 2**15 as float32
ONES, PLUS_128 = tl.constexpr(0x3F803F80), tl.constexpr(0x43004300)
LESS_128 = tl.constexpr(0xC300C300 - 2**32)
LARGE = tl.constexpr(0x47000000)


def _of_lanes(operation: str) -> str:
    return (
        f"{{.reg .f32 other; shfl.sync.bfly.b32 other, $1, 1, 31, -1; {operation} $0, $1, other;"
        f" shfl.sync.bfly.b32 other, $0, 2, 31, -1; {operation} $0, $0, other;}}"
    )


MOST, SUM = tl.constexpr(_of_lanes("max.f32")), tl.constexpr(_of_lanes("add.f32"))
FROM = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 31, -1;")
WITH_REST = tl.constexpr(
    "{.reg .f32 rest; shfl.sync.bfly.b32 rest, $1, 2, 31, -1; add.f32 $0, $1, rest;}"
)
SUMS = tl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
FLOATS_4 = tl.constexpr((tl.float32,) * 4)


@triton.jit
def _product(before, a, b0, b1, W: tl.constexpr, KIND: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Add one step of `mma.m16n8k16` to `before`; the first operand is four words."""
    if ASSEMBLED:
        step: tl.constexpr = STEP_BF16 if KIND == tl.bfloat16 else STEP_F16
        return asm_values(step, SUMS, a + (b0, b1) + before, FLOATS_4)
    else:
        upper = _rows(a[0], b0, W, KIND) + _rows(a[2], b1, W, KIND)
        lower = _rows(a[1], b0, W, KIND) + _rows(a[3], b1, W, KIND)
        even, odd = tl.split(tl.reshape(upper, [32 * W, 2]))
        even2, odd2 = tl.split(tl.reshape(lower, [32 * W, 2]))
        return before[0] + even, before[1] + odd, before[2] + even2, before[3] + odd2


@triton.jit
def _rows(a, b, W: tl.constexpr, KIND: tl.constexpr):
    """Compute eight rows of a step, `(W, 8, 8)`, over half of the terms."""
    total = tl.zeros([W, 8, 8], tl.float32)
    for half in tl.static_range(2):
        total += lane_products(_half_of(a, half, KIND), _half_of(b, half, KIND), W)
    return total


@triton.jit
def _packed(one, two, KIND: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Round two float32 to 16 bits and pack them into a word."""
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            PACK_BF16 if KIND == tl.bfloat16 else PACK_F16, "=r,f,f", [one, two],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return _bits(one, KIND) | (_bits(two, KIND) << 16)


@triton.jit
def _in_two_parts(one, two, KIND: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Split two numbers into 16-bit roundings and 16-bit remainders, one word each."""
    upper = _packed(one, two, KIND, ASSEMBLED)
    one_left, two_left = one - _half_of(upper, 0, KIND), two - _half_of(upper, 1, KIND)
    return upper, _packed(one_left, two_left, KIND, ASSEMBLED)


@triton.jit
def _bits(x, KIND: tl.constexpr):
    if KIND == tl.bfloat16:  # the interpreter does not round bfloat16
        raw = x.to(tl.int32, bitcast=True)
        return (raw + 0x7FFF + (raw >> 16 & 1)) >> 16 & 0xFFFF
    else:
        return x.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _half_of(word, half: tl.constexpr, KIND: tl.constexpr):
    """Return one of the two numbers of a word in float32."""
    return (word >> 16 * half).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def _octets(one, two, selector: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Pick four bytes of two words; the selector lists them from its lowest digit on (`prmt`)."""
    two = one * 0 + two
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            OCTETS, "=r,r,r,r", [one, two, one * 0 + selector],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = one * 0
        for k in tl.static_range(4):
            word = two if selector >> 4 * k & 4 else one
            found |= (word >> 8 * (selector >> 4 * k & 3) & 255) << 8 * k
        return found


@triton.jit
def _nibbles(word, number: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Insert the lowest 4 bits of each half of a word into a constant of two 16-bit numbers."""
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            NIBBLES, "=r,r,r", [word, word * 0 + number], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (word & 0x000F000F) | number


@triton.jit
def _fma(a, b, c, KIND: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Return `a * b + c` of the two bfloat16 of each word, rounded once."""
    b, c = a * 0 + b, a * 0 + c
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            FMA_BF16, "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = _half_of(a, 0, KIND) * _half_of(b, 0, KIND) + _half_of(c, 0, KIND)
        high = _half_of(a, 1, KIND) * _half_of(b, 1, KIND) + _half_of(c, 1, KIND)
        return _packed(low, high, KIND, ASSEMBLED)


@triton.jit
def _of_four(x, W: tl.constexpr, IS_SUM: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Return the sum or the maximum over four adjacent lanes, in each of them."""
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            SUM if IS_SUM else MOST, "=&f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        fours = tl.reshape(x, [8 * W, 4])
        one = tl.sum(fours, axis=1) if IS_SUM else tl.max(fours, axis=1)
        return tl.reshape(tl.broadcast_to(one[:, None], [8 * W, 4]), [32 * W])


@triton.jit
def _by_column(x, W: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Return the values of queries 2 c and 2 c + 1; a query's four lanes hold the same."""
    if ASSEMBLED:
        lane = tl.arange(0, 32 * W) % 4 * 8
        even = tl.inline_asm_elementwise(
            FROM, "=f,f,r", [x, lane], dtype=tl.float32, is_pure=False, pack=1
        )
        odd = tl.inline_asm_elementwise(
            FROM, "=f,f,r", [x, lane + 4], dtype=tl.float32, is_pure=False, pack=1
        )
        return even, odd
    else:
        of_query = tl.reshape(tl.max(tl.reshape(x, [8 * W, 4]), axis=1), [W, 1, 4, 2])
        even, odd = tl.split(tl.broadcast_to(of_query, [W, 8, 4, 2]))
        return tl.reshape(even, [32 * W]), tl.reshape(odd, [32 * W])


@triton.jit
def _with_rest(x, W: tl.constexpr, ASSEMBLED: tl.constexpr):
    """Add columns from 4 on (lanes c + 2) to columns below 4 (lanes c)."""
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            WITH_REST, "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        both = tl.sum(tl.reshape(x, [8 * W, 2, 2]), axis=1)
        return tl.reshape(tl.broadcast_to(both[:, None, :], [8 * W, 2, 2]), [32 * W])
