"""Losses from hidden states: values and gradients of the textbook, never all logits."""

import pytest
import torch
from covering import covering
from head_case import HEADS, learnable
from logit_losses import FROM_LOGITS
from teacher_targets import targets_of, with_junk
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import qat.kernels.head
from qat.kernels.head import Head
from qat.losses import from_hidden
from qat.losses.formulas import NO_LABEL, Targets, loss_from_logits, valid_rows
from qat.losses.from_hidden import loss_from_hidden

T, D, V, K = 13, 6, 19, 5
TERMS = {"tail": 1.0, "hard_ce": 0.25, "sampled": 0.5}


def parts(
    dtype: torch.dtype = torch.float64, kind: str = "plain", size: float = 1.0
) -> tuple[Tensor, Head, Tensor]:
    has_bias, softcap = HEADS[kind]
    hidden = (size * torch.randn(T, D)).to(dtype).requires_grad_()
    weight = torch.randn(V, D).to(dtype).requires_grad_()
    bias = torch.randn(V).to(dtype).requires_grad_() if has_bias else None
    return hidden, Head(weight, bias, softcap), 2 * torch.randn(T, V)


def textbook(hidden: Tensor, head: Head, targets: Targets, terms: dict[str, float], **kw) -> dict:
    return loss_from_logits(head.logits(hidden), targets, terms, **kw)


@pytest.mark.parametrize("terms", [*({name: 1.0} for name in FROM_LOGITS), TERMS], ids="+".join)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("top_k", [K, V])
def test_equals_the_textbook(terms: dict[str, float], kind: str, top_k: int) -> None:
    hidden, head, teacher = parts(kind=kind)
    targets = targets_of(teacher, top_k)
    expected = textbook(hidden, head, targets, terms, temperature=2.0)
    actual = loss_from_hidden(hidden, head, targets, terms, temperature=2.0)
    torch.testing.assert_close(actual, expected)
    wanted = learnable(hidden, head)
    found = torch.autograd.grad(3.0 * actual["loss"], wanted)
    torch.testing.assert_close(found, torch.autograd.grad(3.0 * expected["loss"], wanted))
    assert not any(actual[name].requires_grad for name in terms)


@pytest.mark.parametrize("size", [1, 4, 13])
def test_chunks_and_blocks_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, teacher = parts(kind="bias")
    targets = targets_of(teacher, K)
    expected = textbook(hidden, head, targets, TERMS)
    monkeypatch.setattr(from_hidden, "CHUNK_TOKENS", size)
    monkeypatch.setattr(qat.kernels.head, "BLOCK_TOKENS", 3)
    monkeypatch.setattr(qat.kernels.head, "BLOCK_WORDS", size)
    monkeypatch.setattr(qat.kernels.head, "HEAD_BLOCK_TOKENS", 2)
    actual = loss_from_hidden(hidden, head, targets, TERMS)
    torch.testing.assert_close(actual, expected)
    wanted = learnable(hidden, head)
    torch.testing.assert_close(
        torch.autograd.grad(actual["loss"], wanted), torch.autograd.grad(expected["loss"], wanted)
    )


@pytest.mark.parametrize("index", [0, 1, 2])
def test_each_gradient_may_be_wanted_alone(index: int) -> None:
    hidden, head, teacher = parts(kind="bias")
    targets = targets_of(teacher, K)
    wanted = learnable(hidden, head)
    expected = torch.autograd.grad(textbook(hidden, head, targets, TERMS)["loss"], wanted)[index]
    for other, tensor in enumerate(wanted):
        tensor.requires_grad_(other == index)
    loss_from_hidden(hidden, head, targets, TERMS)["loss"].backward()
    torch.testing.assert_close(wanted[index].grad, expected)
    assert all(tensor.grad is None for other, tensor in enumerate(wanted) if other != index)


class Shapes(TorchDispatchMode):
    """Notes the shape of whatever an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: PLR0917
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.seen.add(tuple(value.shape))
        return result


@pytest.mark.parametrize(("terms", "most_rows"), [(TERMS, 4), ({"candidates": 1.0}, 0)])
def test_all_logits_never_exist(terms: dict, most_rows: int, monkeypatch) -> None:
    hidden, head, teacher = parts()
    targets = targets_of(teacher, K)
    targets = targets._replace(
        sample_ids=targets.sample_ids[:, :3], sample_counts=targets.sample_counts[:, :3]
    )
    head.weight.requires_grad_(False)
    monkeypatch.setattr(qat.kernels.head, "BLOCK_TOKENS", 4)
    with Shapes() as shapes:
        loss_from_hidden(hidden, head, targets, terms)["loss"].backward()
    rows = [s[0] for s in shapes.seen if len(s) == 2 and s[1] >= V and s != (D, V)]
    assert max(rows, default=0) == most_rows
    assert not [s for s in shapes.seen if len(s) == 3], "no (T, N, D)"


def test_nothing_but_values_without_gradients() -> None:
    hidden, head, teacher = parts()
    targets = targets_of(teacher, K)
    expected = textbook(hidden, head, targets, TERMS)["loss"].item()
    with torch.no_grad(), Shapes() as shapes:
        loss = loss_from_hidden(hidden, head, targets, TERMS)["loss"]
    assert not loss.requires_grad and loss.item() == pytest.approx(expected)
    hidden, head = hidden.detach(), Head(head.weight.detach())
    with Shapes() as without_leaves:
        loss_from_hidden(hidden, head, targets, TERMS)
    assert shapes.seen == without_leaves.seen, "neither computes a gradient"


def test_absent_words_and_repeated_words() -> None:
    """A draw may be a top-k token and the label too; padding names any word at all."""
    hidden, head, teacher = parts()
    targets = targets_of(teacher, K)
    same = targets.topk_ids[:, :1]
    counts = torch.tensor([[3.0, 0.0, 2.0]]).expand(T, 3)
    targets = targets._replace(
        labels=same[:, 0],
        sample_ids=torch.cat([same, same + 10**6, (same + 1) % V], 1),
        sample_counts=counts.masked_fill(torch.arange(T)[:, None] == 0, 0.0),
    )
    legal = targets._replace(sample_ids=targets.sample_ids % V)
    expected = textbook(hidden, head, legal, TERMS)
    actual = loss_from_hidden(hidden, head, targets, TERMS)
    torch.testing.assert_close(actual, expected)
    wanted = learnable(hidden, head)
    torch.testing.assert_close(
        torch.autograd.grad(actual["loss"], wanted), torch.autograd.grad(expected["loss"], wanted)
    )


@pytest.mark.parametrize("name", FROM_LOGITS)
def test_padding_changes_nothing(name: str) -> None:
    for junk in (1e30, torch.inf, torch.nan):
        hidden, head, teacher = parts(torch.float32)
        clean = targets_of(teacher, K)
        rows = ~clean.mask
        dirty = with_junk(clean, junk)
        noisy = hidden.detach().masked_fill(rows[:, None], junk).requires_grad_()
        expected = loss_from_hidden(hidden, head, clean, {name: 1.0})["loss"]
        actual = loss_from_hidden(noisy, head, dirty, {name: 1.0})["loss"]
        assert torch.equal(actual, expected), junk
        found = torch.autograd.grad(actual, [noisy, head.weight])
        assert not found[0][rows].any(), junk
        for one, other in zip(
            found, torch.autograd.grad(expected, [hidden, head.weight]), strict=True
        ):
            assert torch.equal(one, other), junk


@pytest.mark.parametrize("mass", [1e-3, 1e-12, 1e-30])
def test_a_tiny_tail_of_the_student_keeps_its_gradient(mass: float) -> None:
    """Head words far below the chosen ones: nothing is a difference of nearly equal numbers."""
    levels = torch.tensor([2.0, 1.0] + [float(torch.tensor(mass).double().log())] * 6)
    weight = torch.stack([levels, torch.randn(8)], 1)
    hidden = torch.tensor([[1.0, 0.1]])
    targets = targets_of(torch.randn(1, 8, dtype=torch.float64) * 3, 2)
    targets = targets._replace(topk_ids=torch.tensor([[0, 1]]))
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaf = hidden.to(dtype).requires_grad_()
        loss = loss_from_hidden(leaf, Head(weight.to(dtype)), targets, {"tail": 1.0})["loss"]
        gradients += torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-5, atol=1e-7)
    assert gradients[1].abs().max() > 1e-3


@pytest.mark.parametrize("name", FROM_LOGITS)
def test_extreme_logits_stay_finite(name: str) -> None:
    hidden, head, teacher = parts(torch.float32, size=1e4)
    targets = targets_of(teacher, K)
    loss = loss_from_hidden(hidden, head, targets, {name: 1.0})["loss"]
    exact = textbook(hidden.double(), Head(head.weight.double()), targets, {name: 1.0})["loss"]
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, [hidden, head.weight]))


@pytest.mark.parametrize("rows", [0, 1])
def test_no_token_and_one_token(rows: int) -> None:
    hidden, head, teacher = parts()
    targets = Targets(*(value[:rows] for value in targets_of(teacher, K)))
    few = hidden.detach()[:rows].requires_grad_()
    actual = loss_from_hidden(few, head, targets, TERMS)
    torch.testing.assert_close(actual, textbook(few, head, targets, TERMS))
    actual["loss"].backward()
    assert few.grad.shape == few.shape and head.weight.grad.isfinite().all()


@pytest.mark.parametrize(("name", "dtype"), covering(FROM_LOGITS, [torch.bfloat16, torch.float16]))
def test_half_precision_errs_no_more_than_eager(name: str, dtype: torch.dtype) -> None:
    hidden, head, teacher = parts(dtype)
    targets = targets_of(teacher, K)
    gradients = []
    for function, to in (
        (loss_from_hidden, dtype),
        (textbook, dtype),
        (textbook, torch.float64),
    ):
        leaf, weight = (t.detach().to(to).requires_grad_() for t in (hidden, head.weight))
        loss = function(leaf, Head(weight), targets, {name: 1.0})["loss"]
        (loss / 3.0).backward()
        gradients.append((leaf.grad, weight.grad))
    for ours, eager, exact in zip(*gradients, strict=True):
        slack = 2.0**-9 * exact.abs().max().item()  # a last bit: so few numbers vary by luck
        assert_no_worse_than_eager(ours, eager, exact, slack)


def test_autocast_means_its_dtype_and_any_dtype_of_the_head() -> None:
    hidden, head, teacher = parts(torch.float32)
    targets = targets_of(teacher, K)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_from_hidden(hidden, head, targets, TERMS)["loss"]
    rounded = loss_from_hidden(hidden.bfloat16(), head, targets, TERMS)["loss"]
    assert loss.dtype == torch.float32 and torch.equal(loss, rounded)
    loss.backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.float32
    exact = loss_from_hidden(hidden, head, targets, TERMS)["loss"]
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)


def test_the_factor_of_backward_is_not_rounded() -> None:
    """1 / (number of tokens) has more digits than bfloat16, and float16 would lose it."""
    hidden, head, teacher = parts(torch.bfloat16)
    targets = targets_of(teacher, K)
    factor = 1.0 + 2.0**-8 - 2.0**-16  # just below the middle of two bfloat16 numbers
    (plain,) = torch.autograd.grad(loss_from_hidden(hidden, head, targets, TERMS)["loss"], hidden)
    loss = loss_from_hidden(hidden, head, targets, TERMS)["loss"] * factor
    (scaled,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(scaled, (plain.float() * factor).bfloat16())


def test_backward_runs_once() -> None:
    hidden, head, teacher = parts()
    loss = loss_from_hidden(hidden, head, targets_of(teacher, K), TERMS)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_masked_row_names_no_word_and_has_no_mass() -> None:
    targets = targets_of(torch.randn(8, V), 4)
    found, masked = valid_rows(targets), ~targets.mask
    assert masked.any() and (found.labels[masked] == NO_LABEL).all()
    for ids in (found.topk_ids, found.sample_ids):
        assert (ids[masked] == -1).all()
    for masses in (found.topk_logprobs, found.tail_logprob, found.sample_counts):
        assert not masses[masked].any()
    for field, ours, theirs in zip(Targets._fields, found, targets, strict=True):
        assert torch.equal(ours[~masked], theirs[~masked]), field
