"""Random tokens from logits without the softmax of a whole vocabulary.

Draws are systematic: the n points (i + U) / n of one random number U, each inverted twice, first
over the blocks of `topk.summarize` and then inside the block that it falls into. Masses are rounded
to integer multiples of 2^-40 of the largest one and summed as integers: the sums are exact in any
order, the points are placed exactly among them, and a token without mass is never drawn.

Shapes: T tokens, V vocabulary, N blocks, n draws, B columns of a block.
"""

import torch
from torch import Tensor

from qat.backend.device import on
from qat.kernels.topk import Blocks, candidates, masses

UNIT = 2.0**40


def draw_tokens(logits: Tensor, blocks: Blocks, uniforms: Tensor, count: int) -> Tensor:
    """Draw `(T, count)` int64 tokens, ascending, with one random number per row.

    The expected number of a token is `count * p`, `p = softmax(logits)[token]` up to float32 and to
    2^-41 of the most likely token; its number is that value rounded down or up, so its variance is
    at most 1/4, while independent draws have `count * p * (1 - p)`. Systematic sampling: Madow,
    Annals of Mathematical Statistics 20 (1949); Kitagawa, J. Comput. Graph. Statist. 5 (1996).

    Args:
        logits: `(T, V)`.
        blocks: the result of `summarize(logits)`.
        uniforms: `(T,)` float64 in [0, 1).
        count: n.
    """
    units_TN = _units(masses(blocks)[0])
    sums_TN = units_TN.cumsum(-1)
    whole_Tn, rest_Tn = _points(sums_TN[:, -1:], uniforms[:, None], count)
    block_Tn = _first_above(sums_TN, whole_Tn)
    unit_Tn = units_TN.gather(1, block_Tn)
    start_Tn = sums_TN.gather(1, block_Tn) - unit_Tn
    place_Tn = ((whole_Tn - start_Tn) + rest_Tn) / unit_Tn  # inside the block, in [0, 1]
    values_TnB, ids_TnB = candidates(logits, block_Tn)
    peak_Tn = blocks.peaks.gather(1, block_Tn)
    sums_TnB = _units((values_TnB - peak_Tn[..., None]).exp_()).cumsum(-1)
    total_Tn1 = sums_TnB[..., -1:]
    wanted_Tn1 = torch.minimum((place_Tn[..., None] * total_Tn1).long(), total_Tn1 - 1)
    return ids_TnB.gather(-1, _first_above(sums_TnB, wanted_Tn1))[..., 0]


def _points(totals: Tensor, uniforms: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return `(i + U) / count` of `(T, 1)` int64 totals as `(T, count)` whole parts and remainders.

    The whole parts are below the total, the remainders in [0, 1]. With `total = a * count + b` the
    point is `a * i + (b * i + U * total) / count`, which does not overflow an int64 as i * total
    would.
    """
    scaled_T1 = uniforms * totals
    floor_T1 = scaled_T1.floor()
    places_n = torch.arange(count, device=totals.device)
    first_T1 = torch.minimum(floor_T1.long(), totals - 1)
    above_Tn = totals % count * places_n + first_T1
    rest_Tn = (above_Tn % count + (scaled_T1 - floor_T1)) / count
    return _quotient(totals, count) * places_n + _quotient(above_Tn, count), rest_Tn


def _quotient(numbers: Tensor, count: int) -> Tensor:
    """Return `numbers // count` for int64."""
    if on(numbers.device).is_traced:  # `//` goes through float32 there
        return ((numbers - numbers % count).double() / count).round().long()
    return numbers // count


def _units(weights: Tensor) -> Tensor:
    """Convert weights to int64 multiples of 2^-40."""
    return (weights.double() * UNIT).round_().long()


def _first_above(sums: Tensor, wanted: Tensor) -> Tensor:
    """Return the first place of `(..., N)` cumulative sums that exceeds `wanted`."""
    if on(sums.device).is_traced:
        places = (sums[..., None, :] <= wanted[..., None]).sum(-1)
    else:
        places = torch.searchsorted(sums, wanted, right=True)
    return places.clamp_(max=sums.shape[-1] - 1)  # a row with a NaN finds none
