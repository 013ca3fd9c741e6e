"""Chunking changes memory and nothing else."""

import pytest
import torch
from teacher_targets import targets_of
from torch import Tensor, nn

from qat.losses.chunked import loss_from_hidden
from qat.losses.registry import LOSSES

T, D, V = 13, 6, 19
TERMS = {"tail": 1.0, "hard_ce": 0.25, "sampled": 0.5}


def parts(dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Tensor]:
    hidden = torch.randn(T, D, dtype=dtype, requires_grad=True)
    return hidden, nn.Linear(D, V, dtype=dtype), torch.randn(T, V)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100])
def test_equals_the_unchunked_value_and_gradients(chunk_tokens: int) -> None:
    hidden, head, teacher = parts()
    targets = targets_of(teacher, 5)
    sums = {name: LOSSES[name](head(hidden), targets, temperature=2.0) for name in TERMS}
    expected = sum(weight * sums[name] for name, weight in TERMS.items())
    actual = loss_from_hidden(
        hidden, head, targets, TERMS, temperature=2.0, chunk_tokens=chunk_tokens
    )
    assert set(actual) == {*TERMS, "loss"}
    torch.testing.assert_close(actual, {**sums, "loss": expected})
    inputs = [hidden, *head.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(actual["loss"], inputs), torch.autograd.grad(expected, inputs)
    )


def test_weights_and_temperature_change_the_loss() -> None:
    hidden, head, teacher = parts()
    targets = targets_of(teacher, 5)
    plain = loss_from_hidden(hidden, head, targets, {"tail": 1.0})["loss"]
    double = loss_from_hidden(hidden, head, targets, {"tail": 2.0})["loss"]
    warm = loss_from_hidden(hidden, head, targets, {"tail": 1.0}, temperature=3.0)["loss"]
    torch.testing.assert_close(double, 2 * plain)
    assert not torch.allclose(warm, plain)


def test_all_logits_never_exist_at_once() -> None:
    hidden, head, teacher = parts()
    rows = []

    def counted(hidden_rows: Tensor) -> Tensor:
        rows.append(len(hidden_rows))
        return head(hidden_rows)

    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], _same):
        loss = loss_from_hidden(hidden, counted, targets_of(teacher, 5), TERMS, chunk_tokens=4)
    loss["loss"].backward()
    assert max(rows) == 4
    assert sum(rows) == 2 * T, "the head runs once forward and once more in backward"
    assert max(sizes, default=0) <= T * D, "no logits are kept for backward"


def _same(tensor: Tensor) -> Tensor:
    return tensor


def test_runs_under_autocast_and_without_gradients() -> None:
    hidden, head, teacher = parts(torch.float32)
    targets = targets_of(teacher, 5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_from_hidden(hidden, head, targets, {"tail": 1.0}, chunk_tokens=4)["loss"]
    assert loss.dtype == torch.float32
    loss.backward()
    assert head.weight.grad.isfinite().all()
    with torch.no_grad():
        exact = loss_from_hidden(hidden, head, targets, {"tail": 1.0}, chunk_tokens=4)["loss"]
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
