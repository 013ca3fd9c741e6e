"""Form a weight and pull its gradient back: the steps around ordinary matmuls in training.

`form` writes `W = codebook[indices] * S`; `pull_back` reduces `dW` to gradients of the trained
parts. The pull-back is linear in `dW`, so micro-batches may be added up first.

The indices come from a `source`: packed indices, or a latent weight `(O, I)` of any float dtype,
whose index is that of the nearest level under the scales (`qat.quant.codebook.latent_indices`).
Scales are passed as they are trained, in float32; both functions round them to what a checkpoint
stores, which changes nothing if they are rounded already.

The kernels see the weight as tiles of units (`lut_tiles`) of 8 weights, or of 1 if 8 do not divide
a run. A thread reads the indices of a unit as one word, and neighbouring threads store contiguously
(forming all linears of a 0.6B model takes 0.52 ms instead of 0.95 on an H200).

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
"""The most levels that the kernels support, as threads hold all of them in registers."""
REDUCE_WEIGHTS = 2048
"""Weights per tile of the reduction, 16 per thread: a thread holds one tile and prefetches the
next."""
REDUCE_PROGRAMS = 384
"""Programs that share all tiles, about three for each multiprocessor of a large GPU. Each program
reduces its levels across threads once, and the last one adds up the partial sums of all."""
UNIT = 8
"""Weights per unit: whole bytes of indices, and 16 bytes of bf16, the most a thread moves at
once."""
WORDS = {2: torch.int16, 4: torch.int32}
"""The integer type that holds the indices of a unit, keyed by bits per index."""


def levels_as_stored(codebook: Tensor, level_bits: int, *, out: Tensor | None = None) -> Tensor:
    """Do what `qat.quant.weight.round_levels` does, into `out` if given; one kernel on a GPU."""
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
    out: PackedIndices | None = None,
) -> PackedIndices | Tensor:
    """Return a source that forms the same weight without a search: indices of a latent weight.

    Indices take one or two bytes per vector, and are written into `out` if its shape and device
    match. Other sources are returned unchanged, as they need no preparation: the level of a latent
    weight with one codebook is found while it is read.
    """
    if isinstance(source, PackedIndices) or codebook.dim() == 1:
        return source
    O, I = source.shape
    C, d = codebook.shape[-2:]
    dtype = index_dtype(C)
    if out is None or (out.shape, out.octets.device) != (source.shape, source.device):
        octets = torch.empty(O, I // d, dtype=dtype, device=source.device).view(torch.uint8)
        out = PackedIndices(octets, 8 * dtype.itemsize, I, d)
    indices = out.octets.view(dtype)
    if _by_kernel(codebook):
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
    """Return `W = codebook[indices] * S`, `(O, I)`: computed in float32, rounded once to `dtype`.

    The result is bit-identical on all devices. It is written into `out` of that dtype if given.
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
            # each product is rounded, as in the reference: no fused multiply-add
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
    """Return the float32 gradients of the parts in `wanted` for the gradient `dW` `(O, I)`.

    `wanted` holds names of parts: `codebook` and the fields of `Scales`. With
    `dS = dW * codebook[indices]`: group scales sum `dS` over the group; with `S = A diag(g) B`,
    `dA = (dS B^T) diag(g)`, `dg = sum_o A * (dS B^T)`, `dB = (A diag(g))^T dS`.
    `d_codebook[c]` sums `dW * S` over the places whose index is `c`.
    """
    wants = "codebook" in wanted, any(name in wanted for name in scales.present())
    if not any(wants):
        return {}
    source = choose(source, codebook, scales)
    is_packed = isinstance(source, PackedIndices)
    reduce = _reduce
    if _by_kernel(codebook):
        reduce = lut_vectors.reduce if is_packed and codebook.dim() > 1 else _reduce_by_kernel
    d_codebook, dS = reduce(dW, source, codebook, scales, *wants)
    gradients = {} if d_codebook is None else {"codebook": d_codebook}
    if dS is None:
        return gradients
    if scales.scales is not None:
        return gradients | {"scales": dS}
    return gradients | _pull_back_low_rank(dS, round_scales(scales), wanted)


def _by_kernel(codebook: Tensor) -> bool:
    """Return whether a Triton kernel supports this codebook: vectors, or one of few levels."""
    is_known = codebook.dim() == 2 or codebook.dim() == 1 and len(codebook) <= MOST_LEVELS
    return use_triton(codebook, __name__) and is_known


def _reduce(
    dW: Tensor,
    source: PackedIndices | Tensor,
    codebook: Tensor,
    scales: Scales,
    wants_codebook: bool,
    wants_scales: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return `d_codebook`, and the gradient of group scales `(O, G)` or else `dS` `(O, I)`."""
    dW = dW.float()
    weight, S = _weight_and_scale(source, codebook, scales)
    d_codebook = dS = None
    if wants_codebook:
        # in float64, where no order of summation, not even that of atomics, changes the float32
        # result by more than its last bit
        T = len(codebook) if codebook.dim() == 3 else 1
        _, C, d = codebook.view(T, -1, vector_size(codebook)).shape
        indices, parts = weight.indices.long(), (dW * S).double().view(len(dW), -1, d)
        sums = dW.new_zeros(d, len(dW), C, dtype=torch.float64)
        for place, part in zip(sums, parts.unbind(-1), strict=True):
            place.scatter_add_(1, indices, part)
        by_table = sums.view(d, T, -1, C).sum(2).permute(1, 2, 0)
        d_codebook = by_table.float().reshape(codebook.shape)
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
    wants_codebook: bool,
    wants_scales: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return what `_reduce` returns, by a kernel that reads `dW` once; deterministic."""
    tiling = Tiling.of(source.shape, scales, REDUCE_WEIGHTS, UNIT)
    most = REDUCE_PROGRAMS if wants_codebook else 2 * REDUCE_PROGRAMS
    rounds = triton.cdiv(tiling.num_tiles, most)
    num_programs = triton.cdiv(tiling.num_tiles, rounds)  # an equal share for each program
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
        # a low-rank scale also determines which level is nearest
        enable_fp_fusion=scales.scales is not None, num_warps=tiling.num_warps,
    )  # fmt: skip
    return d_levels, d_scales


_ARRIVALS: dict[torch.device, Tensor] = {}


def _arrivals(device: torch.device) -> Tensor:
    """Return the counter of programs that have stored their sums; the last program resets it.

    The tensor is kept, so that no call has to write a zero. Nothing runs during a capture that
    could write it: a graph captured before the first call gets a tensor of its own.
    """
    if device in _ARRIVALS:
        return _ARRIVALS[device]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _ARRIVALS[device] = zero
    return zero


def _constants(tiling: Tiling, source: PackedIndices | Tensor, codebook: Tensor) -> dict[str, int]:
    """Return the kernels' arguments that are not tensors."""
    is_packed, C = isinstance(source, PackedIndices), codebook.numel()
    width, bits = (source.octets.shape[1], source.bits) if is_packed else (0, 0)
    indices = {"in_features": source.shape[1], "width": width, "BITS": bits}
    return tiling.constants() | indices | {"C": C, "SLOTS": max(triton.next_power_of_2(C), 2)}


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
    loaded = load_source(source, run, column, is_unit, in_features, width, LENGTH, BITS, E)
    if R == 0:
        S = as_stored(tl.load(scales + run, mask=is_unit, other=1), SCALE_BITS)[:, None]
    else:
        S = low_rank_scale(
            scale_out, rank_gain, scale_in, run, column, is_unit, LENGTH, R, SCALE_BITS, E
        )
    levels, middles, _order = level_tables(codebook, BITS, C, SLOTS)
    W = look_up(levels, chosen_index(loaded, middles, S, BITS, C, R, E)) * S
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
    next_dW, next_loaded, next_S = _read_tile(
        tl.program_id(0), dW, source, scales, num_runs, in_features, width, LENGTH, BITS, R, N, U, E
    )
    levels, middles, order = level_tables(codebook, BITS, C, SLOTS)
    sums = tl.zeros([THREADS, SLOTS], tl.float32)
    tile = tl.program_id(0)
    while tile < num_tiles:
        values, loaded = next_dW.to(tl.float32), next_loaded
        S = as_stored(next_S, SCALE_BITS)[:, None]
        # prefetch the next tile while this one is computed
        next_dW, next_loaded, next_S = _read_tile(
            tile + step, dW, source, scales, num_runs, in_features, width, LENGTH, BITS, R, N, U, E
        )
        run, column, is_unit = units_of_tile(tile, num_runs, LENGTH, N, U, E)
        if R > 0:
            S = low_rank_scale(
                scale_out, rank_gain, scale_in, run, column, is_unit, LENGTH, R, SCALE_BITS, E
            )
        index = chosen_index(loaded, middles, S, BITS, C, R, E)
        if d_levels is not None:
            # sum by level within a unit first, then multiply by the scale that the unit shares
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
    """Load a tile's gradient, latent weights or packed indices, and group scales, as stored."""
    run, column, is_unit, dW, S = read_gradient(tile, dW, scales, num_runs, LENGTH, R, N, U, E)
    loaded = load_source(source, run, column, is_unit, in_features, width, LENGTH, BITS, E)
    return dW, loaded, S


@triton.jit
def _add_up(
    d_levels, partials, arrivals, sums, order,
    C: tl.constexpr, SLOTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Store this program's `sums`; the last program to arrive adds up all in program order.

    The sum is in float64, so that many partial sums cost no digits. It avoids a second launch,
    with which all linears of a 0.6B model took 3.3 ms instead of 1.65 (one H200).
    """
    slot = tl.arange(0, SLOTS)
    tl.store(partials + tl.program_id(0) * SLOTS + slot, sums)
    tl.debug_barrier()  # every thread stores before one of them counts
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        program = tl.arange(0, PROGRAMS)[:, None]
        part = partials + program * SLOTS + slot[None, :]
        is_part = program < tl.num_programs(0)
        # bypass the L1 cache, which does not see stores of other multiprocessors
        found = tl.load(part, mask=is_part, other=0, cache_modifier=".cg").to(tl.float64)
        tl.store(d_levels + order, tl.sum(found, axis=0).to(tl.float32), mask=order < C)
        tl.store(arrivals, 0)


@triton.jit
def _sum_by_level(values, index, SLOTS: tl.constexpr):
    """Sum a unit's `values` by chosen level, `(units, SLOTS)`.

    Index = high * LOW + low: the values of each high part are multiplied by the one-hot of each
    low part, which halves the comparisons.
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
def load_source(
    source, run, column, is_unit, in_features, width,
    LENGTH: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Load latent weights `(units, E)`, or packed indices, one word per unit."""
    first = run * LENGTH + column
    if BITS == 0:
        place = first[:, None] + tl.arange(0, E)[None, :]
        return tl.load(source + place, mask=is_unit[:, None], other=0)
    elif E == 1:
        bit = first % in_features * BITS
        octet = source + first // in_features * width + bit // 8
        # an index may start in one octet and end in the next
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
    """Return the levels in index order, the midpoints between them, and each level's place.

    Packed indices count levels in stored order; a latent weight's index counts them ascending.
    """
    place = tl.arange(0, SLOTS)
    levels = tl.load(codebook + place, mask=place < C, other=float("inf") if BITS == 0 else 0.0)
    middles = levels
    if BITS == 0:
        row, column = levels[:, None], levels[None, :]
        is_before = (column < row) | ((column == row) & (place[None, :] < place[:, None]))
        rank = tl.sum(is_before.to(tl.int32), axis=1)
        # counting sort: a level moves to the position of its rank
        takes = rank[:, None] == place[None, :]
        levels = tl.sum(tl.where(takes, row, 0.0), axis=0)
        nexts = tl.sum(tl.where(rank[:, None] == place[None, :] + 1, row, 0.0), axis=0)
        middles = (levels + nexts) * 0.5
        place = tl.sum(tl.where(takes, place[:, None], 0), axis=0)
    return levels, middles, place


@triton.jit
def chosen_index(
    loaded, middles, S, BITS: tl.constexpr, C: tl.constexpr, R: tl.constexpr, E: tl.constexpr
):
    """Return the index of each weight, `(units, E)`."""
    if BITS > 0:
        word = loaded[:, None] >> (tl.arange(0, E) * BITS)[None, :].to(loaded.dtype)
        return word.to(tl.int32) & (2**BITS - 1)
    else:
        return _nearest(_divide(loaded.to(tl.float32), S, R), middles, C)


@triton.jit
def _divide(latent, S, R: tl.constexpr):
    """Return `latent / S` correctly rounded, and zero where `S` is zero.

    There is one division per group: the product with the rounded reciprocal, corrected by its
    remainder, is the rounded quotient (Markstein) as long as nothing overflows. A scale that was a
    float16 has a normal reciprocal, and so has a float32 scale from 2**-126 to 2**126. A quotient
    that overflows needs no correction.
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
    """Count the midpoints below each value by binary search; ties go to the lower level."""
    SLOTS: tl.constexpr = middles.shape[0]
    index = tl.zeros(scaled.shape, tl.int32)
    for halving in tl.static_range(1, 5):
        if SLOTS >> halving > 0:
            middle = look_up(middles, index + ((SLOTS >> halving) - 1))
            index += tl.where(scaled <= middle, 0, SLOTS >> halving)
    return tl.minimum(index, C - 1)


@triton.jit
def look_up(table, index):
    """Return `table[index]`."""
    flat = tl.reshape(index, (index.numel,))
    return tl.reshape(tl.gather(table, flat, 0), index.shape)
