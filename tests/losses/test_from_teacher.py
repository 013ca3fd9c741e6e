"""What only losses against a whole teacher do; `test_from_hidden` tests what both kinds do."""

import pytest
import torch
from test_from_hidden import V, online_parts
from torch.nn import functional as F

from qat.losses.from_teacher import loss_from_teacher


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_kl_equals_the_textbook(temperature: float) -> None:
    hidden, head, targets = online_parts()
    pair = (head.logits(hidden), targets.head.logits(targets.hidden))
    log_q, log_p = ((z / temperature).log_softmax(1)[targets.mask] for z in pair)
    expected = temperature**2 * F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    actual = loss_from_teacher(hidden, head, targets, {"kl": 1.0}, temperature=temperature)
    torch.testing.assert_close(actual["loss"], expected)
    found = torch.autograd.grad(actual["loss"], hidden)
    torch.testing.assert_close(found, torch.autograd.grad(expected, hidden))


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
