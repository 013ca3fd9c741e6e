"""AdamW for a loop of one's own, with the kernel that 'qat train' has on a GPU."""

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from qat.kernels import adamw as kernels
from qat.kernels.adamw import ManyTensors
from qat.kernels.dispatch import use_triton
from qat.train.adamw import MOMENTS

SETTINGS = itemgetter("betas", "eps", "amsgrad", "maximize", "capturable", "differentiable")
"""A function that returns those settings of a group that all groups of one kernel must share."""

STATE = ("step", *MOMENTS)
"""The entries of a parameter's state that the kernel reads and writes."""

Rates = list[tuple[float, float]]
"""The learning rate of each tensor, and that times its weight decay."""


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, whose step on a GPU is one kernel for all tensors.

        optimizer = qat.AdamW(qat.param_groups(student))

    Its arguments, groups and state are PyTorch's, so either goes on from the other's `state_dict`,
    and rates may change from step to step. The kernel takes plain float32 tensors of one GPU with
    the same betas and epsilon; all others, and options such as `amsgrad`, take PyTorch's own step.
    """

    _together: "_Together | None" = None
    _places: list[int] | None = None
    """The addresses for which `_together` was made."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of `closure`, which recomputes the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        learning = [
            (p, group)
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad or p.grad is not None
        ]
        parameters = [p for p, _ in learning]
        if parameters and self._is_one_kernel(parameters):
            betas, eps, *_ = SETTINGS(self.param_groups[0])
            rates = [(group["lr"], group["lr"] * group["weight_decay"]) for _, group in learning]
            self._gathered(parameters, rates).step_([p.grad for p in parameters], rates, betas, eps)
        else:
            _plain_step()(self)
        return loss

    def _is_one_kernel(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether one kernel can take this step."""
        if not use_triton(parameters[0], kernels.__name__):
            return False
        first = betas, _, *others = SETTINGS(self.param_groups[0])
        numbers = [*betas, *(group["lr"] for group in self.param_groups)]
        return (
            not any(others)
            and all(SETTINGS(group) == first for group in self.param_groups)
            and not any(isinstance(number, Tensor) for number in numbers)
            # what a gradient scaler leaves for an optimizer with fused=True
            and getattr(self, "found_inf", None) is None
            # a subclass may be divided over ranks
            and all(type(p) in {Tensor, nn.Parameter} for p in parameters)
            and all(p.dtype == torch.float32 and p.is_contiguous() for p in parameters)
            and len({p.device for p in parameters}) == 1
            # PyTorch moves a tensor twice that a group holds twice, and the kernel would at once
            and len({*map(id, parameters)}) == len(parameters)
        )

    def _gathered(self, parameters: Sequence[Tensor], rates: Rates) -> "_Together":
        """Return the kernel's tables of addresses; rebuild them if a tensor has moved."""
        if self._together is None or self._addresses(parameters) != self._places:
            for group in self.param_groups:
                group["fused"] = True  # PyTorch too has the steps of such groups on the GPU
            self._together = _Together([self.state[p] for p in parameters], parameters, rates)
            self._places = self._addresses(parameters)
        return self._together

    def _addresses(self, parameters: Sequence[Tensor]) -> list[int]:
        """Return where the parameters and their states lie: loops reset states and move them."""
        known = [(p, self.state.get(p, {})) for p in parameters]
        states = [state[name] for _, state in known for name in STATE if name in state]
        return [tensor.data_ptr() for tensor in (*parameters, *states)]


class _Together:
    """Tensors that one kernel updates as long as they stay where they are."""

    def __init__(
        self, states: Sequence[dict[str, Tensor]], parameters: Sequence[Tensor], rates: Rates
    ) -> None:
        device = parameters[0].device
        none = torch.zeros((), device=device)
        steps = [state.get("step", none).to(device, torch.float32) for state in states]
        self._counts = torch.stack(steps)
        self._steps = self._counts.unbind()
        for state, p, step in zip(states, parameters, self._steps, strict=True):
            state["step"] = step  # an element of the counts
            for name in MOMENTS:
                # a state may have stayed where its model was, or in the dtype that it had
                moment = state[name].to(p).expand_as(p) if name in state else torch.zeros_like(p)
                state[name] = moment.contiguous()
        # the kernel knows addresses alone, so that the moments must be kept
        self._tensors = [
            (p.detach(), *(state[name] for name in MOMENTS))
            for p, state in zip(parameters, states, strict=True)
        ]
        self._many, self._rates = ManyTensors(self._tensors, rates), rates

    def step_(
        self,
        gradients: Sequence[Tensor | None],
        rates: Rates,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Take one step; the host does not wait."""
        if rates != self._rates:
            self._many.set_rates(rates)
            self._rates = rates
        given = zip(self._steps, gradients, strict=True)
        counted = [step for step, gradient in given if gradient is not None]
        if not counted:
            return
        torch._foreach_add_(counted, 1.0)
        # in float64, as PyTorch's kernel: 1 - 0.999 has three digits fewer than its terms
        exact = self._counts.double()
        bias1, bias2 = (1 - beta**exact for beta in betas)
        shared = torch.stack([torch.ones_like(exact), bias1, bias2.sqrt()], 1).float()
        self._many.step_(gradients, shared, 1.0, betas, eps)


def _plain_step() -> Callable[[torch.optim.AdamW], Any]:
    """Return PyTorch's step without the hooks of an optimizer, which surround `AdamW.step` too."""
    step = torch.optim.AdamW.step
    return inspect.unwrap(step, stop=lambda each: not hasattr(each, "hooked"))
