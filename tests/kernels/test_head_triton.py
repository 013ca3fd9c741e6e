"""The head's Triton functions against float64, in the interpreter."""

from collections.abc import Iterator

import pytest
import torch
from covering import covering
from head_case import HEADS, HeadCase, head_case
from teacher_targets import targets_of
from three_way import assert_no_worse_than_eager
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the kernels are tested on the GPU itself", allow_module_level=True)

from qat.kernels import head as kernels
from qat.kernels.dispatch import computing_by
from qat.kernels.head import Head, LogitGradients
from qat.losses.formulas import loss_from_logits
from qat.losses.from_hidden import loss_from_hidden

SHAPES = {
    "odd": dict(T=5, D=70, V=301, N=21, K=18),
    "even": dict(T=4, D=256, V=256, N=16, K=16),
    "wide": dict(T=3, D=1100, V=140, N=4, K=0),
    "one": dict(T=1, D=3, V=2, N=1, K=1),
    "all": dict(T=3, D=8, V=37, N=40, K=37),
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "TILE_TOKENS", 2)
    monkeypatch.setattr(kernels, "TILE_WORDS", 128)
    monkeypatch.setattr(kernels, "KEPT_WORDS", 128)
    monkeypatch.setattr(kernels, "FEWEST_KEPT", 2)
    with computing_by(kernel=True):  # float64 is left to plain PyTorch
        yield


@pytest.fixture(scope="module", autouse=True)
def _wide_products_on_the_cpu() -> Iterator[None]:
    """PyTorch multiplies half-precision matrices into float32 ones on GPUs alone."""
    library = torch.library.Library("aten", "IMPL")

    def mm(a: Tensor, b: Tensor, _dtype: torch.dtype, *, out: Tensor) -> Tensor:
        return out.copy_(a.float() @ b.float())

    def addmm(c: Tensor, a: Tensor, b: Tensor, _dtype: torch.dtype, *, out: Tensor) -> Tensor:
        return out.copy_(c + a.float() @ b.float())

    library.impl("mm.dtype_out", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    yield
    library._destroy()


def exact_slope(case: HeadCase) -> Tensor:
    lse = case.textbook_lse()
    return torch.autograd.grad(lse[lse.isfinite()].sum(), case.hidden, allow_unused=True)[0]


@pytest.mark.parametrize(
    ("shape", "kind"), [*covering(SHAPES, HEADS), ("odd", "bias"), ("odd", "softcap")]
)
def test_float32_equals_the_textbook(shape: str, kind: str) -> None:
    exact = head_case(kind, **SHAPES[shape])
    case = exact.to(torch.float32)
    hidden, head = case.hidden.detach(), Head(*(detached(t) for t in case.head))
    chosen = kernels.chosen_logits(hidden, head, case.ids)
    torch.testing.assert_close(chosen.double(), exact.textbook_chosen(), rtol=1e-5, atol=1e-4)
    others = kernels.other_words(hidden, head, case.excluded, want_slope=True)
    torch.testing.assert_close(others.lse.double(), exact.textbook_lse(), rtol=1e-5, atol=1e-4)
    slope = torch.zeros_like(exact.hidden) if shape == "all" else exact_slope(exact)
    torch.testing.assert_close(others.slope.double(), slope, rtol=1e-4, atol=1e-4)
    only = kernels.other_words(hidden, head, case.excluded, want_slope=False)
    assert only.slope is None and torch.equal(only.lse, others.lse)


def detached(value: Tensor | float | None) -> Tensor | float | None:
    return value.detach() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_eager(dtype: torch.dtype) -> None:
    case = head_case("plain", T=9, D=70, V=301, N=21, K=18).to(dtype)
    exact = case.to(torch.float64)
    hidden, head = case.hidden.detach(), Head(case.head.weight.detach())
    others = kernels.other_words(hidden, head, case.excluded, want_slope=True)
    eager = case.textbook_lse()
    (eager_slope,) = torch.autograd.grad(eager.sum(), case.hidden)
    assert_no_worse_than_eager(others.lse, eager, exact.textbook_lse())
    assert_no_worse_than_eager(others.slope, eager_slope, exact_slope(exact))
    chosen = kernels.chosen_logits(hidden, head, case.ids)
    assert_no_worse_than_eager(chosen, case.textbook_chosen(), exact.textbook_chosen())


@pytest.mark.parametrize("direction", [1.0, -1.0])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_the_peak_may_move_at_every_tile_or_never(direction: float, size: float) -> None:
    """Logits that climb (or fall) by hundreds of nats from the first word to the last."""
    V, D = 600, 5
    weight = torch.randn(V, D) * 0.01
    weight[:, 0] = direction * torch.linspace(-0.05, 0.05, V)
    hidden = torch.randn(4, D)
    hidden[:, 0] = size * torch.tensor([1.0, -1.0, 0.5, 0.0])
    excluded = torch.tensor([[599, 0], [0, 1], [-1, 300], [5, 7]])
    head = Head(weight)
    others = kernels.other_words(hidden, head, excluded, want_slope=True)
    expected = kernels.other_words(
        hidden.double(), Head(weight.double()), excluded, want_slope=True
    )
    torch.testing.assert_close(others.lse.double(), expected.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(others.slope.double(), expected.slope, rtol=1e-4, atol=1e-5)


def test_mass_of_the_others_may_be_tiny() -> None:
    """Far below the chosen words, their own log-sum-exp and slope stay exact."""
    case = head_case("plain", T=3, D=16, V=300, N=2, K=2)
    weight = case.head.weight.detach().clone()
    weight[:, 0] = -400.0
    weight.scatter_(0, case.ids[:1].flatten()[:, None].expand(-1, 16), 0.0)
    hidden = case.hidden.detach().clone()
    hidden[:, 0] = 1.0
    excluded = case.ids[:1].expand(3, 2)
    expected = kernels.other_words(hidden, Head(weight), excluded, want_slope=True)
    others = kernels.other_words(hidden.float(), Head(weight.float()), excluded, want_slope=True)
    assert expected.lse.max() < -380
    torch.testing.assert_close(others.lse.double(), expected.lse, rtol=1e-6, atol=0)
    torch.testing.assert_close(others.slope.double(), expected.slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "out_dtype", "reads_others"),
    covering(SHAPES, [torch.float32, torch.bfloat16], [True, False]),
)
def test_hidden_gradient(shape: str, out_dtype: torch.dtype, reads_others: bool) -> None:
    case = head_case("plain", **SHAPES[shape]).to(torch.float32)
    T, D = case.hidden.shape
    rest = (torch.randn(T), torch.randn(T, 3)[:, 1]) if reads_others else ()
    g_logits = LogitGradients(case.ids, torch.randn(case.ids.shape), 0, *rest)
    slope = torch.randn(T, D) if reads_others else None
    found, expected = torch.full((2, T, D), torch.nan, dtype=out_dtype)
    weight = case.head.weight.detach().bfloat16()
    kernels.hidden_gradient(g_logits, slope, weight, out=found)
    with computing_by(kernel=False):
        kernels.hidden_gradient(g_logits, slope, weight, out=expected)
    torch.testing.assert_close(found, expected)


def test_a_head_of_another_dtype_is_cast_tile_by_tile() -> None:
    case = head_case("bias", **SHAPES["odd"]).to(torch.float32)
    hidden, head = case.hidden.detach().bfloat16(), Head(*(detached(t) for t in case.head))
    cast = Head(head.weight.bfloat16(), head.bias)
    one, other = (
        kernels.other_words(hidden, each, case.excluded, want_slope=True) for each in (head, cast)
    )
    assert torch.equal(one.lse, other.lse) and torch.equal(one.slope, other.slope)


def test_no_token() -> None:
    case = head_case("plain").to(torch.float32)
    none, head = case.hidden.detach()[:0], Head(case.head.weight.detach())
    others = kernels.other_words(none, head, case.excluded[:0], want_slope=True)
    assert others.lse.shape == (0,) and others.slope.shape == none.shape
    assert kernels.chosen_logits(none, head, case.ids[:0]).shape == (0, 5)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    "terms", [{"tail": 1.0, "sampled": 0.5}, {"candidates": 1.0}], ids="+".join
)
def test_losses_and_all_gradients(kind: str, terms: dict[str, float]) -> None:
    case = head_case(kind, D=40, V=300).to(torch.float32)
    targets = targets_of(2 * torch.randn(len(case.hidden), 300), 5)
    found = loss_from_hidden(case.hidden, case.head, targets, terms, temperature=2.0)
    logits = case.head.logits(case.hidden)
    expected = loss_from_logits(logits, targets, terms, temperature=2.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    pairs = (torch.autograd.grad(x["loss"], case.leaves()) for x in (found, expected))
    torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "kind", "reads_others"),
    [*covering(SHAPES, HEADS, [True, False]), ("odd", "softcap", True), ("all", "bias", True)],
)
def test_head_gradient(shape: str, kind: str, reads_others: bool) -> None:
    exact = head_case(kind, **SHAPES[shape])
    T, N = exact.ids.shape
    ids = torch.where(torch.arange(N) == N - 1, exact.ids[:, :1], exact.ids)  # a word named twice
    lse = kernels.other_words(exact.hidden, exact.head, exact.excluded, want_slope=False).lse
    rest = (lse.detach(), torch.randn(T, 3, dtype=torch.float64)[:, 1]) if reads_others else ()
    g_chosen = torch.randn(T, N, dtype=torch.float64)
    wide = LogitGradients(ids, g_chosen, exact.excluded.shape[1], *rest)
    narrow = LogitGradients(*(t.float() if _is_float(t) else t for t in wide))
    found, of_hidden = _gradients(exact.to(torch.float32), narrow)
    expected, wished_hidden = _gradients(exact, wide)
    torch.testing.assert_close(of_hidden.double(), wished_hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.weight.double(), expected.weight, rtol=1e-4, atol=1e-4)
    if expected.bias is not None:
        torch.testing.assert_close(found.bias.double(), expected.bias, rtol=1e-4, atol=1e-4)
    half = exact.to(torch.bfloat16)
    with computing_by(kernel=False):
        ways = [_gradients(half, narrow), _gradients(half.to(torch.float64), wide)]
    ways = [_gradients(half, narrow), *ways]  # kernel, eager, truth
    joined = [sums.weight for sums, _ in ways]
    # a word that is named but not excluded is rounded once before what names it is added
    rounding = torch.finfo(torch.bfloat16).eps * joined[-1].abs().max().item()
    assert_no_worse_than_eager(*joined, slack=rounding)
    of_hidden = [hidden for _, hidden in ways]
    rounding = torch.finfo(torch.bfloat16).eps * of_hidden[-1].abs().max().item()
    assert_no_worse_than_eager(*of_hidden, slack=rounding)


def _gradients(case: HeadCase, g_logits: LogitGradients) -> tuple[kernels.HeadSums, Tensor]:
    """Return the gradient of the head, and that of the hidden states."""
    head = Head(*(detached(t) for t in case.head))
    hidden, sums = case.hidden.detach(), kernels.HeadSums(head)
    out = torch.full_like(hidden, torch.nan)
    reads_others = g_logits.lse is not None
    others = kernels.other_words(hidden, head, case.excluded, keep=reads_others)
    kernels.add_gradients(hidden, head, g_logits, others, sums, out=out)
    return sums, out


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
