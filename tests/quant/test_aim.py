"""Aiming a linear at what the teacher's gives: the closed form, its shrink and its edges."""

import pytest
import torch
from torch import Tensor

from qat.errors import ConfigError
from qat.quant.error_feedback import SHRINK, aim_all


def data(T: int = 400, I: int = 12) -> tuple[Tensor, Tensor]:
    """The student's inputs and the teacher's, which are related but not the same."""
    x = torch.randn(T, I) @ torch.randn(I, I)
    return x, x + 0.3 * torch.randn(T, I) + 0.1 * x.roll(1, dims=1)


def outer(left: Tensor, right: Tensor) -> Tensor:
    return left.T @ right / len(right)


def least_squares(x: Tensor, y: Tensor) -> Tensor:
    """The W that minimises `|y - x W^T|`, by brute force, with the fit's damping as a ridge."""
    ridge = (0.01 * x.square().sum(0).mean()).sqrt() * torch.eye(x.shape[1])
    x, y = torch.cat([x, ridge]), torch.cat([y, y.new_zeros(x.shape[1], y.shape[1])])
    return torch.linalg.lstsq(x.double(), y.double()).solution.T


@pytest.mark.parametrize("has_stream", [False, True])
def test_the_whole_correction_is_the_least_squares_weight(has_stream: bool) -> None:
    x, x_f = data()
    weights = [torch.randn(5, 12), torch.randn(5, 12)]
    drift = torch.randn(len(x), 5) + x[:, :5] if has_stream else torch.zeros(len(x), 5)
    stream_gap = outer(drift, x) if has_stream else None
    aims = aim_all(weights, outer(x, x), outer(x_f - x, x), stream_gap, shrink=1.0)
    for weight, aim in zip(weights, aims, strict=True):
        # the ridge draws towards the weight itself, not towards zero
        missing = (x_f - x) @ weight.T + drift
        expected = weight + least_squares(x, missing)
        torch.testing.assert_close(aim.double(), expected, rtol=1e-4, atol=1e-4)
        wanted = x_f @ weight.T + drift
        assert (wanted - x @ aim.T).norm() < 0.9 * (wanted - x @ weight.T).norm()


def test_part_of_the_correction_lies_between_and_equal_inputs_have_none() -> None:
    x, x_f = data()
    weight, moments = torch.randn(5, 12), (outer(x, x), outer(x_f - x, x))
    (part,), (whole,) = aim_all([weight], *moments), aim_all([weight], *moments, shrink=1.0)
    torch.testing.assert_close(part, weight + SHRINK * (whole - weight))
    zero = torch.zeros(12, 12)
    for moment in (outer(x, x), zero):  # inputs that are the teacher's, or never fire
        assert torch.equal(aim_all([weight], moment, zero)[0], weight)


@pytest.mark.parametrize("T", [1, 3])
def test_few_tokens_and_dead_features_do_no_harm(T: int) -> None:
    x, x_f = data(T)
    x[:, 4] = 0.0
    weight = torch.randn(5, 12)
    (aim,) = aim_all([weight], outer(x, x), outer(x_f - x, x))
    assert torch.equal(aim[:, 4], weight[:, 4])  # nothing can be told from it
    wanted = x_f @ weight.T
    assert (wanted - x @ aim.T).norm() < (wanted - x @ weight.T).norm()


def test_a_weight_without_a_finite_aim_stays() -> None:
    x, x_f = data()
    weights = [torch.randn(5, 12), torch.randn(5, 12)]
    broken = outer(x_f - x, x)
    broken[2, 3] = torch.inf
    for weight, aim in zip(weights, aim_all(weights, outer(x, x), broken), strict=True):
        assert torch.equal(aim, weight)
    endless = outer(x, x)
    endless[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="12 inputs"):
        aim_all(weights, endless, outer(x_f - x, x))
