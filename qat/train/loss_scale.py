"""A factor that keeps float16 gradients within float16's range."""

import torch
from torch import Tensor

START, GROWTH_INTERVAL = 2.0**16, 2000


class LossScale:
    """A power of two: halved when gradients overflow, doubled after 2000 steps in which none did.

    The rule and numbers of `torch.amp.GradScaler`. That class reads every gradient once more to
    look for overflow and asks the host whether to step; here the gradients' norm, which clipping
    needs anyway, tells, and nothing leaves the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(START, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        """Since the scale changed last."""

    def settle(self, norm: Tensor) -> Tensor:
        """Set the next step's scale by this step's norm of gradients, before clipping.

        Returns the norm that the trainer should see: zero where the step is skipped because it
        overflowed and a lower scale is left to try.
        """
        has_overflowed = ~norm.isfinite()
        is_hopeless = self.scale <= 1
        grown = self.good_steps + 1
        is_due = grown >= GROWTH_INTERVAL
        raised = torch.where(is_due, self.scale * 2, self.scale)
        lowered = (self.scale / 2).clamp(min=1)
        # in place: a captured graph multiplies by this very tensor
        self.scale.copy_(torch.where(has_overflowed, lowered, raised))
        self.good_steps.copy_(torch.where(has_overflowed | is_due, 0, grown))
        return torch.where(has_overflowed & ~is_hopeless, 0.0, norm)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"loss_scale.scale": self.scale, "loss_scale.good_steps": self.good_steps}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from `state`."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
