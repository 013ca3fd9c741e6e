"""What every backend of Native Sparse Attention computes from.

Shapes: B rows, H query heads, K key-value heads (K divides H, G = H/K), S positions, D head width,
C pooled keys, T tiles of queries, N selection blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """One layer's queries, keys and values; rows begin at position 0."""

    query: Tensor
    """`(B, H, S, D)`, rotated."""
    key: Tensor
    """`(B, K, S, D)`, rotated."""
    value: Tensor
    """`(B, K, S, D)`."""
    pooled_key: Tensor
    """`(B, K, C, D)`, see `qat.kernels.nsa.select.pool`."""
    pooled_value: Tensor | None
    """`(B, K, C, D)`; None where branches are merged, which reads pooled keys for scores alone."""
    gates: Tensor | None
    """`(B, S, H, 3)`: of the compressed, the selected and the sliding branch; None: merged."""
    first: Tensor | None
    """`(B, S)`: where in the row the document of each token begins; None: at 0 for all."""
    scale: float
    """Multiplies `query @ key.T`."""

    @property
    def length(self) -> int:
        """S."""
        return self.query.shape[2]

    @property
    def group(self) -> int:
        """G, query heads that share keys and values."""
        return self.query.shape[1] // self.key.shape[1]

    def beginnings(self) -> Tensor:
        """`first`, of one row if it is None."""
        if self.first is not None:
            return self.first
        return torch.zeros(1, self.length, dtype=torch.long, device=self.query.device)
