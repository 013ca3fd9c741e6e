"""Form and pull back: the two ends of a training step around ordinary matmuls.

`form` writes `W = codebook[indices] * S`; `pull_back` reduces `dW` to the gradients of what learns.
The pull-back is linear in `dW`, so micro-batches add up.

The indices come from a `source`: packed ones, or a latent weight `(O, I)` of any float dtype, whose
index is that of the level nearest to it under the scales (`qat.quant.codebook.latent_indices`).
Scales are taken as they learn, in float32; both functions compute with them rounded to what a
checkpoint stores, which changes nothing where they are rounded already.

The kernels see the weight as runs of consecutive weights: a run is one group where scales are by
group, else one row. A run is cut into units of 8 weights, or of 1 where 8 do not fill it: a thread
reads the indices of a unit as one word, and neighbouring threads store side by side (all linears of
0.6B form in 0.52 ms instead of 0.95 on an H200). A tile is N runs x U units. The products that say
which weight is formed are rounded one by one, as the reference rounds them: no fused multiply-add.

Shapes: O out_features, I in_features, G groups per row, C codebook entries, R rank, d weights that
an index names.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from qat.kernels import lut_vectors
from qat.kernels.dispatch import tl, triton, use_triton
from qat.kernels.lut_tiles import (
    FormTile,
    Tiling,
    as_stored,
    low_rank_scale,
    read_gradient,
    scale_operands,
    units_of_tile,
)
from qat.kernels.trellis import best_path
from qat.kernels.tuned import chosen
from qat.quant.codebook import latent_indices
from qat.quant.weight import (
    PackedIndices,
    QuantizedWeight,
    Scales,
    chosen_levels,
    expand_scales,
    index_dtype,
    round_levels,
    round_scales,
    vector_size,
)

MOST_LEVELS = 16
"""Levels that a kernel's threads hold."""
REDUCE_WEIGHTS = 2048
"""Weights of a tile that reduces, 16 a thread: a thread holds one tile and draws the next."""
REDUCE_PROGRAMS = 384
"""Programs that share all tiles, about three for each multiprocessor of a large GPU: each sums its
levels across threads once, and the last one adds up what all of them found."""
UNIT = 8
"""Weights of a unit: whole bytes of indices, and the 16 bytes of bf16 a thread moves at once."""
WORDS = {2: torch.int16, 4: torch.int32}
"""The word that holds the indices of a unit, by bits of one."""


def levels_as_stored(codebook: Tensor, level_bits: int, *, out: Tensor | None = None) -> Tensor:
    """`qat.quant.weight.round_levels`, into `out` if it is given: one kernel on a GPU."""
    if level_bits == 8 and _by_kernel(codebook):
        out = torch.empty_like(codebook) if out is None else out
        lut_vectors.round_codewords(codebook, out)
        return out
    rounded = round_levels(codebook, level_bits)
    return rounded if out is None else out.copy_(rounded)


def choose(
    source: PackedIndices | Tensor,
    codebook: Tensor,
    scales: Scales,
    *,
    trellis_bits: int = 0,
    out: PackedIndices | None = None,
) -> PackedIndices | Tensor:
    """A source that forms the same weight with no search: indices of a latent one's codewords.

    A byte for each vector, or two, or for each weight of a trellis, written into `out` where that
    has room. Every other source is as fast as it is: the level of a latent weight is found while it
    is read. `form` and `pull_back` know nothing of a trellis: its latent weights come here first.
    """
    if isinstance(source, PackedIndices) or codebook.dim() == 1:
        return source
    O, I = source.shape
    C, d = codebook.shape
    dtype = index_dtype(C)
    if out is None or (out.shape, out.octets.device) != (source.shape, source.device):
        octets = torch.empty(O, I // d, dtype=dtype, device=source.device).view(torch.uint8)
        out = PackedIndices(octets, 8 * dtype.itemsize, I, d)
    indices = out.octets.view(dtype)
    if trellis_bits:
        S = expand_scales(round_scales(scales), I)
        indices.copy_(best_path(source, S, codebook, trellis_bits))
    elif _by_kernel(codebook):
        lut_vectors.choose(source, codebook, scales, indices)
    else:
        S = expand_scales(round_scales(scales), I)
        indices.copy_(latent_indices(source, S, codebook))
    return out


def form(
    source: PackedIndices | Tensor,
    codebook: Tensor,
    scales: Scales,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`W = codebook[indices] * S`, `(O, I)`: computed in float32, rounded once to `dtype`.

    The same bits on every device. Written into `out` of that dtype if it is given.
    """
    if out is None:
        out = torch.empty(source.shape, dtype=dtype, device=codebook.device)
    source = choose(source, codebook, scales)
    if _by_kernel(codebook):
        if isinstance(source, PackedIndices) and codebook.dim() > 1:
            lut_vectors.form(source, codebook, scales, out)
            return out
        bits = source.bits if isinstance(source, PackedIndices) else 0
        cut = chosen("lut_form", (*source.shape, bits, codebook.numel()), FormTile(), out.device)
        tiling = Tiling.of(source.shape, scales, cut.weights, UNIT)
        _form_kernel[(tiling.num_tiles,)](
            out, *_operands(source, codebook, scales, tiling.E),
            **_constants(tiling, source, codebook),
            enable_fp_fusion=False, num_warps=tiling.num_warps,
        )  # fmt: skip
        return out
    weight, S = _weight_and_scale(source, codebook, scales)
    return out.copy_(chosen_levels(weight) * S)


def pull_back(
    dW: Tensor,
    source: PackedIndices | Tensor,
    codebook: Tensor,
    scales: Scales,
    *,
    wanted: Collection[str],
) -> dict[str, Tensor]:
    """The gradients that `dW` `(O, I)` implies, in float32, of those parts that are `wanted`.

    `wanted` holds names of parts: `codebook` and the fields of `Scales`. With
    `dS = dW * codebook[indices]`: group scales sum `dS` over the group; with `S = A diag(g) B`,
    `dA = (dS B^T) diag(g)`, `dg = sum_o A * (dS B^T)`, `dB = (A diag(g))^T dS`.
    `d_codebook[c]` sums `dW * S` over the places whose index is `c`.
    """
    wants = {
        "wants_codebook": "codebook" in wanted,
        "wants_scales": any(name in wanted for name in scales.present()),
    }
    if not any(wants.values()):
        return {}
    source = choose(source, codebook, scales)
    if _by_kernel(codebook):
        d_codebook, dS = _reduce_by_kernel(dW, source, codebook, scales, **wants)
    else:
        d_codebook, dS = _reduce(dW, source, codebook, scales, **wants)
    gradients = {} if d_codebook is None else {"codebook": d_codebook}
    if dS is None:
        return gradients
    if scales.scales is not None:
        return gradients | {"scales": dS}
    return gradients | _pull_back_low_rank(dS, round_scales(scales), wanted)


def _by_kernel(codebook: Tensor) -> bool:
    """Whether a Triton kernel computes: not where levels are many."""
    is_known = codebook.dim() > 1 or codebook.numel() <= MOST_LEVELS
    return use_triton(codebook) and is_known


def _reduce(
    dW: Tensor,
    source: PackedIndices | Tensor,
    codebook: Tensor,
    scales: Scales,
    *,
    wants_codebook: bool,
    wants_scales: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """`d_codebook`, and the gradient of group scales `(O, G)` or else `dS` `(O, I)`."""
    dW = dW.float()
    weight, S = _weight_and_scale(source, codebook, scales)
    d_codebook = dS = None
    if wants_codebook:
        # in float64, where no order of summation, not even that of atomics, moves the float32
        # result by more than its last bit
        C, d = len(codebook), vector_size(codebook)
        indices, parts = weight.indices.long(), (dW * S).double().view(len(dW), -1, d)
        sums = dW.new_zeros(d, len(dW), C, dtype=torch.float64)
        for place, part in zip(sums, parts.unbind(-1), strict=True):
            place.scatter_add_(1, indices, part)
        d_codebook = sums.sum(1).T.float().view(codebook.shape)
    if wants_scales:
        dS = dW * chosen_levels(weight)
        if scales.scales is not None:
            dS = dS.view(*scales.scales.shape, -1).sum(-1)
    return d_codebook, dS


def _weight_and_scale(
    source: PackedIndices | Tensor, codebook: Tensor, scales: Scales
) -> tuple[QuantizedWeight, Tensor]:
    scales = round_scales(scales)
    S = expand_scales(scales, source.shape[1])
    is_packed = isinstance(source, PackedIndices)
    indices = source.indices() if is_packed else latent_indices(source, S, codebook)
    return QuantizedWeight(indices, codebook, scales), S


def _pull_back_low_rank(dS: Tensor, scales: Scales, wanted: Collection[str]) -> dict[str, Tensor]:
    gradients = {}
    if "scale_in" in wanted:
        gradients["scale_in"] = (scales.scale_out * scales.rank_gain).T @ dS
    if "scale_out" in wanted or "rank_gain" in wanted:
        dSB = dS @ scales.scale_in.T
        both = {"scale_out": dSB * scales.rank_gain, "rank_gain": (scales.scale_out * dSB).sum(0)}
        gradients |= {name: both[name] for name in both if name in wanted}
    return gradients


def _reduce_by_kernel(
    dW: Tensor,
    source: PackedIndices | Tensor,
    codebook: Tensor,
    scales: Scales,
    *,
    wants_codebook: bool,
    wants_scales: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of codebook and scales as `lut_weight` wants them; reads `dW` once.

    The same bits each time. Calls on one device must follow each other, as on one stream they do.
    """
    if isinstance(source, PackedIndices) and codebook.dim() > 1:
        wants = {"wants_codebook": wants_codebook, "wants_scales": wants_scales}
        return lut_vectors.reduce(dW, source, codebook, scales, **wants)
    tiling = Tiling.of(source.shape, scales, REDUCE_WEIGHTS, UNIT)
    most = REDUCE_PROGRAMS if wants_codebook else 2 * REDUCE_PROGRAMS
    rounds = triton.cdiv(tiling.num_tiles, most)
    num_programs = triton.cdiv(tiling.num_tiles, rounds)  # so that all do equally much
    new = {"device": dW.device, "dtype": torch.float32}
    d_levels = d_scales = partials = arrivals = None
    if wants_codebook:
        d_levels = torch.empty(codebook.shape, **new)
        partials = torch.empty(num_programs, triton.next_power_of_2(codebook.numel()), **new)
        arrivals = _arrivals(dW.device)
    if wants_scales:
        d_scales = torch.empty(dW.shape if scales.scales is None else scales.scales.shape, **new)
    _reduce_kernel[(num_programs,)](
        d_levels, d_scales, partials, arrivals, dW.contiguous(),
        *_operands(source, codebook, scales, tiling.E),
        num_tiles=tiling.num_tiles, **_constants(tiling, source, codebook),
        THREADS=min(32 * tiling.num_warps, tiling.N * tiling.U),
        PROGRAMS=triton.next_power_of_2(REDUCE_PROGRAMS),
        # a low-rank scale also says which level is nearest
        enable_fp_fusion=scales.scales is not None, num_warps=tiling.num_warps,
    )  # fmt: skip
    return d_levels, d_scales


_ARRIVALS: dict[torch.device, Tensor] = {}


def _arrivals(device: torch.device) -> Tensor:
    """How many programs of the running reduction have stored their sums: its last one resets it.

    Kept, so that no call has to write a zero. In a capture nothing runs yet that could write it:
    there the graph gets its own.
    """
    if device in _ARRIVALS:
        return _ARRIVALS[device]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _ARRIVALS[device] = zero
    return zero


def _constants(tiling: Tiling, source: PackedIndices | Tensor, codebook: Tensor) -> dict[str, int]:
    """The kernels' arguments that are no tensors."""
    is_packed = isinstance(source, PackedIndices)
    return tiling.constants() | {
        "in_features": source.shape[1],
        "width": source.octets.shape[1] if is_packed else 0,
        "BITS": source.bits if is_packed else 0,
        "C": codebook.numel(),
        "SLOTS": max(triton.next_power_of_2(codebook.numel()), 2),
    }


def _operands(
    source: PackedIndices | Tensor, codebook: Tensor, scales: Scales, E: int
) -> tuple[Tensor | None, ...]:
    if isinstance(source, PackedIndices):
        octets = source.octets.contiguous()
        tensor = octets if E == 1 else octets.view(WORDS.get(source.bits, torch.uint8))
    else:
        tensor = source.contiguous()
    return tensor, codebook, *scale_operands(scales)


@triton.jit
def _form_kernel(
    out, source, codebook, scales, scale_out, rank_gain, scale_in, num_runs, in_features, width,
    LENGTH: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr,
    SCALE_BITS: tl.constexpr, N: tl.constexpr, U: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    run, column, is_unit = units_of_tile(tl.program_id(0), num_runs, LENGTH, N, U, E)
    drawn = draw(source, run, column, is_unit, in_features, width, LENGTH, BITS, E)
    if R == 0:
        S = as_stored(tl.load(scales + run, mask=is_unit, other=1), SCALE_BITS)[:, None]
    else:
        S = low_rank_scale(
            scale_out, rank_gain, scale_in, run, column, is_unit, LENGTH, R, SCALE_BITS, E
        )
    levels, middles, _order = level_tables(codebook, BITS, C, SLOTS)
    W = look_up(levels, chosen_index(drawn, middles, S, BITS, C, R, E)) * S
    place = (run * LENGTH + column)[:, None] + tl.arange(0, E)[None, :]
    tl.store(out + place, W.to(out.dtype.element_ty), mask=is_unit[:, None])


@triton.jit
def _reduce_kernel(
    d_levels, d_scales, partials, arrivals, dW, source, codebook, scales, scale_out, rank_gain,
    scale_in, num_runs, in_features, width, num_tiles,
    LENGTH: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr,
    SCALE_BITS: tl.constexpr, N: tl.constexpr, U: tl.constexpr, E: tl.constexpr,
    THREADS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    step = tl.num_programs(0)
    next_dW, next_drawn, next_S = _read_tile(
        tl.program_id(0), dW, source, scales, num_runs, in_features, width, LENGTH, BITS, R, N, U, E
    )
    levels, middles, order = level_tables(codebook, BITS, C, SLOTS)
    sums = tl.zeros([THREADS, SLOTS], tl.float32)
    tile = tl.program_id(0)
    while tile < num_tiles:
        values, drawn = next_dW.to(tl.float32), next_drawn
        S = as_stored(next_S, SCALE_BITS)[:, None]
        # the next tile is on its way while this one is computed
        next_dW, next_drawn, next_S = _read_tile(
            tile + step, dW, source, scales, num_runs, in_features, width, LENGTH, BITS, R, N, U, E
        )
        run, column, is_unit = units_of_tile(tile, num_runs, LENGTH, N, U, E)
        if R > 0:
            S = low_rank_scale(
                scale_out, rank_gain, scale_in, run, column, is_unit, LENGTH, R, SCALE_BITS, E
            )
        index = chosen_index(drawn, middles, S, BITS, C, R, E)
        if d_levels is not None:
            # the levels of a unit are summed before they meet a scale that it shares
            by_level = _sum_by_level(values if R == 0 else values * S, index, SLOTS)
            of_codebook = by_level * S if R == 0 else by_level
            sums += tl.sum(tl.reshape(of_codebook, (N * U // THREADS, THREADS, SLOTS)), axis=0)
        if d_scales is not None:
            if R > 0:
                place = (run * LENGTH + column)[:, None] + tl.arange(0, E)[None, :]
                tl.store(d_scales + place, values * look_up(levels, index), mask=is_unit[:, None])
            else:
                if d_levels is not None and BITS > 0:
                    by_unit = tl.sum(by_level * levels[None, :], axis=1)
                else:
                    by_unit = tl.sum(values * look_up(levels, index), axis=1)
                runs = tile * N + tl.arange(0, N)
                by_run = tl.sum(tl.reshape(by_unit, (N, U)), axis=1)
                tl.store(d_scales + runs, by_run, mask=runs < num_runs)
        tile += step
    if d_levels is not None:
        _add_up(d_levels, partials, arrivals, tl.sum(sums, axis=0), order, C, SLOTS, PROGRAMS)


@triton.jit
def _read_tile(
    tile, dW, source, scales, num_runs, in_features, width,
    LENGTH: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr, N: tl.constexpr, U: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """What a tile reads once, as it lies: gradient, what indices come from, group scales."""
    run, column, is_unit, dW, S = read_gradient(tile, dW, scales, num_runs, LENGTH, R, N, U, E)
    drawn = draw(source, run, column, is_unit, in_features, width, LENGTH, BITS, E)
    return dW, drawn, S


@triton.jit
def _add_up(
    d_levels, partials, arrivals, sums, order,
    C: tl.constexpr, SLOTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Hand in this program's `sums`; whoever comes last adds up all, in the order of programs.

    In float64, so that the many partial sums cost no digits. No second launch: with one, all
    linears of 0.6B took 3.3 ms instead of 1.65 (one H200).
    """
    slot = tl.arange(0, SLOTS)
    tl.store(partials + tl.program_id(0) * SLOTS + slot, sums)
    tl.debug_barrier()  # every thread has stored before one of them says so
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        program = tl.arange(0, PROGRAMS)[:, None]
        part = partials + program * SLOTS + slot[None, :]
        is_part = program < tl.num_programs(0)
        # past the first-level cache, which does not see what other multiprocessors store
        found = tl.load(part, mask=is_part, other=0, cache_modifier=".cg").to(tl.float64)
        tl.store(d_levels + order, tl.sum(found, axis=0).to(tl.float32), mask=order < C)
        tl.store(arrivals, 0)


@triton.jit
def _sum_by_level(values, index, SLOTS: tl.constexpr):
    """The sums of a unit's `values` where each level is chosen, `(units, SLOTS)`.

    Index = high * LOW + low: the values of each high part times the one-hot of each low part, which
    is half the comparisons.
    """
    LOW: tl.constexpr = 4 if SLOTS > 4 else 2
    is_low = ()
    for low in tl.static_range(LOW):
        is_low = is_low + (tl.where((index & (LOW - 1)) == low, 1.0, 0.0),)
    sums = ()
    for high in tl.static_range(SLOTS // LOW):
        part = tl.where((index & (SLOTS - LOW)) == high * LOW, values, 0.0)
        for low in tl.static_range(LOW):
            sums = sums + (tl.sum(part * is_low[low], axis=1),)
    for halving in tl.static_range(1, 5):
        if SLOTS >> halving > 0:
            joined = ()
            for c in tl.static_range(SLOTS >> halving):
                joined = joined + (tl.join(sums[c], sums[c + (SLOTS >> halving)]),)
            sums = joined
    return tl.reshape(sums[0], (values.shape[0], SLOTS))


@triton.jit
def draw(
    source, run, column, is_unit, in_features, width,
    LENGTH: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """What indices come from: latent weights `(units, E)`, or packed indices, a word a unit."""
    first = run * LENGTH + column
    if BITS == 0:
        place = first[:, None] + tl.arange(0, E)[None, :]
        return tl.load(source + place, mask=is_unit[:, None], other=0)
    elif E == 1:
        bit = first % in_features * BITS
        octet = source + first // in_features * width + bit // 8
        # an index may begin in one octet and end in the next
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
        # sorted by counting: level i goes to the place of its rank
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
