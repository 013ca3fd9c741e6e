"""AdamW in bfloat16: right on average, exact where nothing is to round, the same again."""

import pytest
import torch
from adamw_case import RATES, assert_rounded, copy, kept, moved, moving, neighbours, shared
from torch import Tensor

from qat.kernels.adamw import Noise, round_stochastically, stochastic_adamw_

SPECIAL = [0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf")]


def test_rounding_gives_a_neighbour_and_the_mean_is_right() -> None:
    x = torch.tensor([1.0 + 2**-10, -3.1415926, 1e-30, 7e-41])
    generator = torch.Generator().manual_seed(0)
    drawn = round_stochastically(x.repeat(20000, 1), generator).double()
    low, high = neighbours(x)
    assert ((drawn == low) | (drawn == high)).all()
    error = (drawn.mean(0) - x.double()) / (high - low)
    assert error.abs().max() < 4 * 0.5 / 20000**0.5  # four standard errors


def test_what_is_bfloat16_already_stays() -> None:
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(1000).bfloat16().float()])
    assert torch.equal(round_stochastically(x, torch.Generator()), x.bfloat16())
    noisy_nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(noisy_nan, torch.Generator()).isnan().all()


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_a_step_is_adamw_in_float32_rounded(gradient_dtype: torch.dtype) -> None:
    before = moving(37, 11, gradient_dtype=gradient_dtype)
    after = copy(before)
    exact = moved(before)
    stochastic_adamw_(after, shared(), RATES, Noise(0, 2, 0))
    for found, wanted in zip(kept(after), exact, strict=True):
        assert_rounded(found, wanted)


def test_steps_below_the_spacing_add_up() -> None:
    before = moving(4000)
    before.parameter.fill_(1.0)
    rates = RATES._replace(lr=1e-4, decay=0.0)  # 2**-8 is the spacing below one
    after = copy(before)
    for step in range(10):
        after.gradient.fill_(1.0)
        after.exp_avg.fill_(1.0)
        after.exp_avg_sq.fill_(1.0)
        stochastic_adamw_(after, torch.tensor([1.0, 1.0, 1.0]), rates, Noise(0, step, 0))
    assert after.parameter.double().mean().item() == pytest.approx(1 - 1e-3, abs=1e-4)
    assert torch.equal(before.parameter - 1e-4, before.parameter)  # what rounding to nearest does


def test_the_second_moment_forgets_although_it_forgets_less_than_the_spacing() -> None:
    before = moving(4000)
    rates = RATES._replace(beta2=0.999, lr=0.0, decay=0.0)
    before.gradient.zero_()
    before.exp_avg_sq.fill_(1.0)
    for step in range(100):
        stochastic_adamw_(before, shared(), rates, Noise(0, step, 0))
    assert before.exp_avg_sq.double().mean().item() == pytest.approx(0.999**100, abs=2e-3)
    one = torch.ones((), dtype=torch.bfloat16)
    assert one * 0.999 == one  # what rounding to nearest does


def test_noise_depends_on_seed_step_and_tensor_alone() -> None:
    before = moving(3000)

    def run(*numbers: int) -> Tensor:
        after = copy(before)
        torch.rand(1)  # the global generator has no part in it
        stochastic_adamw_(after, shared(), RATES, Noise(*numbers))
        return after.parameter

    first = run(1, 2, 3)
    assert torch.equal(first, run(1, 2, 3))
    assert not any(torch.equal(first, run(*other)) for other in [(2, 2, 3), (1, 3, 3), (1, 2, 4)])


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_factor_that_is_no_number_moves_nothing(factor: float) -> None:
    before = moving(100)
    before.gradient[3] = float("nan")
    after = copy(before)
    stochastic_adamw_(after, shared(factor), RATES, Noise(0, 0, 0))
    assert all(torch.equal(a, b) for a, b in zip(kept(after), kept(before), strict=True))
