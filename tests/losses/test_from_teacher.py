"""What only losses against a whole teacher do; `test_from_hidden` tests what both kinds do."""

import pytest
import torch
from test_from_hidden import V, online_parts

from qat.losses.from_teacher import loss_from_teacher


def test_a_student_like_its_teacher_has_nothing_to_learn() -> None:
    hidden, head, targets = online_parts(torch.float32)
    same = targets._replace(hidden=hidden.detach(), head=head)
    loss = loss_from_teacher(hidden, head, same, {"kl": 1.0})["loss"]
    assert abs(loss.item()) < 1e-6
    assert torch.autograd.grad(loss, hidden)[0].abs().max() < 1e-6


def test_refusals() -> None:
    hidden, head, targets = online_parts()
    with pytest.raises(ValueError, match="temperature=0 must be positive"):
        loss_from_teacher(hidden, head, targets, {"kl": 1.0}, temperature=0)
    narrow = targets._replace(head=targets.head.words(0, V - 1))
    with pytest.raises(ValueError, match="head has 19 words and the teacher's 18"):
        loss_from_teacher(hidden, head, narrow, {"kl": 1.0})
