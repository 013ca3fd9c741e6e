"""Checks that a run's numbers are finite.

A quantizer maps NaN to a level like any other weight, so a student with NaN latent weights has a
finite loss and finite gradients: parameters and optimizer state must be checked themselves.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def nan_if_not_finite(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return 0, or NaN if a value on `device` is NaN or infinite: `()` float32 on `device`.

    Reads each tensor once and does not wait. Integers, and tensors on other devices, are skipped.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in {id(tensor): tensor.detach() for tensor in tensors.values()}.values():
        if tensor.is_floating_point() and tensor.device == device and tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    # a sum propagates NaN and infinity on every device; a maximum may not
    whole = torch.zeros((), device=device)
    for dtype, found in by_dtype.items():
        sums = torch._foreach_norm(found, 1, dtype=torch.promote_types(dtype, torch.float32))
        whole = whole + (0.0 * torch.stack(sums)).sum().float()
    return whole


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first tensor with NaN or infinity, and their number; None if all are finite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and nan_if_not_finite({name: tensor}, tensor.device).isnan():
            count = (~tensor.detach().isfinite()).sum().item()
            return f"{name}: {count:,} of {tensor.numel():,} values are NaN or infinite"
    return None
