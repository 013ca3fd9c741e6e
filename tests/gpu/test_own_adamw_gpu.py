"""`qat.AdamW` on a GPU: PyTorch's steps, and no wait for the GPU. Run with `-m gpu`."""

import pytest
import torch
from gpu_case import no_synchronisation
from own_adamw_case import Course, assert_steps_are_torchs

import qat

pytestmark = pytest.mark.gpu


def test_one_kernel_takes_the_steps_of_torch() -> None:
    assert_steps_are_torchs("cuda")


def test_a_step_asks_nothing_of_the_host() -> None:
    course = Course(qat.AdamW, "cuda", torch.float32)
    course.take(0, 1)  # compiles
    course.set_gradients(3)
    with no_synchronisation():
        course.optimizer.step()
        course.schedule.step()
        course.optimizer.zero_grad()


def test_a_gradient_scaler_skips_what_is_not_finite() -> None:
    courses = []
    for options in ({}, {"fused": True}):  # the latter leaves it to the kernel of PyTorch
        course = Course(qat.AdamW, "cuda", torch.float32, **options)
        course.take(0)
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        for step, factor in ((1, 8.0), (2, torch.inf), (3, 4.0)):
            scaler.scale(torch.ones((), device="cuda"))
            course.set_gradients(step)
            for p in course.tensors:
                if p.grad is not None:
                    p.grad *= factor
            scaler.step(course.optimizer)
            scaler.update()
        course.take(4)
        courses.append(course.numbers())
    assert [step.item() for step in courses[0][3::4]] == [4, 4, 2, 0]
    for found, wanted in zip(*courses, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)
