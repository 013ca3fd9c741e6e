"""`add_norm_` against the textbook lines in float64, and its kernel, interpreted."""

import pytest
import torch
from three_way import assert_no_worse_than_eager
from torch import Tensor

from qat.extensions.decode.kernels.add_norm import add_norm_
from qat.kernels.dispatch import computing_by

EPS = 1e-6


def textbook(residual: Tensor, gain: Tensor) -> Tensor:
    return residual / (residual.square().mean(-1, keepdim=True) + EPS).sqrt() * gain


@pytest.mark.parametrize(
    ("has_delta", "D", "dtype"),
    [
        (False, 33, torch.float32),
        (True, 100, torch.float32),
        (True, 33, torch.float16),
        (False, 32, torch.float16),
    ],
)
def test_sum_and_norm(is_kernel: bool, has_delta: bool, D: int, dtype: torch.dtype) -> None:
    residual, gain = torch.randn(7, D), torch.rand(D) + 0.5
    delta = torch.randn(7, D).to(dtype) if has_delta else None
    expected = residual + (delta if has_delta else 0)
    exact = textbook(expected.double(), gain.double())
    with computing_by(kernel=is_kernel):
        found = add_norm_(residual, delta, gain, EPS, dtype)
    assert torch.equal(residual, expected)
    assert found.dtype == dtype
    slack = 1e-6 if dtype == torch.float32 else 0.0
    assert_no_worse_than_eager(found, textbook(expected, gain).to(dtype), exact, slack=slack)
