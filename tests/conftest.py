"""Tiny models, made in the test: nothing here reaches a network or a downloaded file."""

import gc
import os
import shutil
import sys

# without a GPU, Triton's kernels run in its interpreter; it looks at this when it is imported
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of garbage collection: each would take half a second."""
    if "triton.runtime.interpreter" in sys.modules:
        from triton_interpreter import without_waste

        without_waste()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
