"""A few tokens before an output embedding, with all logits as the oracle.

Shapes: T tokens, D model width, V vocabulary, N chosen words, K of them excluded from the others.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.kernels.head import Head

HEADS = {"plain": (False, None), "bias": (True, None), "softcap": (True, 3.0)}


def learnable(hidden: Tensor, head: Head) -> list[Tensor]:
    """Return the tensors that may get a gradient."""
    return [t for t in (hidden, head.weight, head.bias) if t is not None]


class HeadCase(NamedTuple):
    """Hidden states, head and words; the first token has all words excluded if `K = V`."""

    hidden: Tensor
    head: Head
    ids: Tensor
    excluded: Tensor

    def leaves(self) -> list[Tensor]:
        """Return the tensors that may get a gradient."""
        return learnable(self.hidden, self.head)

    def textbook_chosen(self) -> Tensor:
        """`(T, N)`, 0 where absent."""
        logits = self.head.logits(self.hidden)
        return logits.gather(1, self.ids.clamp_min(0)).masked_fill(self.ids < 0, 0.0)

    def textbook_lse(self) -> Tensor:
        """`(T,)`: over all words but the excluded ones."""
        logits = self.head.logits(self.hidden)
        rows = []
        for row, excluded in zip(logits, self.excluded.tolist(), strict=True):
            kept = [v for v in range(logits.shape[1]) if v not in excluded]
            rows.append(row[kept].logsumexp(0))
        return torch.stack(rows)

    def to(self, dtype: torch.dtype) -> "HeadCase":
        """The same numbers, rounded, as new leaves."""
        hidden, weight, *bias = (t.detach().to(dtype).requires_grad_() for t in self.leaves())
        return self._replace(hidden=hidden, head=Head(weight, *bias or [None], self.head.softcap))


def head_case(
    kind: str, *, T: int = 7, D: int = 6, V: int = 19, N: int = 5, K: int = 3
) -> HeadCase:
    """Return a case in float64 with distinct excluded words, then words that may repeat.

    One of the excluded words is absent.
    """
    has_bias, softcap = HEADS[kind]
    distinct = torch.stack([torch.randperm(V)[:K] for _ in range(T)])
    more = torch.randint(V, (T, N - K))
    more[1::2, -1:] = -1
    if K > 0:
        more[::2, :1] = distinct[::2, :1]
    if 0 < K < V:
        distinct[-1, 0] = -1
    head = Head(
        torch.randn(V, D, dtype=torch.float64).requires_grad_(),
        torch.randn(V, dtype=torch.float64).requires_grad_() if has_bias else None,
        softcap,
    )
    hidden = torch.randn(T, D, dtype=torch.float64).requires_grad_()
    return HeadCase(hidden, head, torch.cat([distinct, more], 1), distinct)
