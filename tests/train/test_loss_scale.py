"""The loss scale follows the rule of torch.amp.GradScaler, and gives up at one."""

import math

import torch

from qat.train.loss_scale import LossScale

GOOD, BAD = torch.tensor(2.5), torch.tensor(math.inf)


def test_it_follows_gradscaler(monkeypatch) -> None:
    monkeypatch.setattr("qat.train.loss_scale.GROWTH_INTERVAL", 3)
    ours = LossScale(torch.device("cpu"))
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(2))
    sgd = torch.optim.SGD([parameter], lr=0.0)
    for norm in [BAD, GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD, BAD, GOOD, GOOD, GOOD, BAD * 0]:
        theirs.scale(parameter.sum()).backward()
        parameter.grad.fill_(norm)
        theirs.step(sgd)
        theirs.update()
        sgd.zero_grad()
        ours.settle(norm)
        assert ours.scale.item() == theirs.get_scale()
        assert ours.good_steps.item() == theirs.state_dict()["_growth_tracker"]


def test_the_trainer_sees_overflow_only_where_no_scale_is_left_to_try() -> None:
    scale = LossScale(torch.device("cpu"))
    tensor = scale.scale
    seen = [scale.settle(BAD).item() for _ in range(18)]
    assert seen == [0.0] * 16 + [math.inf] * 2
    assert scale.scale == 1 and scale.scale is tensor  # a captured graph reads this very tensor
    assert scale.settle(GOOD) == GOOD


def test_its_state_goes_on() -> None:
    one, two = LossScale(torch.device("cpu")), LossScale(torch.device("cpu"))
    for norm in (BAD, GOOD, GOOD):
        one.settle(norm)
    two.load({name: tensor.clone() for name, tensor in one.state().items()})
    assert two.scale == 2.0**15 and two.good_steps == 2
