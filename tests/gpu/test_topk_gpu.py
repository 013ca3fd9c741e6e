"""Top K and draws on CUDA: the CPU's answers, at Qwen3's vocabulary, without a host wait."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from cache_case import build, contents, teacher
from gpu_case import no_synchronisation
from topk_case import SHAPES, assert_accurate, difficult_logits, textbook_top_k
from torch import Tensor

from qat.data.codec import Request, ask, uniforms
from qat.kernels import topk
from qat.kernels.draw import draw_tokens
from qat.models.language_model import LanguageModel

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCAB = 151_936


class Table:
    """A teacher whose hidden states are a table's rows."""

    def __init__(self, vocab_size: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.table = torch.randn(50, 32, device=self.device, dtype=torch.bfloat16)
        self.head = torch.randn(vocab_size, 32, device=self.device, dtype=torch.bfloat16)

    def hidden_of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        return (self.table[ids] + positions[..., None] for ids, positions in batches)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("V", "k"), [*SHAPES, (100, 100), (VOCAB, 64), (VOCAB, 500)])
def test_ids_are_the_cpus_whatever_ties(V: int, k: int, dtype: torch.dtype) -> None:
    logits = difficult_logits(V, dtype)
    found = topk.top_k_of_logits(logits.cuda(), k)
    expected = topk.top_k_of_logits(logits, k)
    assert torch.equal(found.ids.cpu(), expected.ids)
    assert torch.equal(found.values.cpu(), expected.values)
    _, _, total, tail = textbook_top_k(logits, k)
    assert_accurate(found.log_sum_exp.cpu(), total)
    assert_accurate(found.tail_logprob.cpu(), tail)


def test_many_rows_of_a_large_vocabulary_equal_the_reference() -> None:
    logits = (3 * torch.randn(500, VOCAB, device="cuda")).bfloat16()
    found = topk.top_k_of_logits(logits, 64)
    for rows in range(0, 500, 50):
        part = slice(rows, rows + 50)
        values, ids, total, tail = textbook_top_k(logits[part], 64)
        assert torch.equal(found.ids[part], ids)
        assert torch.equal(found.values[part].double(), values)
        assert_accurate(found.log_sum_exp[part], total)
        assert_accurate(found.tail_logprob[part], tail)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_logit_spoils_its_row_alone(bad: float) -> None:
    logits = torch.randn(40, VOCAB, device="cuda")
    logits[7, 1234] = bad
    is_sound = topk.top_k_of_logits(logits, 64).log_sum_exp.isfinite()
    assert is_sound.tolist() == [row != 7 for row in range(40)]


def test_draws_are_the_cpus_but_for_rounding() -> None:
    logits = 3 * torch.randn(60, VOCAB)
    numbers = uniforms(1, torch.arange(60), 1)[:, 0]
    assert torch.equal(uniforms(1, torch.arange(60, device="cuda"), 1)[:, 0].cpu(), numbers)
    here = draw_tokens(logits, topk.summarize(logits), numbers, 50)
    logits, numbers = logits.cuda(), numbers.cuda()
    there = draw_tokens(logits, topk.summarize(logits), numbers, 50).cpu()
    assert (here == there).float().mean() > 0.999


def test_asking_never_waits_for_the_device() -> None:
    model = Table(5000)
    tokens = torch.randint(0, 50, (16, 32))
    positions = torch.arange(32).expand(16, 32).contiguous()
    with no_synchronisation():
        for top_k, draws in ((64, 0), (0, 20), (8, 20)):
            request = Request(top_k, draws, chunk=128, stream=3)
            for _ in range(2):
                batch = tokens.cuda(non_blocking=True), positions.cuda(non_blocking=True)
                (hidden,) = model.hidden_of([batch])
                signals = ask(model, hidden, tokens, request=request, first_place=0)
    assert bool(signals.is_sound)


def test_builds_on_cuda_are_equal_byte_for_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        model = LanguageModel(teacher().model.cuda())
        build(tmp_path / name, teacher=model, batch_size=0)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
