"""Kernels where Triton is missing, and what counts as their plain PyTorch."""

import subprocess
import sys
from collections import Counter

import pytest

from qat.kernels import dispatch

WITHOUT_TRITON = """
import importlib, pkgutil, sys

sys.modules["triton"] = None  # an import of it fails

import torch
import qat.kernels
from qat.kernels import dispatch, topk

for module in pkgutil.walk_packages(qat.kernels.__path__, "qat.kernels."):
    importlib.import_module(module.name)
assert not dispatch.HAS_TRITON
assert topk.top_k_of_logits(torch.eye(3), 1).ids.flatten().tolist() == [0, 1, 2]
"""


@pytest.mark.slow
def test_every_file_of_kernels_can_be_imported_without_triton() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_TRITON], check=True)


def test_only_plain_pytorch_on_a_gpu_counts_as_such(monkeypatch) -> None:
    ways = {
        ("qat.kernels.head", "pytorch", "cuda"): 2,
        ("qat.kernels.head", "triton", "cuda"): 5,
        ("qat.kernels.topk", "pytorch", "cpu"): 7,
    }
    monkeypatch.setattr(dispatch, "_taken", Counter(ways))
    assert dispatch.plain_on_gpu() == {"head": 2}
