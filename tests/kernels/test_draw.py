"""Draws follow the softmax, and nothing but their own random numbers decides them."""

import pytest
import torch
from torch import Tensor

from qat.data.noise import uniforms
from qat.kernels.draw import draw_tokens
from qat.kernels.topk import summarize


def drawn(logits: Tensor, n: int, stream: int = 7) -> Tensor:
    numbers = uniforms(stream, torch.arange(len(logits)), 2 * n).view(len(logits), n, 2)
    return draw_tokens(logits, summarize(logits), numbers)


@pytest.mark.parametrize("V", [3, 64, 1000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_counts_pass_a_chi_square_test(V: int, scale: float) -> None:
    logits = (scale * torch.randn(1, V)).expand(500, V)
    draws = drawn(logits, 800)
    counts = torch.bincount(draws.flatten(), minlength=V).double()
    expected = torch.softmax(logits[0].double(), 0) * draws.numel()
    is_common = expected >= 20
    rest = torch.tensor([counts[~is_common].sum(), expected[~is_common].sum()])
    statistic = ((counts - expected)[is_common].square() / expected[is_common]).sum()
    statistic += (rest[0] - rest[1]).square() / rest[1].clamp(min=20)
    freedom = int(is_common.sum())
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5 + 4


def test_the_mean_of_the_counts_is_the_distribution() -> None:
    logits = 3 * torch.randn(40, 300)
    one_hot = torch.zeros(40, 300, dtype=torch.float64)
    draws = drawn(logits, 4000)
    one_hot.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
    probs = torch.softmax(logits.double(), -1)
    error = one_hot / 4000 - probs
    deviation = (probs * (1 - probs) / 4000).sqrt()
    assert (error.abs() <= 5 * deviation + 1e-3).all()


def test_an_exact_inverse_decides() -> None:
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log()
    numbers = torch.tensor([[[0.5, u] for u in (0.0, 0.24, 0.26, 0.74, 0.76, 1 - 2**-53)]])
    tokens = draw_tokens(logits, summarize(logits), numbers.double())
    assert tokens.tolist() == [[0, 0, 1, 1, 2, 2]]


@pytest.mark.parametrize("V", [5, 130, 700])
def test_impossible_tokens_are_never_drawn(V: int) -> None:
    logits = torch.full((50, V), -torch.inf)
    logits[:, V // 2] = 0.0
    logits[:, V - 1] = -30.0
    assert set(drawn(logits, 200).flatten().tolist()) == {V // 2}
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64).expand(50, 2, 2)
    assert draw_tokens(logits, summarize(logits), ends).max() < V


def test_a_spoilt_row_draws_something_and_spoils_no_other() -> None:
    logits = torch.randn(3, 200)
    spoilt = logits.clone()
    spoilt[1, 5] = torch.nan
    assert torch.equal(drawn(logits, 9)[::2], drawn(spoilt, 9)[::2])
