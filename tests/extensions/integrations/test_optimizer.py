"""`qat.AdamW`: PyTorch's steps, by one kernel where that may be."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from own_adamw_case import SHAPES, Course, assert_steps_are_torchs
from torch import nn

import qat
from qat.kernels.adamw import ManyTensors
from qat.kernels.dispatch import computing_by

EXACT = "cpu", torch.float64


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[ManyTensors]:
    """The tables of each launch of the kernel."""
    found, step_ = [], ManyTensors.step_

    def watched(many: ManyTensors, *given: Any) -> None:
        found.append(many)
        step_(many, *given)

    monkeypatch.setattr(ManyTensors, "step_", watched)
    return found


def test_one_kernel_takes_the_steps_of_torch(kernels: list[ManyTensors]) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernel itself")
    with computing_by(True):
        assert_steps_are_torchs("cpu")
    assert len(kernels) == 6 + 2  # of two courses; and new tables where a tensor was moved
    assert len({*map(id, kernels)}) == 3


@pytest.mark.parametrize(
    ("is_kernel", "dtype", "options"),
    [
        (False, torch.float32, {}),
        (True, torch.bfloat16, {}),
        (True, torch.float32, {"amsgrad": True}),
        (True, torch.float32, {"maximize": True}),
    ],
)
def test_all_else_is_pytorchs_own_step(
    kernels: list[ManyTensors], is_kernel: bool, dtype: torch.dtype, options: dict[str, bool]
) -> None:
    ours, theirs = (
        Course(kind, "cpu", dtype, **options) for kind in (qat.AdamW, torch.optim.AdamW)
    )
    with computing_by(is_kernel):
        for course in (ours, theirs):
            course.take(0, 1, 2)
    for found, wanted in zip(ours.numbers(), theirs.numbers(), strict=True):
        assert torch.equal(found, wanted)
    assert kernels == []


def move_states(course: Course) -> None:
    for state in course.optimizer.state.values():
        for name, tensor in state.items():
            if name == "step":
                state[name] = tensor.clone()  # an own tensor in place of an element
            else:
                tensor.data = tensor.data.clone()


def reset_a_state(course: Course) -> None:
    course.optimizer.state[course.tensors[1]] = {}


def reset_a_moment(course: Course) -> None:
    course.optimizer.state[course.tensors[0]]["exp_avg"] = torch.zeros_like(course.tensors[0])


def narrow_moments(course: Course) -> None:
    for p in course.tensors[:2]:
        state = course.optimizer.state[p]
        for name in ("exp_avg", "exp_avg_sq"):
            narrow = state[name].bfloat16()
            state[name] = narrow if isinstance(course.optimizer, qat.AdamW) else narrow.to(p)


@pytest.mark.parametrize("change", [move_states, reset_a_state, reset_a_moment, narrow_moments])
def test_the_kernel_follows_a_state_that_its_user_changes(
    kernels: list[ManyTensors], change: Callable[[Course], None]
) -> None:
    pytest.importorskip("triton")
    ours, exact = Course(qat.AdamW, "cpu", torch.float32), Course(torch.optim.AdamW, *EXACT)
    with computing_by(True):
        for course in (ours, exact):
            course.take(0, 1, 2)
            change(course)
            course.take(3, 4)
    for found, wanted in zip(ours.numbers(), exact.numbers(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)
    assert len(kernels) == 5 and len({*map(id, kernels)}) == 2
    ours.tensors[0].data = torch.ones(SHAPES[1])
    with computing_by(True), pytest.raises(RuntimeError, match="36"):
        ours.take(5)  # moments of another shape are not read


def test_the_kernel_needs_no_default_device_or_dtype(kernels: list[ManyTensors]) -> None:
    pytest.importorskip("triton")
    ours, exact = Course(qat.AdamW, "cpu", torch.float32), Course(torch.optim.AdamW, *EXACT)
    for course in (ours, exact):
        course.set_gradients(2)
    exact.optimizer.step()
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.bfloat16)
        with computing_by(True):
            ours.optimizer.step()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for found, wanted in zip(ours.tensors, exact.tensors, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-6)
    assert len(kernels) == 1


@pytest.mark.filterwarnings("ignore:optimizer contains:UserWarning")
def test_a_tensor_that_a_group_holds_twice_moves_twice(kernels: list[ManyTensors]) -> None:
    found = []
    for kind in (qat.AdamW, torch.optim.AdamW):
        p = nn.Parameter(torch.ones(3))
        optimizer, p.grad = kind([p, p], lr=0.1), torch.ones(3)
        with computing_by(True):
            optimizer.step()
        found.append((p.detach(), optimizer.state[p]["step"]))
    assert kernels == []
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1] == 2


@pytest.mark.parametrize("is_kernel", [True, False])
def test_a_closure_and_hooks_are_called_once(is_kernel: bool) -> None:
    if is_kernel:
        pytest.importorskip("triton")
    p, calls = nn.Parameter(torch.ones(4)), []
    torch.optim.AdamW([p])  # which puts hooks around its class's step
    optimizer = qat.AdamW([p], lr=0.5, weight_decay=0.0)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))

    def closure() -> torch.Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        (loss := p.square().sum()).backward()
        return loss

    with computing_by(is_kernel):
        assert optimizer.step(closure).item() == 4
        again = copy.deepcopy(optimizer)
        optimizer.zero_grad()
        optimizer.step()  # nothing has a gradient
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.5))
    assert calls == ["before", "closure", "before"]
    assert [state["step"].item() for state in again.state.values()] == [1]
