"""The Triton kernels (interpreted without a GPU) against the plain-PyTorch reference."""

import pytest
import torch
from covering import covering
from topk_case import SHAPES, assert_accurate, difficult_logits, textbook_top_k

pytest.importorskip("triton")

from qat.kernels import topk

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real ones")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("V", "dtype"), covering([1, 63, 64, 700, 4100], DTYPES))
def test_summaries_equal_the_reference(V: int, dtype: torch.dtype) -> None:
    logits = difficult_logits(V, dtype)
    found, expected = topk.summarize_by_kernel(logits), topk.summarize(logits)
    assert torch.equal(found.peaks, expected.peaks)
    torch.testing.assert_close(found.sums, expected.sums, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("shape", "dtype"), covering(SHAPES, DTYPES))
def test_selection_equals_the_reference_and_the_textbook(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    V, k = shape
    logits = difficult_logits(V, dtype)
    blocks = topk.summarize_by_kernel(logits)
    assert topk.can_select(k, blocks)
    found = topk.select_by_kernel(logits, k, blocks)
    expected = topk.top_k_of_logits(logits, k)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.values, expected.values)
    _, _, total, tail = textbook_top_k(logits, k)
    assert_accurate(found.log_sum_exp, total)
    assert_accurate(found.tail_logprob, tail)


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(4, 1000)
    logits = wide[:, 8:708]
    found = topk.select_by_kernel(logits, 6, topk.summarize_by_kernel(logits))
    assert torch.equal(found.ids, topk.top_k_of_logits(logits.contiguous(), 6).ids)


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's numpy at inf - inf
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_a_bad_logit_spoils_its_row_alone_and_no_memory(bad: float) -> None:
    logits = torch.randn(3, 700)
    logits[1, 70] = bad
    found = topk.select_by_kernel(logits, 5, topk.summarize_by_kernel(logits))
    assert found.log_sum_exp.isfinite().tolist() == [True, False, True]
    assert torch.equal(found.ids[::2], topk.top_k_of_logits(logits, 5).ids[::2])


def test_more_tokens_than_blocks_are_left_to_the_reference() -> None:
    blocks = topk.summarize_by_kernel(torch.randn(1, 640))
    assert topk.can_select(10, blocks)
    assert not topk.can_select(11, blocks)
    many = topk.Blocks(torch.zeros(1, 2000), torch.ones(1, 2000))
    assert not topk.can_select(topk.MAX_K + 1, many)
