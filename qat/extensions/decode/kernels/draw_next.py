"""Draw the next token of each of many sequences with one random number each.

The kernel has one program per row of logits. It reads the row from the GPU's memory for the largest
logit, for the sum of the masses, and until the cumulative mass in vocabulary order reaches the
random number's share. A nucleus needs no sort: the logit that bounds it is searched in an interval
that shrinks by a factor of `WAYS` per pass. Words too unlikely for any nucleus are left out first,
and the passes read the others alone, unless there are more than `ROOM`.

Shapes: B rows, V words.
"""

import math

import torch
from torch import Tensor

from qat.kernels.dispatch import tl, triton, use_triton

BLOCK, WARPS, STAGES = 4096, 16, 3
"""Words that a program reads at a time, its warps, and its prefetch depth.

256 rows of 151,936 words took 143 us this way on an H100, and 189 us with the nucleus settings.
"""
NUCLEUS_BLOCK, NUCLEUS_WARPS, NUCLEUS_STAGES = 2048, 8, 1
"""The same settings for a nucleus search: 1,021 us, against 1,451 us with those above, when all its
passes read whole rows."""
WAYS, PASSES = 8, 7
"""Candidate bounds per pass, and passes: enough to find the bound of a nucleus to less than 1e-5
nats at 150,000 words."""
ROOM = 4096
"""The most words of a row that are copied for the search of a nucleus: 32 KB a row."""
MOST = 1 - 2.0**-22
"""The largest share of the mass that a draw may reach, so that rounding cannot pass the end."""


def draw_next(
    logits: Tensor, uniforms: Tensor, *, temperature: float = 1.0, top_p: float = 1.0
) -> Tensor:
    """Draw a token of each row, `(B,)` int64, by inversion of the distribution function.

    Token v is drawn if `sum(p[:v]) <= u < sum(p[:v + 1])`, with `p = softmax(logits /
    temperature)` restricted to the smallest set of most likely tokens that holds `top_p`; tokens
    as likely as the least of that set belong to it. Temperature 0 takes the most likely token. A
    row without a finite maximum has no distribution: some token is drawn, always one of the V.

    Args:
        logits: `(B, V)` float32.
        uniforms: u, `(B,)` float32 in [0, 1).
        temperature: softmax temperature, >= 0.
        top_p: probability mass of the nucleus; 1: all tokens.
    """
    if temperature == 0:
        return logits.argmax(-1)
    if use_triton(logits, __name__):
        return _draw_by_kernel(logits, uniforms, 1 / temperature, top_p)
    masses = ((logits - logits.amax(-1, keepdim=True)) / temperature).exp()
    if top_p < 1:
        ordered = masses.sort(-1, descending=True).values
        before = ordered.cumsum(-1) - ordered
        num_kept = (before < top_p * ordered.sum(-1, keepdim=True)).sum(-1, keepdim=True)
        least = ordered.gather(-1, (num_kept - 1).clamp_min(0))  # none is kept in a row of NaN
        masses = masses.masked_fill(masses < least, 0.0)
    sums = masses.cumsum(-1)
    wanted = uniforms[:, None].clamp(max=MOST) * sums[:, -1:]
    drawn = torch.searchsorted(sums, wanted, right=True)[:, 0]
    return drawn.clamp(max=logits.shape[1] - 1)


def _draw_by_kernel(logits: Tensor, uniforms: Tensor, sharpness: float, top_p: float) -> Tensor:
    B, V = logits.shape
    out = torch.empty(B, dtype=torch.int64, device=logits.device)
    # all words below this logit together hold too little mass to matter
    lowest = math.log((1 - top_p) / V) if top_p < 1 else 0.0
    block, warps, stages, size = BLOCK, WARPS, STAGES, 0
    if top_p < 1:
        block, warps, stages = NUCLEUS_BLOCK, NUCLEUS_WARPS, NUCLEUS_STAGES
        size = min(ROOM, V)
    room = torch.empty(B, size, device=logits.device)
    # V is not a constexpr: Triton 3.6 fails on a loop that it knows to run once
    _draw_kernel[(B,)](
        out, logits.contiguous(), uniforms.contiguous(), room,
        torch.empty_like(room, dtype=torch.int32), sharpness, top_p, lowest, V, size,
        IS_CUT=top_p < 1, MOST=MOST, WAYS=WAYS, PASSES=PASSES,
        BLOCK=min(block, triton.next_power_of_2(V)), STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _draw_kernel(
    out, logits, uniforms, room, places, sharpness, top_p, lowest, V, size, IS_CUT: tl.constexpr,
    MOST: tl.constexpr, WAYS: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += row * V
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        x = tl.load(logits + start + column, mask=start + column < V, other=float("-inf"))
        peaks = tl.maximum(peaks, x)
    peak = tl.max(peaks, axis=0)
    share = tl.minimum(tl.load(uniforms + row), MOST)
    total = _mass(logits, peak, sharpness, float("-inf"), V, BLOCK, STAGES)
    if IS_CUT:
        least = lowest + tl.log(total)
        room += row * size
        places += row * size
        count = 0
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            x = _scaled(logits, start, peak, sharpness, V, BLOCK)
            is_likely = x >= least
            place = count + tl.cumsum(is_likely.to(tl.int32), axis=0) - 1
            fits = is_likely & (place < size)
            tl.store(room + place, x, mask=fits)
            tl.store(places + place, start + column, mask=fits)
            count += tl.sum(is_likely.to(tl.int32), axis=0)
        tl.debug_barrier()  # other threads of this program read what was written
        mass = top_p * total
        if count <= size:
            bound = _bound(room, 0.0, 1.0, least, mass, count, WAYS, PASSES, BLOCK, STAGES)
            wanted = share * _mass(room, 0.0, 1.0, bound, count, BLOCK, STAGES)
            word = _inverted(room, 0.0, 1.0, bound, wanted, count, BLOCK)
            # a row of NaN has no likely word, and no place was written
            word = tl.load(places + word, mask=word < count, other=0)
        else:
            bound = _bound(logits, peak, sharpness, least, mass, V, WAYS, PASSES, BLOCK, STAGES)
            wanted = share * _mass(logits, peak, sharpness, bound, V, BLOCK, STAGES)
            word = _inverted(logits, peak, sharpness, bound, wanted, V, BLOCK)
    else:
        word = _inverted(logits, peak, sharpness, float("-inf"), share * total, V, BLOCK)
    tl.store(out + row, word.to(tl.int64))


@triton.jit
def _bound(
    logits, peak, sharpness, bound, mass, V, WAYS: tl.constexpr, PASSES: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the largest bound at which and above which words hold `mass`, not below `bound`."""
    above = 1e-6  # words from here on hold too little
    way = tl.arange(0, WAYS)
    for _ in range(PASSES):
        step = (above - bound) / WAYS
        bounds = bound + step * way
        held = tl.zeros([WAYS], tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            x = _scaled(logits, start, peak, sharpness, V, BLOCK)
            is_above = x[None, :] >= bounds[:, None]
            held += tl.sum(tl.where(is_above, tl.exp(x)[None, :], 0.0), axis=1)
        enough = tl.sum((held >= mass).to(tl.int32), axis=0)
        bound += step * tl.maximum(enough - 1, 0).to(tl.float32)
        above = bound + step
    return bound


@triton.jit
def _inverted(logits, peak, sharpness, bound, wanted, V, BLOCK: tl.constexpr):
    """Return the word at which the masses at `bound` and above have added up to `wanted`."""
    column = tl.arange(0, BLOCK)
    start = 0
    before = 0.0
    here = _block_mass(logits, start, peak, sharpness, bound, V, BLOCK)
    while (before + here <= wanted) & (start + BLOCK < V):
        before += here
        start += BLOCK
        here = _block_mass(logits, start, peak, sharpness, bound, V, BLOCK)
    x = _scaled(logits, start, peak, sharpness, V, BLOCK)
    mass = tl.where(x >= bound, tl.exp(x), 0.0)
    is_there = mass > 0
    is_past = (before + tl.cumsum(mass, axis=0) > wanted) & is_there
    # rounding may leave the sum below `wanted`: then take the last word with mass
    last = tl.max(tl.where(is_there, column, 0), axis=0)
    first = tl.min(tl.where(is_past, column, BLOCK), axis=0)
    return start + tl.minimum(first, last)


@triton.jit
def _scaled(logits, start, peak, sharpness, V, BLOCK: tl.constexpr):
    """Return a block's logits minus the peak, over the temperature; -inf past the last word."""
    word = start + tl.arange(0, BLOCK)
    return (tl.load(logits + word, mask=word < V, other=float("-inf")) - peak) * sharpness


@triton.jit
def _block_mass(logits, start, peak, sharpness, bound, V, BLOCK: tl.constexpr):
    """Return the sum of a block's masses at `bound` and above."""
    x = _scaled(logits, start, peak, sharpness, V, BLOCK)
    return tl.sum(tl.where(x >= bound, tl.exp(x), 0.0), axis=0)


@triton.jit
def _mass(logits, peak, sharpness, bound, V, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Return the sum of all masses at `bound` and above, block by block."""
    total = 0.0
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        total += _block_mass(logits, start, peak, sharpness, bound, V, BLOCK)
    return total
