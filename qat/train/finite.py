"""Whether all numbers of a run are numbers: asked on the device, named on the host.

A quantizer gives NaN a level like any other weight, so a student whose latent weights are NaN has a
finite loss and finite gradients. Only a look at what learns and at what moves it tells.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def trouble(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """`()` float32 on `device`: 0, or NaN where a value there is NaN or infinite.

    Reads each tensor once and does not wait. Integers, and tensors elsewhere, are left out.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in {id(tensor): tensor.detach() for tensor in tensors.values()}.values():
        if tensor.is_floating_point() and tensor.device == device and tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    # a sum keeps NaN and infinity on every device, which a maximum need not
    whole = torch.zeros((), device=device)
    for dtype, found in by_dtype.items():
        sums = torch._foreach_norm(found, 1, dtype=torch.promote_types(dtype, torch.float32))
        whole = whole + (0.0 * torch.stack(sums)).sum().float()
    return whole


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor with NaN or infinity, and how many it holds; None where there is none."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and trouble({name: tensor}, tensor.device).isnan():
            count = (~tensor.detach().isfinite()).sum().item()
            return f"{name}: {count:,} of {tensor.numel():,} values are NaN or infinite"
    return None
