"""Draws are the inverse of the softmax at equally spaced points of one random number."""

import pytest
import torch
from covering import covering
from torch import Tensor

from qat.backend.base import Backend
from qat.data.codec import uniforms
from qat.kernels.draw import draw_tokens
from qat.kernels.topk import BLOCK, summarize


def drawn(logits: Tensor, n: int, stream: int = 7) -> Tensor:
    numbers = uniforms(stream, torch.arange(len(logits)), 1)[:, 0]
    return draw_tokens(logits, summarize(logits), numbers, n)


def counts_of(draws: Tensor, V: int) -> Tensor:
    """`(T, V)` float64: how often each token is among a row's draws."""
    zeros = torch.zeros(len(draws), V, dtype=torch.float64)
    return zeros.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))


def on_a_grid(row: Tensor, n: int, cells: int) -> Tensor:
    """`(cells, n)` draws of one distribution with U in the middle of each cell of [0, 1)."""
    logits = row.expand(cells, -1)
    numbers = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    return draw_tokens(logits, summarize(logits), numbers, n)


@pytest.mark.parametrize(("V", "scale"), covering([3, 64, 65, 1000], [4.0, 0.0, 1.0]))
def test_the_mean_count_over_all_random_numbers_is_n_p(V: int, scale: float) -> None:
    """The middle points of n * cells intervals: a token's share of them is p but for one point."""
    n, cells = 50, 1000
    row = scale * torch.randn(V)
    mean = counts_of(on_a_grid(row, n, cells), V).mean(0)
    expected = n * torch.softmax(row.double(), 0)
    assert (mean - expected).abs().max() <= 1 / cells + 1e-5 * n


@pytest.mark.parametrize(("n", "scale"), covering([1, 7, 50], [0.0, 1.0, 4.0]))
def test_a_count_is_n_p_rounded_down_or_up(n: int, scale: float) -> None:
    for V in (3, 64, 1000):
        row = scale * torch.randn(V)
        counts = counts_of(on_a_grid(row, n, 500), V)
        expected = n * torch.softmax(row.double(), 0)
        slack = 1e-5 * n  # of float32 masses
        assert (counts >= (expected - slack).floor()).all()
        assert (counts <= (expected + slack).ceil()).all()


def test_rare_blocks_draw_all_of_their_tokens() -> None:
    """A block that is worth a few units of 2^-40 still tells its tokens apart."""
    row = torch.full((4 * BLOCK,), -torch.inf)
    row[0] = 0.0
    row[-BLOCK:] = -27.0 - torch.tensor(float(BLOCK)).log()  # 2 units of 2^-40, in all
    first = 1 - 2.0**-39  # about where the rare block begins, at the end
    numbers = torch.linspace(first, 1 - 2.0**-53, 2000, dtype=torch.float64)
    logits = row.expand(2000, -1)
    tokens = draw_tokens(logits, summarize(logits), numbers, 1)[:, 0]
    rare = tokens[tokens > 0]
    assert len(rare) > 1500
    shares = torch.bincount(rare - 3 * BLOCK, minlength=BLOCK) / len(rare)
    assert (shares - 1 / BLOCK).abs().max() < 0.2 / BLOCK


@pytest.mark.parametrize("V", [1, 5, 700])
def test_draws_ascend(V: int) -> None:
    draws = drawn(2 * torch.randn(200, V), 33)
    assert draws.shape == (200, 33)
    assert (draws.diff(dim=1) >= 0).all()


def test_an_exact_inverse_decides() -> None:
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log().expand(4, 3)
    numbers = torch.tensor([0.0, 0.49, 0.51, 1 - 2**-53], dtype=torch.float64)
    tokens = draw_tokens(logits, summarize(logits), numbers, 2)
    assert tokens.tolist() == [[0, 1], [0, 1], [1, 2], [1, 2]]


@pytest.mark.parametrize("V", [5, 130, 700])
def test_impossible_tokens_are_never_drawn(V: int) -> None:
    logits = torch.full((50, V), -torch.inf)
    logits[:, V // 2] = 0.0
    logits[:, V - 1] = -30.0
    assert set(drawn(logits, 200).flatten().tolist()) == {V // 2}
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64).repeat(25)
    assert draw_tokens(logits, summarize(logits), ends, 3).max() < V


def test_a_whole_vocabulary_of_equals_does_not_overflow() -> None:
    V, n = 2**18, 2**16
    logits, half = torch.zeros(1, V), torch.tensor([0.5], dtype=torch.float64)
    tokens = draw_tokens(logits, summarize(logits), half, n)[0]
    assert torch.equal(tokens, V // n * torch.arange(n) + V // n // 2)


def test_a_spoilt_row_draws_something_and_spoils_no_other() -> None:
    logits = torch.randn(3, 200)
    for bad in (torch.nan, torch.inf):
        spoilt = logits.clone()
        spoilt[1, 5] = bad
        draws = drawn(spoilt, 9)
        assert torch.equal(drawn(logits, 9)[::2], draws[::2])
        assert 0 <= draws.min() <= draws.max() < 200


@pytest.mark.parametrize("V", [1, 5, 700])
def test_comparing_finds_what_searching_does(V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 2 * torch.randn(200, V)
    expected = drawn(logits, 33)
    monkeypatch.setattr(Backend, "is_traced", True)
    assert torch.equal(drawn(logits, 33), expected)
