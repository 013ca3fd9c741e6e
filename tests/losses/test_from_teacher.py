"""Losses against a whole teacher: the textbook over all words, never all logits at once."""

import pytest
import torch
from covering import covering
from head_case import HEADS, learnable
from teacher_targets import targets_of
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from qat.kernels.head import Head
from qat.losses import from_teacher
from qat.losses.config import WITH_TEACHER
from qat.losses.formulas import loss_from_logits
from qat.losses.from_teacher import OnlineTargets, loss_from_teacher

T, D, E, V = 13, 6, 7, 19
TERMS = {"kl": 1.0, "hard_ce": 0.25, "jsd": 0.5}


def head_of(width: int, dtype: torch.dtype, kind: str) -> Head:
    has_bias, softcap = HEADS[kind]
    bias = torch.randn(V).to(dtype).requires_grad_() if has_bias else None
    return Head(torch.randn(V, width).to(dtype).requires_grad_(), bias, softcap)


def parts(
    dtype: torch.dtype = torch.float64, kind: str = "plain"
) -> tuple[Tensor, Head, OnlineTargets]:
    """A student, and a teacher of another width, with every kind of row."""
    words = targets_of(torch.randn(T, V), 1)
    teacher = torch.randn(T, E).to(dtype).requires_grad_()
    targets = OnlineTargets(words.mask, words.labels, teacher, head_of(E, dtype, kind))
    return torch.randn(T, D).to(dtype).requires_grad_(), head_of(D, dtype, kind), targets


def textbook(hidden: Tensor, head: Head, targets: OnlineTargets, terms: dict, **kw) -> dict:
    """Return the losses of a cache of all words; its `tail` is `kl` here."""
    logits = targets.head.logits(targets.hidden).detach()
    log_p, ids = logits.double().log_softmax(1).sort(descending=True)
    cached = targets_of(logits, V)._replace(topk_logprobs=log_p, topk_ids=ids)
    names = {"tail" if name == "kl" else name: weight for name, weight in terms.items()}
    cached = cached._replace(mask=targets.mask, labels=targets.labels)
    found = loss_from_logits(head.logits(hidden), cached, names, **kw)
    return {"kl" if name == "tail" else name: value for name, value in found.items()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_kl_equals_the_textbook(temperature: float) -> None:
    hidden, head, targets = parts()
    pair = (head.logits(hidden), targets.head.logits(targets.hidden))
    log_q, log_p = ((z / temperature).log_softmax(1)[targets.mask] for z in pair)
    expected = temperature**2 * F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    actual = loss_from_teacher(hidden, head, targets, {"kl": 1.0}, temperature=temperature)
    torch.testing.assert_close(actual["loss"], expected)
    found = torch.autograd.grad(actual["loss"], hidden)
    torch.testing.assert_close(found, torch.autograd.grad(expected, hidden))


@pytest.mark.parametrize("terms", [*({name: 1.0} for name in WITH_TEACHER), TERMS], ids="+".join)
@pytest.mark.parametrize("kind", HEADS)
def test_equals_a_cache_of_all_words(terms: dict[str, float], kind: str) -> None:
    hidden, head, targets = parts(kind=kind)
    expected = textbook(hidden, head, targets, terms, temperature=2.0)
    actual = loss_from_teacher(hidden, head, targets, terms, temperature=2.0)
    torch.testing.assert_close(actual, expected)
    wanted = learnable(hidden, head)
    found = torch.autograd.grad(3.0 * actual["loss"], wanted)
    torch.testing.assert_close(found, torch.autograd.grad(3.0 * expected["loss"], wanted))
    assert not any(actual[name].requires_grad for name in terms)


@pytest.mark.parametrize("rows", [1, 4, T])
def test_chunks_change_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = parts(kind="bias")
    expected = textbook(hidden, head, targets, TERMS)
    monkeypatch.setattr(from_teacher, "CHUNK_LOGITS", rows * V)
    actual = loss_from_teacher(hidden, head, targets, TERMS)
    torch.testing.assert_close(actual, expected)
    wanted = learnable(hidden, head)
    torch.testing.assert_close(
        torch.autograd.grad(actual["loss"], wanted), torch.autograd.grad(expected["loss"], wanted)
    )


class MostRows(TorchDispatchMode):
    """Notes how many rows of V columns exist together."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: PLR0917
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] == V:
            self.most = max(self.most, result.shape[0])
        return result


def test_all_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = parts()
    monkeypatch.setattr(from_teacher, "CHUNK_LOGITS", 8 * V)
    with MostRows() as rows:
        loss_from_teacher(hidden, head, targets, TERMS)["loss"].backward()
    assert rows.most == 8


@pytest.mark.parametrize("index", [0, 1, 2])
def test_each_gradient_may_be_wanted_alone(index: int) -> None:
    hidden, head, targets = parts(kind="bias")
    wanted = learnable(hidden, head)
    expected = torch.autograd.grad(textbook(hidden, head, targets, TERMS)["loss"], wanted)[index]
    for other, tensor in enumerate(wanted):
        tensor.requires_grad_(other == index)
    loss_from_teacher(hidden, head, targets, TERMS)["loss"].backward()
    torch.testing.assert_close(wanted[index].grad, expected)
    assert all(tensor.grad is None for other, tensor in enumerate(wanted) if other != index)
    assert targets.hidden.grad is None and targets.head.weight.grad is None


def test_nothing_but_values_without_gradients() -> None:
    hidden, head, targets = parts()
    expected = textbook(hidden, head, targets, TERMS)["loss"].item()
    with torch.no_grad():
        loss = loss_from_teacher(hidden, head, targets, TERMS)["loss"]
    assert not loss.requires_grad and loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(("name", "junk"), covering(WITH_TEACHER, [1e30, torch.inf, torch.nan]))
def test_padding_changes_nothing(name: str, junk: float) -> None:
    hidden, head, clean = parts(torch.float32)
    rows = ~clean.mask
    dirty = clean._replace(
        labels=clean.labels.masked_fill(rows, 10**6),
        hidden=clean.hidden.detach().masked_fill(rows[:, None], junk),
    )
    noisy = hidden.detach().masked_fill(rows[:, None], junk).requires_grad_()
    expected = loss_from_teacher(hidden, head, clean, {name: 1.0})["loss"]
    actual = loss_from_teacher(noisy, head, dirty, {name: 1.0})["loss"]
    assert torch.equal(actual, expected)
    found = torch.autograd.grad(actual, [noisy, head.weight])
    assert not found[0][rows].any()
    for one, other in zip(found, torch.autograd.grad(expected, [hidden, head.weight]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", WITH_TEACHER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_eager(name: str, dtype: torch.dtype) -> None:
    hidden, head, targets = parts(dtype)
    gradients = []
    for function, to in (
        (loss_from_teacher, dtype),
        (textbook, dtype),
        (textbook, torch.float64),
    ):
        leaf, weight = (t.detach().to(to).requires_grad_() for t in (hidden, head.weight))
        teacher = Head(targets.head.weight.detach().to(to))
        whole = targets._replace(hidden=targets.hidden.detach().to(to), head=teacher)
        loss = function(leaf, Head(weight), whole, {name: 1.0})["loss"]
        (loss / 3.0).backward()
        gradients.append((leaf.grad, weight.grad))
    for ours, eager, exact in zip(*gradients, strict=True):
        slack = torch.finfo(dtype).eps * exact.abs().max().item()  # a last bit: few numbers, luck
        assert_no_worse_than_eager(ours, eager, exact, slack)


def test_a_student_like_its_teacher_has_nothing_to_learn() -> None:
    hidden, head, targets = parts(torch.float32)
    same = targets._replace(hidden=hidden.detach(), head=head)
    loss = loss_from_teacher(hidden, head, same, {"kl": 1.0})["loss"]
    assert abs(loss.item()) < 1e-6
    assert torch.autograd.grad(loss, hidden)[0].abs().max() < 1e-6


@pytest.mark.parametrize("rows", [0, 1])
def test_no_token_and_one_token(rows: int) -> None:
    hidden, head, targets = parts()
    few = hidden.detach()[:rows].requires_grad_()
    some = OnlineTargets(*(value[:rows] for value in targets[:3]), head=targets.head)
    actual = loss_from_teacher(few, head, some, TERMS)
    torch.testing.assert_close(actual, textbook(few, head, some, TERMS))
    actual["loss"].backward()
    assert few.grad.shape == few.shape and head.weight.grad.isfinite().all()


def test_refusals() -> None:
    hidden, head, targets = parts()
    with pytest.raises(ValueError, match="temperature=0 must be positive"):
        loss_from_teacher(hidden, head, targets, {"kl": 1.0}, temperature=0)
    narrow = targets._replace(head=targets.head.words(0, V - 1))
    with pytest.raises(ValueError, match="head has 19 words and the teacher's 18"):
        loss_from_teacher(hidden, head, narrow, {"kl": 1.0})
