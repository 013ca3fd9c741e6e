"""The top K, its ties and its tail, against the textbook."""

import pytest
import torch
from covering import covering
from topk_case import SHAPES, assert_accurate, difficult_logits, textbook_top_k

from qat.kernels.topk import log_sum_exp, summarize, top_k_of_logits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    covering([*SHAPES, (100, 100), (1, 1), (5, 2), (700, 699), (64, 64)], DTYPES),
)
def test_top_k_is_the_textbooks(shape: tuple[int, int], dtype: torch.dtype) -> None:
    V, k = shape
    logits = difficult_logits(V, dtype)
    found = top_k_of_logits(logits, k)
    values, ids, total, tail = textbook_top_k(logits, k)
    assert torch.equal(found.ids, ids)
    assert torch.equal(found.values.double(), values)
    assert_accurate(found.log_sum_exp, total)
    assert_accurate(found.tail_logprob, tail)
    assert_accurate(log_sum_exp(summarize(logits)), total)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_spoils_the_log_sum_exp_of_its_row_alone(bad: float) -> None:
    logits = torch.randn(3, 200)
    logits[1, 70] = bad
    for k in (1, 3, 200):
        found = top_k_of_logits(logits, k)
        assert found.log_sum_exp.isfinite().tolist() == [True, False, True]
        assert 0 <= found.ids.min() <= found.ids.max() < 256


def test_a_row_of_impossible_tokens_has_no_finite_log_sum_exp() -> None:
    assert not top_k_of_logits(torch.full((1, 70), -torch.inf), 2).log_sum_exp.isfinite()
