"""The classes that move parameters, by themselves."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from train_case import visiting

from qat.backend.base import Backend
from qat.train.adamw import KernelAdamW, Learner, TorchAdamW
from qat.train.adamw16bit import StochasticAdamW


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_factor_of_the_gradients_is_in_the_moments(tmp_path, is_fused: bool) -> None:
    parameter, gradient = nn.Parameter(torch.zeros(8)), torch.randn(8)
    mover = TorchAdamW({"weight": Learner(parameter, 0.1, 0.0)}, 0.99, is_fused=is_fused)
    mover.begin()
    parameter.grad = gradient.clone()
    mover.move(0, 1.0, torch.tensor(0.25))
    moment = mover.state()["exp_avg.weight"]
    torch.testing.assert_close(moment, 0.1 * 0.25 * gradient)


def test_a_run_goes_on_with_another_adamw() -> None:
    learners = {name: Learner(nn.Parameter(torch.randn(8)), 0.1, 0.0) for name in ("a", "b", "c")}
    before = TorchAdamW(learners, 0.99, is_fused=False)
    for given in ("", "a", "ab", "a"):  # b gets a gradient once, c never
        for name, (p, *_) in learners.items():
            p.grad = torch.randn(8) if name in given else None
        if given:
            before.move(0, 1.0, torch.tensor(1.0))
        state = before.state()
        movers = KernelAdamW(learners, 0.99), TorchAdamW(learners, 0.99, is_fused=False)
        for mover in movers:
            mover.load(state)
        for name in learners:
            mine, theirs = (mover.state() for mover in movers)
            assert mine[f"step.{name}"] == state.get("step.a", 0)
            moment = state.get(f"exp_avg.{name}", torch.zeros(8))
            assert torch.equal(mine[f"exp_avg.{name}"], moment)
            assert torch.equal(theirs.get(f"exp_avg.{name}", torch.zeros(8)), moment)


def test_moments_on_the_host_move_weights_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitors = []

    def watched(backend: Backend, groups: list) -> Iterator:
        visitors.extend(map(len, groups))
        return visiting(backend, groups)

    torch.manual_seed(0)
    first = {name: torch.randn(4, 8).bfloat16() for name in "abc"}
    moved = {}
    for offload in ("none", "moments"):
        weights = {name: nn.Parameter(tensor.clone()) for name, tensor in first.items()}
        learners = {name: Learner(p, 0.1, 0.01) for name, p in weights.items()}
        if offload == "moments":
            monkeypatch.setattr(Backend, "visiting", watched)
        mover = StochasticAdamW(learners, 0.99, seed=0, is_offloaded=offload == "moments")
        for step in range(3):
            for name, p in weights.items():  # one gets no gradient
                p.grad = None if name == "b" else torch.full_like(p, step - 0.5)
            mover.move(step, 1.0, torch.tensor(0.5))
        moved[offload] = {**{n: p.detach() for n, p in weights.items()}, **mover.state()}
    assert visitors == [2] * 6
    assert all(torch.equal(moved["moments"][name], t) for name, t in moved["none"].items())
    again = StochasticAdamW(learners, 0.99, seed=0, is_offloaded=True)
    again.load(mover.state())
    assert all(torch.equal(again.state()[name], t) for name, t in mover.state().items())
