"""Tiny models, made in the test: nothing here reaches a network or a downloaded file."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
