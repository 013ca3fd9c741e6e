"""AdamW in four forms behind one interface, `Mover`; `qat.train.optim` chooses.

Here are PyTorch's own and one kernel for all tensors of a GPU. Weights and moments in bfloat16 have
theirs in `qat.train.adamw16bit`, moments in 8 bits torchao's in `qat.train.adamw8bit`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qat.kernels.adamw import ManyTensors

BETA1, EPS = 0.9, 1e-12
"""AdamW's beta1 and epsilon. PyTorch's epsilon of 1e-8 would shorten the steps of tensors whose
gradients are about as small."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state per parameter, as named in `torch.optim`."""


class Learner(NamedTuple):
    """A parameter with its learning rate and decay."""

    parameter: nn.Parameter
    lr: float
    """Peak learning rate times the natural size that the tensor had when the run began."""
    weight_decay: float
    """Weight decay as AdamW takes it: multiplied by the learning rate before it acts."""


class Mover(Protocol):
    """Updates some of the parameters; its state is saved so that a killed run can be resumed."""

    def move(self, step: int, share: float, factor: Tensor) -> None:
        """Take one step at `share` of the peak learning rates, with gradients times `factor`.

        A factor that is not finite means that the gradients are not; then nothing moves.
        """

    def state(self) -> dict[str, Tensor]:
        """Return step counts and moments by name of parameter."""

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore `state`."""


class TorchAdamW:
    """`torch.optim.AdamW`; its fused kernel applies the factor and skips bad steps itself."""

    def __init__(self, learners: dict[str, Learner], beta2: float, *, is_fused: bool) -> None:
        self._learners = learners
        self._is_fused = is_fused
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for parameter, lr, decay in learners.values():
            groups.setdefault((lr, decay), []).append(parameter)
        self._adamw: Any = torch.optim.AdamW(
            [
                {"params": parameters, "peak_lr": lr, "lr": lr, "weight_decay": decay}
                for (lr, decay), parameters in groups.items()
            ],
            betas=(BETA1, beta2),
            eps=EPS,
            fused=is_fused,
        )

    def move(self, step: int, share: float, factor: Tensor) -> None:
        """See `Mover`; unless fused, gradients that are not finite corrupt all weights."""
        for group in self._adamw.param_groups:
            group["lr"] = group["peak_lr"] * share
        if self._is_fused:
            # attributes through which torch.amp.GradScaler talks to fused optimizers
            self._adamw.grad_scale = 1 / factor
            self._adamw.found_inf = (~factor.isfinite()).float()
        else:
            scale_gradients_(self._learners, factor)
        self._adamw.step()

    def begin(self) -> None:
        """Create missing moments now instead of in the first step."""
        for p, *_ in self._learners.values():
            if not self._adamw.state[p]:
                step = torch.zeros((), device=p.device if self._is_fused else "cpu")
                # computed from the weight so that they are sharded over devices like it
                moments = {name: (p.detach() * 0.0).abs() for name in MOMENTS}
                self._adamw.state[p] = {"step": step, **moments}

    def count_from(self, steps: int) -> None:
        """Set the step count of every parameter to `steps`."""
        for p, *_ in self._learners.values():
            self._adamw.state[p]["step"].fill_(steps)

    def state(self) -> dict[str, Tensor]:
        """See `Mover`."""
        states = {name: self._adamw.state[p] for name, (p, *_) in self._learners.items()}
        return {f"{key}.{name}": t for name, state in states.items() for key, t in state.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """See `Mover`."""
        for name, (p, *_) in self._learners.items():
            if f"step.{name}" not in state:
                continue  # saved before its first gradient, which creates the moments
            step = state[f"step.{name}"].to(p.device if self._is_fused else "cpu")
            moments = {moment: state[f"{moment}.{name}"].to(p.device) for moment in MOMENTS}
            self._adamw.state[p] = {"step": step, **moments}


class Counted:
    """A base class of optimizers with one step count for all tensors, and moments for each."""

    def __init__(self, device: torch.device, beta2: float) -> None:
        self._betas = BETA1, beta2
        self._count = torch.zeros((), device=device)
        self._logs = torch.tensor(self._betas, dtype=torch.float64).log().float().to(device)
        self._moments: Mapping[str, tuple[Tensor, Tensor]] = {}
        """The two moments by name of parameter."""

    def _advance(self, factor: Tensor) -> Tensor:
        """Count a step, unless its `factor` is not finite; return the `shared` of the kernels."""
        self._count += factor.isfinite()
        bias1, bias2 = (-torch.expm1(self._count * self._logs)).unbind()
        return torch.stack([factor, bias1, bias2.sqrt()])

    def state(self) -> dict[str, Tensor]:
        """See `Mover`."""
        found = {f"step.{name}": self._count.clone() for name in self._moments}
        for name, both in self._moments.items():
            found |= {f"{key}.{name}": t for key, t in zip(MOMENTS, both, strict=True)}
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """See `Mover`; of `TorchAdamW`'s counts, one for each parameter, the largest is taken."""
        for name, both in self._moments.items():
            if f"step.{name}" not in state:
                continue  # `TorchAdamW` saved it before its first gradient
            count = state[f"step.{name}"].to(self._count.device)
            self._count.copy_(torch.maximum(self._count, count))
            for key, tensor in zip(MOMENTS, both, strict=True):
                tensor.copy_(state[f"{key}.{name}"])


class KernelAdamW(Counted):
    """AdamW for float32 tensors of a GPU, all updated by one kernel."""

    def __init__(self, learners: dict[str, Learner], beta2: float) -> None:
        parameters = {name: each.parameter.detach() for name, each in learners.items()}
        super().__init__(next(iter(parameters.values())).device, beta2)
        self._learners = learners
        self._moments = {
            name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()
        }
        self._tensors = ManyTensors(
            [(p, *self._moments[name]) for name, p in parameters.items()],
            [(each.lr, each.lr * each.weight_decay) for each in learners.values()],
        )

    def move(self, step: int, share: float, factor: Tensor) -> None:
        """See `Mover`."""
        gradients = [each.parameter.grad for each in self._learners.values()]
        self._tensors.step_(gradients, self._advance(factor), share, self._betas, EPS)


def scale_gradients_(learners: dict[str, Learner], factor: Tensor) -> None:
    """Multiply all existing gradients by a scalar on their device."""
    gradients = [p.grad for p, *_ in learners.values() if p.grad is not None]
    torch._foreach_mul_(gradients, factor)
