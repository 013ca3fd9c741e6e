"""Steps of `qat.AdamW` beside those of PyTorch in float64, on either kind of device."""

import copy
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import qat

SHAPES = [(5,), (36, 112), (2500,), (8,)]
BEGINS = [0, 0, 2, 9]
"""The step in which each tensor gets its first gradient; the last one never does."""


class Course:
    """Tensors with an optimizer and a schedule that changes each group's rate in its own way."""

    def __init__(self, kind: Any, device: str, dtype: torch.dtype, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.tensors = [nn.Parameter(tensor.to(device, dtype)) for tensor in drawn]
        groups = [
            {"params": [p], "lr": 10.0 ** -(1 + i % 3), "weight_decay": 0.3 * i}
            for i, p in enumerate(self.tensors)
        ]
        self.optimizer = kind(groups, betas=(0.9, 0.95), eps=1e-12, **options)
        shares = [lambda step, by=by: 1 / (1 + by * step) for by in range(len(groups))]
        self.schedule = LambdaLR(self.optimizer, shares)

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step + 1)
        for p, begin in zip(self.tensors, BEGINS, strict=True):
            drawn = torch.randn(p.shape, generator=generator)
            p.grad = drawn.to(p) if step >= begin else None

    def take(self, *steps: int) -> None:
        for step in steps:
            self.set_gradients(step)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def go_on_from(self, other: "Course") -> None:
        """Take over a checkpoint."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.data.copy_(theirs.data)
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.schedule.load_state_dict(other.schedule.state_dict())

    def numbers(self) -> list[torch.Tensor]:
        """The tensors, and the state of each, zeros where there is none."""
        found = []
        for p in self.tensors:
            state = self.optimizer.state[p]
            moments = [state.get(name, torch.zeros_like(p)) for name in ("exp_avg", "exp_avg_sq")]
            found += [p.detach(), *moments, state.get("step", torch.zeros(()))]
        return [tensor.double().cpu() for tensor in found]


def assert_steps_are_torchs(device: str) -> None:
    """Take steps by the kernel and by PyTorch, exchange their checkpoints, and go on."""
    kinds = [(qat.AdamW, device, torch.float32), (torch.optim.AdamW, "cpu", torch.float64)]
    ours, exact = (Course(*kind) for kind in kinds)
    for course in (ours, exact):
        course.take(0, 1, 2)
        course.tensors[1].data = course.tensors[1].data.clone()  # as a move to a device leaves it
        course.take(3)
    ours_again, exact_again = (Course(*kind) for kind in kinds)
    ours_again.go_on_from(exact)
    exact_again.go_on_from(ours)
    for course in (ours, exact, ours_again, exact_again):
        course.take(4, 5)
        assert [step.item() for step in course.numbers()[3::4]] == [6, 6, 4, 0]
    for course in (ours, ours_again, exact_again):
        for found, wanted in zip(course.numbers(), exact.numbers(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)
