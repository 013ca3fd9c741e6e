"""Losses from hidden states on CUDA, at the size of a real vocabulary. Run with `-m gpu`."""

import pytest
import torch
from gpu_case import no_synchronisation
from teacher_targets import targets_of
from three_way import assert_no_worse_than_eager
from torch import Tensor

from qat.kernels.head import Head
from qat.losses.config import ON_CACHE
from qat.losses.formulas import Targets, loss_from_logits
from qat.losses.from_hidden import loss_from_hidden

pytestmark = pytest.mark.gpu

V, D, K = 151_936, 1024, 64
GIB = 2**30


def case(T: int, dtype: torch.dtype, words: int = V) -> tuple[Tensor, Head, Targets]:
    """Logits of size 3, and a teacher whose likeliest words are the student's own or others."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(words, D, generator=generator) / D**0.5
    hidden = 3 * torch.randn(T, D, generator=generator)
    few = torch.randint(words, (T, 512), generator=generator)
    logits = torch.full((1, words), -4.0).expand(T, -1).clone()
    logits.scatter_(1, few, 3 * torch.randn(T, 512, generator=generator))
    logits = logits + 0.5 * hidden @ weight.T
    targets = Targets(*(value.cuda() for value in targets_of(logits, K, draws=20)))
    return hidden.to("cuda", dtype), Head(weight.to("cuda", dtype)), targets


@pytest.fixture(scope="module")
def thousand() -> tuple[Tensor, Head, Targets]:
    return case(1000, torch.bfloat16)


@pytest.mark.parametrize("name", ON_CACHE)
def test_bf16_errs_no_more_than_eager(name: str, thousand: tuple[Tensor, Head, Targets]) -> None:
    hidden, head, targets = thousand
    terms, found = {name: 1.0}, []
    for dtype, is_fused in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.double, False)):
        leaf, weight = hidden.to(dtype, copy=True).requires_grad_(), head.weight.to(dtype)
        if is_fused:
            loss = loss_from_hidden(leaf, Head(weight), targets, terms)["loss"]
        else:
            loss = loss_from_logits(leaf @ weight.T, targets, terms)["loss"]
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    for ours, eager, exact in zip(*found, strict=True):
        slack = 2.0**-9 * exact.double().abs().max().item()  # half a last bit of bfloat16
        assert_no_worse_than_eager(ours, eager, exact.double(), slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("words", [997, 32_001])
def test_odd_sizes_and_other_dtypes_equal_the_textbook(dtype: torch.dtype, words: int) -> None:
    hidden, head, targets = case(130, dtype, words)
    terms = {"tail": 1.0, "sampled": 0.5, "hard_ce": 0.1}
    weight = head.weight.detach().requires_grad_()
    leaf = hidden.requires_grad_()
    loss = loss_from_hidden(leaf, Head(weight), targets, terms)["loss"]
    found = torch.autograd.grad(loss, [leaf, weight])
    exact_leaf, exact_weight = (t.detach().double().requires_grad_() for t in (leaf, weight))
    exact = loss_from_logits(exact_leaf @ exact_weight.T, targets, terms)["loss"]
    torch.testing.assert_close(loss.double(), exact, rtol=1e-4, atol=1e-3)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    for one, other in zip(
        found, torch.autograd.grad(exact, [exact_leaf, exact_weight]), strict=True
    ):
        worst = (one.double() - other).abs().max() / other.abs().max()
        assert worst < tolerance


@pytest.mark.parametrize(
    "terms", [{"tail": 1.0, "sampled": 0.1}, {"candidates": 1.0}], ids="+".join
)
def test_never_waits_and_takes_less_than_a_gib(
    terms: dict[str, float], thousand: tuple[Tensor, Head, Targets]
) -> None:
    hidden, head, targets = thousand
    hidden = hidden.repeat(9, 1)[:8192].requires_grad_()
    targets = Targets(*(value.repeat(9, *(1,) * (value.dim() - 1))[:8192] for value in targets))
    for _ in range(2):  # the first compiles
        hidden.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with no_synchronisation():
            loss_from_hidden(hidden, head, targets, terms)["loss"].backward()
    assert torch.cuda.max_memory_allocated() - before < GIB


def test_a_cuda_graph_replays_it(thousand: tuple[Tensor, Head, Targets]) -> None:
    hidden, head, targets = thousand
    leaf = hidden.clone().requires_grad_()
    leaf.grad = torch.zeros_like(leaf)
    terms = {"tail": 1.0, "hard_ce": 0.1}

    def run() -> Tensor:
        loss = loss_from_hidden(leaf, head, targets, terms)["loss"]
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    leaf.data.copy_(hidden.roll(1, 0))
    leaf.grad.zero_()
    graph.replay()
    replayed, gradient = captured.clone(), leaf.grad.clone()
    leaf.grad = None
    torch.testing.assert_close(run(), replayed)
    torch.testing.assert_close(leaf.grad, gradient)


def test_softcap_on_the_gpu_equals_the_cpu() -> None:
    hidden, head, targets = case(64, torch.float32, 4000)
    head = head._replace(bias=torch.randn(4000, device="cuda"), softcap=5.0)
    results = []
    for device in ("cuda", "cpu"):
        leaf = hidden.to(device).detach().requires_grad_()
        there = Head(head.weight.to(device), head.bias.to(device), head.softcap)
        rows = Targets(*(value.to(device) for value in targets))
        loss = loss_from_hidden(leaf, there, rows, {"tail": 1.0})["loss"]
        loss.backward()
        results.append((loss.detach().cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("words", [997, 32_001])
@torch.no_grad()
def test_exact_logits_round_no_product(dtype: torch.dtype, words: int) -> None:
    hidden, head, _ = case(130, dtype, words)
    exact = Head(head.weight.double(), softcap=30.0).logits(hidden.double())
    with no_synchronisation():
        found = head._replace(softcap=30.0).exact_logits(hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
