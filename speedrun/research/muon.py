"""Muon: momentum whose matrices are made orthogonal before they move the weights.

Keller Jordan's method (kellerjordan.github.io/posts/muon); the size of an update is AdamW's, as in
arXiv:2502.16982, so that both share one learning rate. Shapes: R rows, C columns; `(E, R, C)` where
a parameter stacks the matrices of E experts.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
MOMENTUM = 0.95
ADAM_RMS = 0.2
"""The size of an entry of AdamW's update, by experience."""


def orthogonal(matrices: Tensor) -> Tensor:
    """About `U @ V.T` of each matrix's singular value decomposition, `(..., R, C)` in its dtype.

    Five Newton-Schulz steps: singular values end between 0.7 and 1.2.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonal(matrices.mT).mT
    a, b, c = COEFFICIENTS
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon:
    """Moves matrices, all of one shape at once."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        *,
        experts: Mapping[nn.Parameter, int],
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        by_shape = defaultdict(list)
        for matrix in matrices:
            shape = torch.Size((experts.get(matrix, 1), -1, matrix.shape[1]))
            by_shape[matrix.view(shape).shape].append(matrix)
        self._groups = by_shape
        self._momenta = {
            shape: [torch.zeros(shape, device=p.device) for p in group]
            for shape, group in by_shape.items()
        }
        self._weight_decay = weight_decay
        self._dtype = dtype

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step; `weight_decay` is multiplied by the learning rate, as AdamW's is."""
        for shape, parameters in self._groups.items():
            momenta = self._momenta[shape]
            group = [p.view(shape) for p in parameters]
            gradients = [p.grad.view(shape) for p in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)
            update = orthogonal(torch.stack(ahead).to(self._dtype)).float()
            size = ADAM_RMS * max(shape[1:]) ** 0.5
            torch._foreach_mul_(group, 1 - lr * self._weight_decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-lr * size)
