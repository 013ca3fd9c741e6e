"""Tokens by one random number each: as the distribution says, by the kernel and without it."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.decode.kernels import draw_next as module
from qat.extensions.decode.kernels.draw_next import draw_next
from qat.kernels.dispatch import computing_by


@pytest.fixture(autouse=True)
def _several_blocks_to_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(module, "NUCLEUS_BLOCK", 64)


def textbook(logits: Tensor, uniforms: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw row by row in float64: keep the likeliest tokens that hold `top_p`, then invert."""
    drawn = []
    for row, u in zip(logits.double(), uniforms.double(), strict=True):
        probs = F.softmax(row / temperature, -1)
        kept, held = set(), 0.0
        for token in probs.argsort(descending=True).tolist():
            if held >= top_p:
                break
            kept.add(token)
            held += probs[token].item()
        probs[[token not in kept for token in range(len(probs))]] = 0
        sums = probs.cumsum(0)
        drawn.append(int((sums <= u * sums[-1]).sum()))
    return torch.tensor(drawn)


@pytest.mark.parametrize(
    ("temperature", "top_p", "V"),
    [(1.0, 1.0, 50), (3.0, 1.0, 333), (1.0, 0.9, 333), (0.6, 0.3, 50), (1.0, 1e-4, 333)],
)
def test_draws_are_the_textbooks(V: int, temperature: float, top_p: float, is_kernel: bool) -> None:
    generator = torch.Generator().manual_seed(V)
    logits = 3 * torch.randn(12, V, generator=generator)
    uniforms = torch.rand(12, generator=generator)
    expected = textbook(logits, uniforms, temperature, top_p)
    with computing_by(kernel=is_kernel):
        found = draw_next(logits, uniforms, temperature=temperature, top_p=top_p)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


@pytest.mark.parametrize("room", [1, 100, 1000])
def test_a_nucleus_is_the_same_with_any_room(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of few likely words and of many, of which a room of 100 holds those of the former."""
    monkeypatch.setattr(module, "ROOM", room)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 700, generator=generator)
    logits[::2] *= 12
    least = (logits - logits.logsumexp(-1, keepdim=True)) >= math.log(0.2 / 700)
    assert least[::2].sum(1).max() < 100 < least[1::2].sum(1).min()
    uniforms = torch.rand(8, generator=generator)
    expected = textbook(logits, uniforms, 1.0, 0.8)
    with computing_by(kernel=True):
        assert torch.equal(draw_next(logits, uniforms, top_p=0.8), expected)


def test_the_edges_of_the_random_number(is_kernel: bool) -> None:
    """The first token that can be drawn, and the last; none of no mass."""
    logits = torch.full((2, 200), -torch.inf)
    logits[:, [3, 70, 150]] = torch.tensor([0.0, 1.0, -1.0])
    uniforms = torch.tensor([0.0, 1 - 2.0**-24])
    with computing_by(kernel=is_kernel):
        assert draw_next(logits, uniforms).tolist() == [3, 150]
        assert draw_next(logits, uniforms, top_p=0.6).tolist() == [70, 70]
        assert draw_next(logits, uniforms, temperature=0).tolist() == [70, 70]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of NaN
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_row_that_is_no_distribution_draws_a_token(is_kernel: bool, top_p: float) -> None:
    """Not memory that nothing was written to, nor the token behind the last one."""
    logits = torch.zeros(5, 70)
    logits[0], logits[1] = torch.nan, -torch.inf
    logits[2, 3], logits[3, :60], logits[4, 69] = torch.nan, torch.nan, torch.inf
    torch.use_deterministic_algorithms(True)  # fills new tensors with numbers too large
    try:
        with computing_by(kernel=is_kernel):
            found = draw_next(logits, torch.full((5,), 0.5), top_p=top_p)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ((found >= 0) & (found < 70)).all()


def test_layout_changes_nothing(is_kernel: bool) -> None:
    logits, uniforms = torch.randn(70, 3).T, torch.rand(3, 4)[:, 1]
    expected = textbook(logits, uniforms, 1.0, 0.9)
    with computing_by(kernel=is_kernel):
        assert torch.equal(draw_next(logits, uniforms, top_p=0.9), expected)
        assert draw_next(logits[:0], uniforms[:0], top_p=0.9).shape == (0,)
