"""The memory of a formed weight: a leaf of autograd that hands its gradient on and keeps none."""

from collections.abc import Callable

import torch
from torch import Tensor


def room_for(
    old: Tensor | None,
    like: Tensor,
    shape: tuple[int, int],
    *,
    dtype: torch.dtype,
    take_gradient: Callable[[Tensor], None] | None,
) -> Tensor:
    """Where to write a weight: `old` again where it fits, so that its address stays, or a new one.

    With `take_gradient` the weight requires a gradient, which goes there as soon as it is complete
    and is freed before another weight's; None if nothing behind the weight learns.
    """
    learns = take_gradient is not None
    kind = (shape, dtype, like.device, learns)
    if old is not None and (tuple(old.shape), old.dtype, old.device, old.requires_grad) == kind:
        return old
    room = torch.empty(shape, dtype=dtype, device=like.device, requires_grad=learns)
    if learns:

        def hand_on(weight: Tensor) -> None:
            dW, weight.grad = weight.grad, None
            take_gradient(dW)

        room.register_post_accumulate_grad_hook(hand_on)
    return room
