"""Which parameters learn, and AdamW with a learning rate for each kind of them."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from qat.errors import ConfigError
from qat.nn.quant_linear import SCALE_NAMES
from qat.nn.step import quant_linears
from qat.train.config import TrainConfig
from qat.train.schedule import lr_share

SCOPE_PART = {"mlp": ".mlp.", "attention": ".self_attn.", "e2e": "."}


def linears_in_scope(model: nn.Module, scope: str) -> list[str]:
    """Names of the quantized linears that may learn.

    Raises:
        ConfigError: there are none.
    """
    names = [name for name in quant_linears(model) if SCOPE_PART[scope] in name]
    if not names:
        raise ConfigError(
            f"the student has no quantized linears in scope {scope}; quantize it first with "
            "'qat convert' or choose another scope"
        )
    return names


def learnable(model: nn.Module, names: list[str], kinds: tuple[str, ...]) -> dict[str, list[str]]:
    """Parameter names by kind: of the linears `names`, and of every norm if norms learn.

    Raises:
        ConfigError: a wished kind has no parameters here.
    """
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    modules = quant_linears(model)
    for name in names:
        for local in modules[name].weight_parameters():
            kind = "scales" if local in SCALE_NAMES else "weights" if local == "weight" else local
            is_fixed_grid = kind == "codebook" and modules[name].spec.codebook != "lut"
            if kind in found and not is_fixed_grid:
                found[kind].append(f"{name}.{local}")
    if "norms" in found:
        found["norms"] = [n for n, p in model.named_parameters() if p.dim() == 1 and "norm" in n]
    for kind, parameters in found.items():
        if not parameters:
            raise ConfigError(
                f"learn={kind}, but the linears in scope hold no {kind} that can learn; drop it "
                "from --learn"
            )
    return found


class Optimizer:
    """AdamW over the learnable parameters; everything else is frozen here.

    Each tensor's learning rate is its kind's, times the schedule, times the root mean square that
    the tensor had when the run began.
    """

    def __init__(
        self,
        model: nn.Module,
        by_kind: dict[str, list[str]],
        config: TrainConfig,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        self._config = config
        wanted = {name for names in by_kind.values() for name in names}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in wanted)
            if name in wanted:
                self.parameters[name] = parameter
        state = state or {}
        # a run that goes on keeps the sizes that it began with
        self.sizes = {
            n: state[f"size.{n}"].item() if state else _rms(p) for n, p in self.parameters.items()
        }
        # a norm's weight scales by itself or by one more than itself: its natural size is one
        self.sizes |= dict.fromkeys(by_kind.get("norms", ()), 1.0)
        self._peaks = {n: _peak(kind, config) for kind, names in by_kind.items() for n in names}
        self._adamw = torch.optim.AdamW(
            self._groups(by_kind),
            betas=(0.9, config.beta2),
            eps=1e-12,
            weight_decay=0.0,
            fused=next(iter(self.parameters.values())).is_cuda,
        )
        if state:
            self._load(state)

    def _groups(self, by_kind: dict[str, list[str]]) -> list[dict]:
        groups = defaultdict(list)
        for kind, names in by_kind.items():
            for name in names:
                size = self.sizes[name]
                # AdamW multiplies the decay by the learning rate, which here holds the size
                decay = self._config.weight_decay / size if kind == "weights" else 0.0
                groups[self._peaks[name] * size, decay].append(name)
        return [
            {
                "params": [self.parameters[name] for name in names],
                "peak_lr": lr,
                "lr": lr,
                "weight_decay": decay,
            }
            for (lr, decay), names in groups.items()
        ]

    def step(self, step: int) -> Tensor:
        """Clip, move every parameter, forget the gradients; returns the norm before clipping."""
        share = self.lr_share(step)
        for group in self._adamw.param_groups:
            group["lr"] = group["peak_lr"] * share
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self._config.clip_grad_norm)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm

    def lr_share(self, step: int) -> float:
        """The schedule's share of the peak at `step`."""
        config = self._config
        return lr_share(
            step,
            config.max_steps,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            min_ratio=config.min_lr_ratio,
        )

    def state(self) -> dict[str, Tensor]:
        """Parameters, moments and starting sizes as flat tensors, for a checkpoint."""
        tensors = {}
        for name, parameter in self.parameters.items():
            tensors[f"parameter.{name}"] = parameter.detach()
            tensors[f"size.{name}"] = torch.tensor(self.sizes[name], dtype=torch.float64)
            for key, value in self._adamw.state[parameter].items():
                tensors[f"{key}.{name}"] = value
        return tensors

    @torch.no_grad()
    def _load(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state[f"parameter.{name}"])
            # the step count lives on the device only for the fused kernel
            count = state[f"step.{name}"]
            self._adamw.state[parameter] = {
                "step": count.to(parameter.device) if parameter.is_cuda else count,
                "exp_avg": state[f"exp_avg.{name}"].to(parameter.device),
                "exp_avg_sq": state[f"exp_avg_sq.{name}"].to(parameter.device),
            }


def _peak(kind: str, config: TrainConfig) -> float:
    return config.lr if kind == "weights" else getattr(config, f"lr_{kind}")


def _rms(parameter: Tensor) -> float:
    return max(parameter.detach().double().pow(2).mean().sqrt().item(), 1e-8)
