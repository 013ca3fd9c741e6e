"""AdamW of torchao with moments of 8 bits, behind the interface `qat.train.adamw.Mover`."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from qat.errors import ConfigError, how_to_install
from qat.train.adamw import BETA1, EPS, MOMENTS, Learner, scale_gradients_


class EightBitAdamW:
    """`torchao.optim.AdamW8bit`: two bytes of moments a weight, in blocks of 256 with one scale.

    torchao compiles its step once per shape, except on a CPU, where it runs eagerly. Weights in
    bfloat16 are rounded stochastically with bits from PyTorch's generator.
    """

    def __init__(self, learners: dict[str, Learner], beta2: float, *, may_overflow: bool) -> None:
        try:
            with _quiet():
                from torchao.optim import AdamW8bit
                from torchao.optim.subclass_8bit import OptimState8bit
        except ModuleNotFoundError:
            raise ConfigError(
                "optimizer=adamw8bit needs torchao, which is not installed; use --optimizer adamw, "
                f"or: {how_to_install('adam8bit')}"
            ) from None
        self._kind = OptimState8bit
        self._learners = learners
        self._may_overflow = may_overflow
        # with rates as tensors, each tensor's step need not be compiled separately
        self._adamw = AdamW8bit(
            [
                {"params": [p], "lr": torch.tensor(lr), "weight_decay": torch.tensor(decay)}
                for p, lr, decay in learners.values()
            ],
            betas=(BETA1, beta2),
            eps=EPS,
            bf16_stochastic_round=True,
        )

    def move(self, step: int, share: float, factor: Tensor) -> None:
        """See `Mover`; in float16 the host waits to find out whether to skip the step."""
        if self._may_overflow and not factor.isfinite().item():
            return
        scale_gradients_(self._learners, factor)
        for group, learner in zip(self._adamw.param_groups, self._learners.values(), strict=True):
            group["lr"].fill_(learner.lr * share)
        is_eager = factor.device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if is_eager else nullcontext():
            self._adamw.step()

    def state(self) -> dict[str, Tensor]:
        """See `Mover`; an 8-bit moment is stored as its parts."""
        found: dict[str, Tensor] = {}
        for name, (parameter, *_) in self._learners.items():
            for key, value in self._adamw.state[parameter].items():
                parts = value.tensor_attrs if isinstance(value, self._kind) else ()
                found |= {f"{key}_{part}.{name}": getattr(value, part) for part in parts}
                if not parts:
                    found[f"{key}.{name}"] = value
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """See `Mover`."""
        if not any(f"step.{name}" in state for name in self._learners):
            return  # saved before the first step, which creates the moments
        for name, (p, *_) in self._learners.items():
            restored = {"step": state[f"step.{name}"].cpu()}
            for key in MOMENTS:
                if f"{key}.{name}" in state:  # small tensors keep unquantized moments
                    restored[key] = state[f"{key}.{name}"].to(p.device)
                    continue
                parts = [state[f"{key}_{part}.{name}"] for part in self._kind.tensor_attrs]
                parts = [part.to(p.device) for part in parts]
                restored[key] = self._kind(*parts, signed=key == "exp_avg", dtype=p.dtype)
            self._adamw.state[p] = restored


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and log lines in the block: torchao reports what its other parts lack."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
