"""What a loss knows of the teacher, one row per token.

Shapes: T tokens, K teacher tokens kept, D distinct draws (padded); an absent kind has width 0.
"""

from typing import NamedTuple

from torch import Tensor

NO_LABEL = -100


class Targets(NamedTuple):
    """The teacher's word on `T` tokens."""

    mask: Tensor
    """`(T,)` bool: the token counts."""
    labels: Tensor
    """`(T,)` int64: the token that really follows, `NO_LABEL` where unknown."""
    topk_ids: Tensor
    """`(T, K)` int64, distinct, most likely first."""
    topk_logprobs: Tensor
    """`(T, K)` float32, nats, normalised over the whole vocabulary at temperature 1."""
    tail_logprob: Tensor
    """`(T,)` float32: log of the teacher's mass outside its top K."""
    sample_ids: Tensor
    """`(T, D)` int64: distinct tokens drawn from the teacher."""
    sample_counts: Tensor
    """`(T, D)` float32: how often each was drawn; 0 where padded."""


def valid_rows(targets: Targets) -> Targets:
    """The targets with harmless values wherever the mask is false: no word, log-probability 0.

    Whatever stood there, even inf or nan, then reaches neither value nor gradient.
    """
    masked = ~targets.mask
    return Targets(
        mask=targets.mask,
        labels=targets.labels.masked_fill(masked, NO_LABEL),
        topk_ids=targets.topk_ids.masked_fill(masked[:, None], -1),
        topk_logprobs=targets.topk_logprobs.masked_fill(masked[:, None], 0.0),
        tail_logprob=targets.tail_logprob.masked_fill(masked, 0.0),
        sample_ids=targets.sample_ids.masked_fill(masked[:, None], -1),
        sample_counts=targets.sample_counts.masked_fill(masked[:, None], 0.0),
    )
