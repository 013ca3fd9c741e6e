"""How many threads PyTorch computes with on the host."""

import os

from qat.process import cores


def keep_to_own_cores() -> None:
    """Before torch is loaded: no more threads than cores that this process may use.

    PyTorch starts one for each core of the machine; in a container that may use a few of them they
    wait for one another. `OMP_NUM_THREADS` that somebody set stays.
    """
    if cores() < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
