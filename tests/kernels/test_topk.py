"""The top K, its ties and its tail, against the textbook; by plain PyTorch and by the kernels."""

from collections.abc import Iterator

import pytest
import torch
from covering import covering
from topk_case import SHAPES, assert_accurate, difficult_logits, textbook_top_k

from qat.kernels import topk
from qat.kernels.dispatch import computing_by
from qat.kernels.topk import log_sum_exp, summarize, top_k_of_logits

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # interpreted inf - inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _way(is_kernel: bool) -> Iterator[None]:
    with computing_by(kernel=is_kernel):
        yield


@pytest.mark.parametrize(
    ("shape", "dtype"),
    covering([*SHAPES, (100, 100), (1, 1), (5, 2), (700, 699), (64, 64), (63, 1)], DTYPES),
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


def test_rows_may_lie_apart() -> None:
    logits = torch.randn(4, 1000)[:, 8:708]
    assert torch.equal(top_k_of_logits(logits, 6).ids, logits.topk(6).indices)


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_a_bad_logit_spoils_the_log_sum_exp_of_its_row_alone(bad: float, is_kernel: bool) -> None:
    logits = torch.randn(3, 700)
    logits[1, 70] = bad
    for k in (1, 5, 700):
        found = top_k_of_logits(logits, k)
        assert found.log_sum_exp.isfinite().tolist() == [True, False, True]
        assert torch.equal(found.ids[::2], logits[::2].topk(k).indices)
        assert is_kernel or 0 <= found.ids.min() <= found.ids.max() < 704


def test_a_row_of_impossible_tokens_has_no_finite_log_sum_exp() -> None:
    assert not top_k_of_logits(torch.full((1, 70), -torch.inf), 2).log_sum_exp.isfinite()


@pytest.mark.parametrize(("V", "k"), [(640, 11), (64 * (topk.MAX_K + 1), topk.MAX_K + 1)])
def test_more_tokens_than_a_kernel_holds_are_left_to_plain_pytorch(
    V: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk, "_select_by_kernel", None)
    logits = torch.randn(1, V)
    assert torch.equal(top_k_of_logits(logits, k).ids, logits.topk(k).indices)
