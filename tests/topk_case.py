"""Logits with every difficulty of a top K, and the textbook's answer."""

import torch
from torch import Tensor

ACCURACY = 2e-6
SHAPES = [(700, 5), (640, 10), (65, 1), (4096, 64), (5000, 37), (129, 3)]


def difficult_logits(V: int, dtype: torch.dtype) -> Tensor:
    """Seven rows: ordinary ones, ties, zeros of both signs, impossible tokens, a far tail."""
    logits = 3 * torch.randn(7, V)
    logits[1] = logits[1].round()
    logits[2, max(1, V // 2) :] = -torch.inf
    logits[3] = 0.0
    logits[3, ::2] = -0.0
    logits[4] -= 60.0
    logits[4, V // 3] = 5.0
    logits[5, 3:] = -torch.inf
    logits[6] = -7.5
    return logits.to(dtype)


def textbook_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, ids (lowest first among equals), log-sum-exp and log tail mass, in float64."""
    exact = logits.double()
    ordered = (exact + 0.0).sort(dim=-1, descending=True, stable=True)
    values, ids = ordered.values[:, :k], ordered.indices[:, :k]
    total = exact.logsumexp(-1)
    tail = exact.scatter(-1, ids, -torch.inf).logsumexp(-1)
    return values, ids, total, tail - total


def assert_accurate(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=ACCURACY, atol=ACCURACY)
