"""The head's plain functions against the textbook over all logits."""

import pytest
import torch
from head_case import HEADS, head_case

import qat.kernels.head as head_kernels
from qat.kernels.head import (
    Head,
    LogitGradients,
    before_softcap,
    chosen_logits,
    head_gradient,
    hidden_gradient,
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
    half = len(case.hidden) // 2
    parts = [
        (case.hidden.detach()[rows], g_logits.of_rows(rows))
        for rows in (slice(half), slice(half, None))
    ]
    of_hidden = [torch.full_like(hidden, torch.nan) for hidden, _ in parts]
    tiles = [*head_gradient(case.head, parts, of_hidden)]
    torch.testing.assert_close(torch.cat(of_hidden), out.detach())
    assert [tile.start for tile in tiles] == [*range(0, len(case.head.weight), 7)]
    named = torch.cat([tile.is_named for tile in tiles]).nonzero().flatten()
    assert {*named.tolist()} == {*case.ids[case.ids >= 0].tolist()}
    weight = torch.cat([tile.weight for tile in tiles])
    bias = None if case.head.bias is None else torch.cat([tile.bias for tile in tiles])
    expected = torch.autograd.grad(loss, case.leaves())
    found = [t for t in (out, weight, bias) if t is not None]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other)
