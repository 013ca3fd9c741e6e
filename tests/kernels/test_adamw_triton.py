"""The Triton AdamW: between the same neighbours as the reference, unbiased, the same again."""

import pytest
import torch
from adamw_case import RATES, assert_rounded, copy, kept, moved, moving, neighbours, shared

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the kernel is tested on the GPU itself", allow_module_level=True)

from qat.kernels.adamw import Moving, Noise, stochastic_adamw_by_kernel_


@pytest.mark.parametrize("shape", [(5,), (37, 11), (3, 1024), (2, 2500)])
def test_a_step_is_adamw_in_float32_rounded(shape: tuple[int, ...]) -> None:
    before = moving(*shape)
    after = copy(before)
    stochastic_adamw_by_kernel_(after, shared(), RATES, Noise(0, 2, 0))
    for found, wanted in zip(kept(after), moved(before), strict=True):
        assert_rounded(found, wanted)


def test_the_mean_of_all_three_is_right() -> None:
    before = moving(8)
    many = Moving(*(tensor.repeat(4096) for tensor in before))
    stochastic_adamw_by_kernel_(many, shared(), RATES, Noise(5, 2, 1))
    for found, wanted in zip(kept(many), moved(before), strict=True):
        low, high = neighbours(wanted)
        error = (found.double().view(4096, 8).mean(0) - wanted) / (high - low)
        assert error.abs().max() < 4 * 0.5 / 4096**0.5


def test_noise_depends_on_seed_step_and_tensor_alone() -> None:
    before = moving(3000)

    def run(*numbers: int) -> torch.Tensor:
        after = copy(before)
        stochastic_adamw_by_kernel_(after, shared(), RATES, Noise(*numbers))
        return after.parameter

    first = run(1, 2, 3)
    assert torch.equal(first, run(1, 2, 3))
    assert not any(torch.equal(first, run(*other)) for other in [(2, 2, 3), (1, 3, 3), (1, 2, 4)])


def test_nothing_moves_without_a_rate_or_with_a_factor_that_is_no_number() -> None:
    before = moving(100)
    still = RATES._replace(lr=0.0, decay=0.0)
    after = copy(before)
    stochastic_adamw_by_kernel_(after, shared(), still, Noise(0, 2, 0))
    assert torch.equal(after.parameter, before.parameter)
    before.gradient[0] = float("nan")
    after = copy(before)
    stochastic_adamw_by_kernel_(after, shared(float("nan")), RATES, Noise(0, 2, 0))
    assert all(torch.equal(a, b) for a, b in zip(kept(after), kept(before), strict=True))
