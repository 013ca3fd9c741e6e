"""XLA is initialised before any test runs: autograd counts the devices at its first backward."""

import os
from importlib.util import find_spec

# what is compiled here runs for milliseconds
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("XLA_FLAGS", FLAGS)

if find_spec("torch_xla") is not None:
    from qat.backend.device import select

    select("xla")
