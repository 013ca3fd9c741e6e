"""The division of work among ranks and their agreement, without any other rank."""

from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from train_case import config

from qat.data.sampler import sequence_indices
from qat.errors import TrainingError
from qat.train.saver import check_alike
from qat.train.step import TrainingStep, rank_indices


def test_ranks_share_what_one_would_see(tmp_path) -> None:
    draw = partial(sequence_indices, num_sequences=100)
    alone = SimpleNamespace(size=1, rank=0)
    whole = rank_indices(config(tmp_path, batch_size=4), 3, draw, alone)
    half = config(tmp_path, batch_size=2)
    two = [SimpleNamespace(size=2, rank=rank) for rank in (0, 1)]
    parts = [rank_indices(half, 3, draw, ranks) for ranks in two]
    assert parts[0].shape == (half.grad_accum_steps, 2)
    assert np.array_equal(np.concatenate(parts, axis=1), whole)


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


def test_only_others_are_asked_for_their_bits() -> None:
    weights = [torch.ones(3)]
    check_alike(weights, 1, SimpleNamespace(size=1))
    check_alike(weights, 1, SimpleNamespace(size=2, texts=lambda said: [said, said]))
    with pytest.raises(TrainingError, match="step 1 rank 1 .* rank 0"):
        check_alike(weights, 1, SimpleNamespace(size=2, texts=lambda said: [said, "others"]))
