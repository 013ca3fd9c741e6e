"""How many threads PyTorch computes with on the host, and how they wait."""

import os

from qat.process import cores


def keep_to_own_cores() -> None:
    """Before torch is loaded: as many threads as cores that this process may use, none that spins.

    PyTorch starts one for each core of the machine; in a container that may use a few of them they
    wait for one another. By default a thread that waits spins, on a core that another process may
    need. `OMP_NUM_THREADS` and `OMP_WAIT_POLICY` that somebody set stay.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if cores() < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
