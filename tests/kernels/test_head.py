"""The head's plain functions against the textbook over all logits."""

import pytest
import torch
from head_case import HEADS, head_case

import qat.kernels.head as head_kernels
from qat.kernels.head import (
    Head,
    HeadSums,
    LogitGradients,
    add_gradients,
    before_softcap,
    chosen_logits,
    hidden_gradient,
    named_words,
    other_words,
)


@pytest.mark.parametrize("kind", HEADS)
def test_chosen_and_others_equal_the_textbook(kind: str) -> None:
    case = head_case(kind)
    chosen = chosen_logits(case.hidden, case.head, case.ids)
    torch.testing.assert_close(chosen, case.textbook_chosen())
    others = other_words(case.hidden, case.head, case.excluded, want_slope=True)
    lse = case.textbook_lse()
    torch.testing.assert_close(others.lse, lse)
    (slope,) = torch.autograd.grad(lse[lse.isfinite()].sum(), case.hidden)
    torch.testing.assert_close(others.slope, slope)
    only = other_words(case.hidden, case.head, case.excluded, want_slope=False)
    assert only.slope is None and torch.equal(only.lse, others.lse)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_logits_of_halves_are_no_halves(kind: str, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(head_kernels, "BLOCK_WORDS", 7)  # pieces, the last one narrower
    case = head_case(kind)
    head = Head(*(part.detach().to(dtype) for part in case.head[:2] if part is not None))
    head = head._replace(softcap=case.head.softcap)
    hidden = case.hidden.detach().to(dtype)
    exact = head._replace(weight=head.weight.double()).logits(hidden.double())
    found = head.exact_logits(hidden[None])[0]
    assert found.dtype == torch.float32 and found.shape == exact.shape
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)
    assert not torch.equal(head.logits(hidden).float(), found)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("reads_others", [True, False])
def test_gradients_equal_the_textbook(kind: str, reads_others: bool, monkeypatch) -> None:
    monkeypatch.setattr(head_kernels, "BLOCK_WORDS", 7)  # tiles, the last one narrower
    monkeypatch.setattr(head_kernels, "BLOCK_TOKENS", 2)
    case = head_case(kind)
    g_chosen = torch.randn(case.ids.shape, dtype=torch.float64)
    g_others = torch.randn(len(case.hidden), dtype=torch.float64)
    chosen, lse = case.textbook_chosen(), case.textbook_lse()
    loss = (g_chosen * chosen).sum()
    if reads_others:
        loss = loss + (g_others * lse)[lse.isfinite()].sum()
    others = other_words(case.hidden, case.head, case.excluded, want_slope=True)
    raw = before_softcap(g_chosen, chosen, case.head.softcap)
    rest = (others.lse, g_others) if reads_others else ()
    g_logits = LogitGradients(case.ids, raw, case.excluded.shape[1], *rest)

    out = torch.full_like(case.hidden, torch.nan)
    hidden_gradient(g_logits, others.slope if reads_others else None, case.head.weight, out=out)
    sums, half = HeadSums(case.head), len(case.hidden) // 2
    of_hidden = torch.full_like(out, torch.nan)
    for rows in (slice(half), slice(half, None)):
        states, block = case.hidden.detach()[rows], [t[rows] for t in (case.ids, raw, *rest)]
        kept = other_words(states, case.head, case.excluded[rows], keep=reads_others)
        block = LogitGradients(*block[:2], case.excluded.shape[1], *block[2:])
        add_gradients(states, case.head, block, kept, sums, out=of_hidden[rows])
    torch.testing.assert_close(of_hidden, out)
    expected = torch.autograd.grad(loss, case.leaves())
    found = [t for t in (out, sums.weight, sums.bias) if t is not None]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other)


def test_words_are_named_whatever_repeats_or_is_absent() -> None:
    ids = torch.tensor([[3, -1, 0], [3, -100, 4]])
    assert named_words(ids, 6).tolist() == [1, 0, 0, 1, 1, 0]
