"""Decoding kernels where Triton is missing."""

import subprocess
import sys

import pytest

WITHOUT_TRITON = """
import importlib, pkgutil, sys

sys.modules["triton"] = None  # an import of it fails

from qat.extensions.decode import kernels

for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
    importlib.import_module(module.name)
assert not kernels.launch.IS_COMPILED
"""


@pytest.mark.slow
def test_every_decoding_kernel_can_be_imported_without_triton() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_TRITON], check=True)
