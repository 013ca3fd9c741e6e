"""Whether a kernel of a decoding step may start while the one before it ends.

Its weights are no kernel's result: it reads the first of them meanwhile, and waits only before what
the one before wrote (programmatic dependent launch, Hopper and later). Each kernel of the chain
waits, so that what an earlier one wrote is there too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

HOPPER = (9, 0)

_is_wanted = [True]


def overlaps(device: torch.device) -> bool:
    """Whether kernels on `device` are launched so."""
    return (
        _is_wanted[0]
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= HOPPER
    )


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Run a block with every launch waiting for the one before: to compare with."""
    _is_wanted[0] = False
    try:
        yield
    finally:
        _is_wanted[0] = True
