"""`qat.AdamW`: PyTorch's steps, by one kernel where that may be."""

import copy
from typing import Any

import pytest
import torch
from own_adamw_case import Course, assert_steps_are_torchs
from torch import nn

import qat
from qat.kernels.adamw import ManyTensors
from qat.kernels.dispatch import computing_by


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
