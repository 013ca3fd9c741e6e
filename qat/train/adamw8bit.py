"""AdamW with moments of eight bits each, from torchao."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from qat.errors import ConfigError, how_to_install
from qat.train.adamw import BETA1, EPS, Learner, scale_gradients_
from qat.train.config import TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


@contextmanager
def _quiet() -> Iterator[None]:
    """A block without warnings and log lines: torchao says what it misses for its other parts."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


try:
    with _quiet():
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit
except ModuleNotFoundError:
    raise ConfigError(
        "optimizer=adamw8bit needs torchao, which is not installed; use --optimizer adamw, or: "
        f"{how_to_install('adam8bit')}"
    ) from None


class EightBitAdamW:
    """`torchao.optim.AdamW8bit`: two bytes of moments a weight, in blocks of 256 with one scale.

    torchao compiles its step once per shape, except on a CPU, where it runs as it is. Weights in
    bfloat16 are rounded stochastically with bits from PyTorch's generator.
    """

    def __init__(
        self, learners: dict[str, Learner], config: TrainConfig, *, may_overflow: bool
    ) -> None:
        self._learners = learners
        self._may_overflow = may_overflow
        # rates that are tensors do not make each tensor's step another one to compile
        self._adamw = AdamW8bit(
            [
                {"params": [p], "lr": torch.tensor(lr), "weight_decay": torch.tensor(decay)}
                for p, lr, decay in learners.values()
            ],
            betas=(BETA1, config.beta2),
            eps=EPS,
            bf16_stochastic_round=True,
        )

    def move(self, step: int, share: float, factor: Tensor) -> None:
        """See `qat.train.adamw.Mover`; in float16 it asks the host whether to skip the step."""
        if self._may_overflow and not factor.isfinite().item():
            return
        scale_gradients_(self._learners, factor)
        for group, learner in zip(self._adamw.param_groups, self._learners.values(), strict=True):
            group["lr"].fill_(learner.lr * share)
        with _eager_on_cpu(factor.device):
            self._adamw.step()

    def state(self) -> dict[str, Tensor]:
        """See `qat.train.adamw.Mover`; an eight-bit moment is kept by its parts."""
        found = {}
        for name, (parameter, *_) in self._learners.items():
            for key, value in self._adamw.state[parameter].items():
                parts = value.tensor_attrs if isinstance(value, OptimState8bit) else ()
                found |= {f"{key}_{part}.{name}": getattr(value, part) for part in parts}
                if not parts:
                    found[f"{key}.{name}"] = value
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """See `qat.train.adamw.Mover`."""
        for name, (parameter, *_) in self._learners.items():
            moments = {key: _moment(key, name, parameter, state) for key in MOMENTS}
            self._adamw.state[parameter] = {"step": state[f"step.{name}"].cpu(), **moments}


def _moment(key: str, name: str, parameter: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
    """A moment from its parts; torchao leaves those of small tensors as they are."""
    if f"{key}.{name}" in state:
        return state[f"{key}.{name}"].to(parameter.device)
    parts = [state[f"{key}_{part}.{name}"] for part in OptimState8bit.tensor_attrs]
    parts = [part.to(parameter.device) for part in parts]
    return OptimState8bit(*parts, signed=key == "exp_avg", dtype=parameter.dtype)


def _eager_on_cpu(device: torch.device) -> AbstractContextManager:
    if device.type != "cpu":
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
