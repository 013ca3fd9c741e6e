"""Losses from hidden states, on a cache and against a teacher: the textbook, never all logits."""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch
from covering import covering
from head_case import HEADS, learnable
from teacher_targets import targets_of, with_junk
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import qat.kernels.head
from qat.backend.base import Backend
from qat.kernels.head import Head
from qat.losses import from_hidden, from_teacher
from qat.losses.config import ON_CACHE, WITH_TEACHER
from qat.losses.formulas import Targets, loss_from_logits
from qat.losses.from_hidden import loss_from_hidden
from qat.losses.from_teacher import OnlineTargets, loss_from_teacher

T, D, E, V, K = 13, 6, 7, 19, 5
TERMS = {"tail": 1.0, "hard_ce": 0.25, "sampled": 0.5}


def head_of(width: int, dtype: torch.dtype, kind: str) -> Head:
    has_bias, softcap = HEADS[kind]
    bias = torch.randn(V).to(dtype).requires_grad_() if has_bias else None
    return Head(torch.randn(V, width).to(dtype).requires_grad_(), bias, softcap)


def parts(
    dtype: torch.dtype = torch.float64, kind: str = "plain", size: float = 1.0, top_k: int = K
) -> tuple[Tensor, Head, Targets]:
    hidden = (size * torch.randn(T, D)).to(dtype).requires_grad_()
    return hidden, head_of(D, dtype, kind), targets_of(2 * torch.randn(T, V), top_k)


def online_parts(
    dtype: torch.dtype = torch.float64, kind: str = "plain"
) -> tuple[Tensor, Head, OnlineTargets]:
    """A student, and a teacher of another width, with every kind of row."""
    hidden, head, words = parts(dtype, kind)
    teacher = torch.randn(T, E).to(dtype).requires_grad_()
    return hidden, head, OnlineTargets(words.mask, words.labels, teacher, head_of(E, dtype, kind))


def textbook(hidden: Tensor, head: Head, targets: Targets, terms: dict[str, float], **kw) -> dict:
    return loss_from_logits(head.logits(hidden), targets, terms, **kw)


def online_textbook(hidden: Tensor, head: Head, targets: OnlineTargets, terms: dict, **kw) -> dict:
    """Return the losses of a cache of all words; its `tail` is `kl` here."""
    logits = targets.head.logits(targets.hidden).detach()
    log_p, ids = logits.double().log_softmax(1).sort(descending=True)
    cached = targets_of(logits, V)._replace(topk_logprobs=log_p, topk_ids=ids)
    names = {"tail" if name == "kl" else name: weight for name, weight in terms.items()}
    cached = cached._replace(mask=targets.mask, labels=targets.labels)
    found = textbook(hidden, head, cached, names, **kw)
    return {"kl" if name == "tail" else name: value for name, value in found.items()}


def online_junk(clean: OnlineTargets, junk: float) -> OnlineTargets:
    rows = ~clean.mask
    labels = clean.labels.masked_fill(rows, 10**6)
    return clean._replace(
        labels=labels, hidden=clean.hidden.detach().masked_fill(rows[:, None], junk)
    )


def online_cast(targets: OnlineTargets, dtype: torch.dtype) -> OnlineTargets:
    head = Head(targets.head.weight.detach().to(dtype))
    return targets._replace(hidden=targets.hidden.detach().to(dtype), head=head)


class Way(NamedTuple):
    """One of the two functions, its textbook, and what changes its targets."""

    loss: Callable[..., dict[str, Tensor]]
    textbook: Callable[..., dict[str, Tensor]]
    terms: dict[str, float]
    parts: Callable[..., tuple]
    junk: Callable = with_junk
    cast: Callable = lambda targets, _: targets
    few: Callable = lambda targets, rows: Targets(*(value[:rows] for value in targets))


WAYS = {
    "cache": Way(loss_from_hidden, textbook, TERMS, parts),
    "teacher": Way(
        loss_from_teacher,
        online_textbook,
        {"kl": 1.0, "hard_ce": 0.25, "jsd": 0.5},
        online_parts,
        online_junk,
        online_cast,
        lambda all_, rows: OnlineTargets(*(value[:rows] for value in all_[:3]), head=all_.head),
    ),
}
NAMED = [(way, name) for way, names in (("cache", ON_CACHE), ("teacher", WITH_TEACHER))
         for name in names]  # fmt: skip
"""Every loss of each way."""


def assert_textbook(way: Way, case: tuple, terms: dict[str, float], **settings: float) -> None:
    """Values and all gradients that are required are the textbook's; only `"loss"` has any."""
    actual, expected = (each(*case, terms, **settings) for each in (way.loss, way.textbook))
    torch.testing.assert_close(actual, expected)
    wanted = [tensor for tensor in learnable(*case[:2]) if tensor.requires_grad]
    found = torch.autograd.grad(3.0 * actual["loss"], wanted)
    torch.testing.assert_close(found, torch.autograd.grad(3.0 * expected["loss"], wanted))
    assert not any(actual[name].requires_grad for name in terms)


@pytest.mark.parametrize(
    ("case", "kind"), [*covering(NAMED, HEADS), *product(product(WAYS, ["sum"]), HEADS)]
)
def test_equals_the_textbook(case: tuple[str, str], kind: str) -> None:
    way, name = case
    each = WAYS[way]
    terms = each.terms if name == "sum" else {name: 1.0}
    assert_textbook(each, each.parts(kind=kind), terms, temperature=2.0)
    if way == "cache":
        assert_textbook(each, parts(kind=kind, top_k=V), terms, temperature=2.0)


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("size", [1, 4, T])
@pytest.mark.parametrize("way", WAYS)
def test_chunks_and_blocks_change_nothing(way: str, size: int, learns: bool, monkeypatch) -> None:
    """Those of a head that learns are of as many tokens as a block."""
    monkeypatch.setattr(from_hidden, "CHUNK_TOKENS", size)
    monkeypatch.setattr(from_teacher, "CHUNK_LOGITS", size * V)
    monkeypatch.setattr(qat.kernels.head, "BLOCK_TOKENS", 3)
    monkeypatch.setattr(qat.kernels.head, "BLOCK_WORDS", size)
    monkeypatch.setattr(qat.kernels.head, "TILE_TOKENS", 2)
    case = WAYS[way].parts(kind="bias")
    for tensor in (case[1].weight, case[1].bias):
        tensor.requires_grad_(learns)
    assert_textbook(WAYS[way], case, WAYS[way].terms)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_each_gradient_may_be_wanted_alone(way: str, index: int) -> None:
    loss, textbook, terms, parts, *_ = WAYS[way]
    hidden, head, targets = parts(kind="bias")
    wanted = learnable(hidden, head)
    expected = torch.autograd.grad(textbook(hidden, head, targets, terms)["loss"], wanted)[index]
    for other, tensor in enumerate(wanted):
        tensor.requires_grad_(other == index)
    loss(hidden, head, targets, terms)["loss"].backward()
    torch.testing.assert_close(wanted[index].grad, expected)
    assert all(tensor.grad is None for other, tensor in enumerate(wanted) if other != index)
    if way == "teacher":
        assert targets.hidden.grad is None and targets.head.weight.grad is None


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


@pytest.mark.parametrize(
    ("way", "terms", "learns", "most_rows"),
    [
        ("cache", TERMS, False, 4),
        ("cache", TERMS, True, 4),
        ("cache", {"candidates": 1.0}, False, 0),
        ("cache", {"candidates": 1.0}, True, 4),
        ("teacher", {"kl": 1.0}, False, 8),
        ("teacher", {"kl": 1.0}, True, 12),
        ("teacher", {"kl": 1.0, "hard_ce": 1.0}, True, 8),
    ],
)
def test_all_logits_never_exist(
    way: str, terms: dict, learns: bool, most_rows: int, monkeypatch
) -> None:
    hidden, head, targets = WAYS[way].parts()
    if way == "cache":
        few = {name: getattr(targets, name)[:, :3] for name in ("sample_ids", "sample_counts")}
        targets = targets._replace(**few)
    head.weight.requires_grad_(learns)
    monkeypatch.setattr(qat.kernels.head, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(from_teacher, "CHUNK_LOGITS", 8 * V)
    room = 12 * from_teacher.LEARNING_PART * V  # of a device with much memory
    monkeypatch.setattr(Backend, "logits_at_once", lambda self: room)
    with Shapes() as shapes:
        WAYS[way].loss(hidden, head, targets, terms)["loss"].backward()
    rows = [s[0] for s in shapes.seen if len(s) == 2 and s[1] >= V and s[0] not in (D, E)]
    assert max(rows, default=0) == most_rows
    assert not [s for s in shapes.seen if len(s) == 3], "no (T, N, D)"


@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_values_without_gradients(way: str) -> None:
    loss, textbook, terms, parts, *_ = WAYS[way]
    hidden, head, targets = parts()
    expected = textbook(hidden, head, targets, terms)["loss"].item()
    with torch.no_grad(), Shapes() as shapes:
        found = loss(hidden, head, targets, terms)["loss"]
    assert not found.requires_grad and found.item() == pytest.approx(expected)
    hidden, head = hidden.detach(), Head(head.weight.detach())
    with Shapes() as without_leaves:
        loss(hidden, head, targets, terms)
    assert shapes.seen == without_leaves.seen, "neither computes a gradient"


def test_absent_words_and_repeated_words() -> None:
    """A draw may be a top-k token and the label too; padding names any word at all."""
    hidden, head, targets = parts()
    same = targets.topk_ids[:, :1]
    counts = torch.tensor([[3.0, 0.0, 2.0]]).expand(T, 3)
    targets = targets._replace(
        labels=same[:, 0],
        sample_ids=torch.cat([same, same + 10**6, (same + 1) % V], 1),
        sample_counts=counts.masked_fill(torch.arange(T)[:, None] == 0, 0.0),
    )
    legal = targets._replace(sample_ids=targets.sample_ids % V)
    way = WAYS["cache"]._replace(textbook=lambda h, w, _, terms: textbook(h, w, legal, terms))
    assert_textbook(way, (hidden, head, targets), TERMS)


@pytest.mark.parametrize(("way", "name"), NAMED)
def test_padding_changes_nothing(way: str, name: str) -> None:
    loss, _, _, parts, junk_in, *_ = WAYS[way]
    for junk in (1e30, torch.inf, torch.nan):
        hidden, head, clean = parts(torch.float32)
        rows, dirty = ~clean.mask, junk_in(clean, junk)
        noisy = hidden.detach().masked_fill(rows[:, None], junk).requires_grad_()
        expected = loss(hidden, head, clean, {name: 1.0})["loss"]
        actual = loss(noisy, head, dirty, {name: 1.0})["loss"]
        assert torch.equal(actual, expected), junk
        found = torch.autograd.grad(actual, [noisy, head.weight])
        assert not found[0][rows].any(), junk
        wanted = torch.autograd.grad(expected, [hidden, head.weight])
        assert all(map(torch.equal, found, wanted)), junk


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


@pytest.mark.parametrize("name", ON_CACHE)
def test_extreme_logits_stay_finite(name: str) -> None:
    hidden, head, targets = parts(torch.float32, size=1e4)
    loss = loss_from_hidden(hidden, head, targets, {name: 1.0})["loss"]
    exact = textbook(hidden.double(), Head(head.weight.double()), targets, {name: 1.0})["loss"]
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, [hidden, head.weight]))


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_no_token_and_one_token(way: str, rows: int) -> None:
    loss, textbook, terms, parts, _, _, few = WAYS[way]
    hidden, head, targets = parts()
    hidden, targets = hidden.detach()[:rows].requires_grad_(), few(targets, rows)
    actual = loss(hidden, head, targets, terms)
    torch.testing.assert_close(actual, textbook(hidden, head, targets, terms))
    actual["loss"].backward()
    assert hidden.grad.shape == hidden.shape and head.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("case", "dtype"), covering([*NAMED, NAMED[0]], [torch.bfloat16, torch.float16])
)
def test_half_precision_errs_no_more_than_eager(case: tuple[str, str], dtype: torch.dtype) -> None:
    (way, name), gradients = case, []
    loss, textbook, _, parts, _, cast, _ = WAYS[way]
    hidden, head, targets = parts(dtype)
    for function, to in ((loss, dtype), (textbook, dtype), (textbook, torch.float64)):
        leaf, weight = (t.detach().to(to).requires_grad_() for t in (hidden, head.weight))
        total = function(leaf, Head(weight), cast(targets, to), {name: 1.0})["loss"]
        (total / 3.0).backward()
        gradients.append((leaf.grad, weight.grad))
    for ours, eager, exact in zip(*gradients, strict=True):
        # a last bit: so few numbers vary by luck
        eps = 2.0**-9 if way == "cache" else torch.finfo(dtype).eps
        slack = eps * exact.abs().max().item()
        assert_no_worse_than_eager(ours, eager, exact, slack)


def test_autocast_means_its_dtype_and_any_dtype_of_the_head() -> None:
    hidden, head, targets = parts(torch.float32)
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
    hidden, head, targets = parts(torch.bfloat16)
    factor = 1.0 + 2.0**-8 - 2.0**-16  # just below the middle of two bfloat16 numbers
    (plain,) = torch.autograd.grad(loss_from_hidden(hidden, head, targets, TERMS)["loss"], hidden)
    loss = loss_from_hidden(hidden, head, targets, TERMS)["loss"] * factor
    (scaled,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(scaled, (plain.float() * factor).bfloat16())


@pytest.mark.parametrize("index", [0, 1, 2])
def test_backward_runs_once(index: int) -> None:
    """Whichever gradient there is; a head's alone, for example, is not silently zero."""
    hidden, head, targets = parts(kind="bias")
    for other, tensor in enumerate(learnable(hidden, head)):
        tensor.requires_grad_(other == index)
    loss = loss_from_hidden(hidden, head, targets, TERMS)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="may run once"):
        loss.backward()
