"""What a cache hands to whoever learns from it or is judged against it.

Shapes: B sequences, S positions, K teacher tokens kept, D distinct draws (padded).
"""

from typing import NamedTuple

import torch
from torch import Tensor

NO_LABEL = -100


class Batch(NamedTuple):
    """Sequences with the teacher's targets; a kind of target that the cache lacks has width 0."""

    input_ids: Tensor
    """`(B, S)` int64."""
    position_ids: Tensor
    """`(B, S)` int64, restarting at 0 with each document: models then attend within documents."""
    mask: Tensor
    """`(B, S)` bool: the prediction made at this position counts."""
    labels: Tensor
    """`(B, S)` int64: the next token, `NO_LABEL` where the sequence does not hold it."""
    topk_ids: Tensor
    """`(B, S, K)` int64, most likely first."""
    topk_logprobs: Tensor
    """`(B, S, K)` float32, nats, normalised over the whole vocabulary at temperature 1."""
    tail_logprob: Tensor
    """`(B, S)` float32: log of the teacher's mass outside its top K; NaN where nobody knows it."""
    sample_ids: Tensor
    """`(B, S, D)` int64: distinct tokens drawn from the teacher."""
    sample_counts: Tensor
    """`(B, S, D)` float32: how often each was drawn; 0 where padded."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def filled(self, sequences: int, length: int) -> "Batch":
        """The same batch with rows and positions that do not count, up to these numbers of them."""
        B, S = self.mask.shape
        if B >= sequences and S >= length:
            return self

        def fill(tensor: Tensor) -> Tensor:
            shape = max(B, sequences), max(S, length), *tensor.shape[2:]
            found = tensor.new_zeros(shape)
            found[:B, :S] = tensor
            return found

        return Batch(*map(fill, self))
