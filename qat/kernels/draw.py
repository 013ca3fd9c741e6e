"""Random tokens from logits without the softmax of a whole vocabulary.

A draw inverts the distribution twice: over the blocks that `topk.summarize` left, then inside the
block it fell into. Masses are rounded to whole multiples of 2^-40 of the largest one and summed as
integers: the sums are exact in any order, and a token of no mass is never drawn.

Shapes: T tokens, V vocabulary, N blocks, n draws, B columns of a block.
"""

import torch
from torch import Tensor

from qat.kernels.topk import Blocks, candidates, masses

UNIT = 2.0**40


def draw_tokens(logits: Tensor, blocks: Blocks, uniforms: Tensor) -> Tensor:
    """`(T, n)` int64 tokens, draw i of a row decided by two numbers of it.

    `P(token) = softmax(logits)[token]` up to float32 and to 2^-41 of the most likely token.

    Args:
        logits: `(T, V)`.
        blocks: what `summarize` says of them.
        uniforms: `(T, n, 2)` float64 in [0, 1).
    """
    block_Tn = _invert(masses(blocks)[0], uniforms[..., 0])
    values_TnB, ids_TnB = candidates(logits, block_Tn)
    peak_Tn = blocks.peaks.gather(1, block_Tn)
    weights_TnB = (values_TnB - peak_Tn[..., None]).exp_()
    place_Tn1 = _invert(weights_TnB, uniforms[..., 1:])
    return ids_TnB.gather(-1, place_Tn1)[..., 0]


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first place of `(..., N)` weights whose cumulative sum exceeds that part of the total."""
    sums = (weights.double() * UNIT).round_().long().cumsum(-1)
    total = sums[..., -1:]
    wanted = torch.minimum((uniforms * total).long(), total - 1)
    places = torch.searchsorted(sums, wanted, right=True)
    return places.clamp_(max=weights.shape[-1] - 1)  # of a row that holds a NaN
