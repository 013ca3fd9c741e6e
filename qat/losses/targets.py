"""What a loss is given: the teacher's word on each token, and the student's logits of few words.

Shapes: T tokens, K teacher tokens kept, D distinct draws (padded), N words that losses read; an
absent kind has width 0.
"""

from collections.abc import Collection
from typing import NamedTuple, cast

import torch
from torch import Tensor

from qat.backend.device import on

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


class Student(NamedTuple):
    """Logits of the words that the losses read; a part that none of them reads has width 0."""

    topk: Tensor
    """`(T, K)`: of the teacher's top-k tokens."""
    draws: Tensor
    """`(T, D)`: of the tokens drawn from the teacher; 0 where padded."""
    label: Tensor
    """`(T, 1)`: of the token that really follows; 0 where unknown."""
    others_lse: Tensor | None
    """`(T,)`: log-sum-exp over all words outside `topk`; None if there are none or none is read."""

    def lse(self) -> Tensor:
        """`(T,)`: log-sum-exp over the whole vocabulary."""
        if self.topk.shape[1] == 0:
            return cast(Tensor, self.others_lse)  # without a top-k the others are all words
        topk = self.topk.logsumexp(1)
        return topk if self.others_lse is None else log_add(topk, self.others_lse)


class WordsRead(NamedTuple):
    """The words whose logits the losses read, at each token; -1 where there is none."""

    topk: Tensor
    """`(T, K)` int64"""
    draws: Tensor
    """`(T, D)` int64"""
    label: Tensor
    """`(T, 1)` int64"""

    @classmethod
    def of(cls, targets: Targets, needs: Collection[str]) -> "WordsRead":
        """Those of the targets that `needs` names, of `topk`, `draws` and `labels`."""
        draws = torch.where(targets.sample_counts > 0, targets.sample_ids, -1)
        label = torch.where(targets.labels == NO_LABEL, -1, targets.labels)[:, None]
        parts = {"topk": targets.topk_ids, "draws": draws, "labels": label}
        return cls(*(ids if name in needs else ids[:, :0] for name, ids in parts.items()))

    def ids(self) -> Tensor:
        """All of them, `(T, N)`, the top-k first."""
        return torch.cat(self, dim=1)

    def student(self, chosen: Tensor, others_lse: Tensor | None) -> Student:
        """The student whose logits of `ids()` are `chosen`."""
        topk, draws, label = chosen.split([part.shape[1] for part in self], dim=1)
        return Student(topk, draws, label, others_lse)


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """`torch.logaddexp`."""
    if on(a.device).compares():
        return torch.stack([a, b]).logsumexp(0)
    return torch.logaddexp(a, b)
