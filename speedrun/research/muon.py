"""Muon: momentum whose matrices are made orthogonal before they move the weights.

Keller Jordan's method (kellerjordan.github.io/posts/muon); the size of an update is AdamW's, as in
arXiv:2502.16982, so that both share one learning rate. Shapes: N matrices, R rows, C columns.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
MOMENTUM = 0.95
ADAM_RMS = 0.2
"""The size of an entry of AdamW's update, by experience."""


def orthogonal(matrices: Tensor) -> Tensor:
    """About `U @ V.T` of each matrix's singular value decomposition, `(N, R, C)` in its dtype.

    Five Newton-Schulz steps: singular values end between 0.7 and 1.2.
    """
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonal(matrices.mT).mT
    a, b, c = COEFFICIENTS
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon:
    """Moves matrices, all of one shape at once."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], *, weight_decay: float, dtype: torch.dtype
    ) -> None:
        by_shape = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        self._groups = list(by_shape.values())
        self._momenta = [[torch.zeros_like(p) for p in group] for group in self._groups]
        self._weight_decay = weight_decay
        self._dtype = dtype

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step; `weight_decay` is multiplied by the learning rate, as AdamW's is."""
        for group, momenta in zip(self._groups, self._momenta, strict=True):
            gradients = [p.grad for p in group]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)
            update = orthogonal(torch.stack(ahead).to(self._dtype)).float()
            size = ADAM_RMS * max(group[0].shape) ** 0.5
            torch._foreach_mul_(group, 1 - lr * self._weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-lr * size)
