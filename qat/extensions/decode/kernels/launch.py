"""Launch options of the decoding kernels: device features and overlapping launches."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qat.kernels.dispatch import HAS_TRITON, Missing, triton

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # also a Triton build for other than NVIDIA GPUs
    gdc_launch_dependents = gdc_wait = Missing()

IS_COMPILED = HAS_TRITON and not triton.knobs.runtime.interpret
"""False in Triton's interpreter (`TRITON_INTERPRET=1`), which has no assembly and no registers.

Like every `@triton.jit`, it is fixed at import.
"""

HOPPER = (9, 0)
"""The first compute capability with programmatic dependent launch."""


def has_warpgroups(device: torch.device) -> bool:
    """Return whether the device has `wgmma` (four warps multiply together): Hopper only."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER[0]


_overlap_enabled = [True]


def overlapping(device: torch.device) -> dict[str, bool]:
    """Return launch options for a kernel of a decoding step that may overlap with the one before.

    The weights are not the result of a kernel: the kernel prefetches the first of them, and waits
    only before it reads what the previous kernel wrote (programmatic dependent launch). Each kernel
    of the chain waits, so that the results of all earlier ones are visible. A token of a 4B shape
    at 2 bits took 1.66 ms with it and 1.84 without (one H200).
    """
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER
    if _overlap_enabled[0] and is_hopper:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Disable overlap inside the block, so that every launch waits for the one before."""
    _overlap_enabled[0] = False
    try:
        yield
    finally:
        _overlap_enabled[0] = True
