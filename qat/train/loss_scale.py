"""The loss scale of float16."""

import torch
from torch import Tensor

START, GROWTH_INTERVAL = 2.0**16, 2000
"""First loss scale and good steps before it doubles, as in `torch.amp.GradScaler`."""


class LossScale:
    """A power of two: halved when gradients overflow, doubled after 2000 steps without overflow.

    The rule and numbers are those of `torch.amp.GradScaler`. That class reads every gradient once
    more to look for overflow, and the host waits to decide whether to step; here the gradients'
    norm, which clipping computes anyway, shows an overflow, and nothing leaves the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(START, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        """Steps since the last change of the scale."""

    def settle(self, norm: Tensor) -> Tensor:
        """Set the next step's scale from this step's gradient norm before clipping.

        Returns:
            The norm for the trainer: zero if the step is skipped because of an overflow and the
            scale can still be lowered.
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
        """Return the tensors for a checkpoint."""
        return {"loss_scale.scale": self.scale, "loss_scale.good_steps": self.good_steps}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore `state`."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
