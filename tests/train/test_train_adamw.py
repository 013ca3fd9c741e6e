"""What moves parameters, by itself."""

import pytest
import torch
from torch import nn
from train_case import config

from qat.train.adamw import Learner, TorchAdamW


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_factor_of_the_gradients_is_in_the_moments(tmp_path, is_fused: bool) -> None:
    parameter, gradient = nn.Parameter(torch.zeros(8)), torch.randn(8)
    mover = TorchAdamW(
        {"weight": Learner(parameter, 0.1, 0.0)}, config(tmp_path), is_fused=is_fused
    )
    mover.begin()
    parameter.grad = gradient.clone()
    mover.move(0, 1.0, torch.tensor(0.25))
    moment = mover.state()["exp_avg.weight"]
    torch.testing.assert_close(moment, 0.1 * 0.25 * gradient)
