"""One thread: the models are tiny, and other tests may run beside these."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_seeded: None) -> None:
    torch.set_num_threads(1)
