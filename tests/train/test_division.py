"""The division of work among ranks and their agreement, without any other rank."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from qat.train.step import TrainingStep


@pytest.mark.parametrize(
    ("lag", "decisions"), [(0, [True, False, True]), (2, [False, False, True])]
)
def test_ranks_stop_by_what_a_step_before_said(lag: int, decisions: list[bool]) -> None:
    backend = SimpleNamespace(
        decision_lag=lag, to_host=lambda it: it, finished=lambda: lambda: None
    )
    step = SimpleNamespace(backend=backend, _stops=deque())
    counts = [torch.tensor(count) for count in (1, 0, 2)]
    assert [TrainingStep._agree_on_stop(step, count) for count in counts] == decisions
