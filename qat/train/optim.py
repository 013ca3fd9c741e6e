"""Which parameters learn, and AdamW with a learning rate for each kind of them.

Beside the `Optimizer` stand the schedule of its rates and the scale of float16 losses.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Literal, cast

import torch
from torch import Tensor, nn

from qat.backend import device as backend
from qat.backend.base import Copying
from qat.errors import ConfigError
from qat.models.stored_state import INPUT_SCALE
from qat.nn.hosted import HostedLutLinear
from qat.nn.quant_linear import KIND_OF, LutLinear
from qat.nn.sharded import ShardedLutLinear
from qat.nn.sites import routers
from qat.nn.step import quant_linears
from qat.nsa.fit import natural_size
from qat.quant.spec import role_of
from qat.quant.weight import rms
from qat.ranks import ALONE, Ranks
from qat.train.adamw import MOMENTS, EightBitAdamW, Learner, Mover, StochasticAdamW, TorchAdamW
from qat.train.config import KINDS, TrainConfig

FORGOTTEN, LATE = 2.0**-24, 2**24
"""What is lost beside one in float32; a number of steps at which all moments are as in the end."""
LEAST_SHARE = 2.0**-64
"""Of a peak learning rate, where steps are compiled: rates that are zero would all be one constant,
and the step another graph. It moves no weight by what float32 would keep."""
DECAY_FRAC = 0.2
"""The share of a run's steps over which `wsd` falls: the last fifth."""
START, GROWTH_INTERVAL = 2.0**16, 2000
"""The loss scale's first value and the good steps before it doubles, as `torch.amp.GradScaler`."""
WHY_NONE = {
    "gates": "the student's attention has no gates (it is dense, or its branches are merged): "
    "convert with --attention nsa",
    "router": "the student has no experts to choose among",
}
"""Why a kind that is not of linears may have no parameters."""
NSA_PART = ".nsa."
"""In the name of every parameter that sparse attention adds: gates and pooling weights."""


def linears_in_scope(model: nn.Module, scope: str, kinds: tuple[str, ...] = KINDS) -> list[str]:
    """Names of the quantized linears that may learn.

    Raises:
        ConfigError: there are none, though one of `kinds` is theirs.
    """
    names = [name for name in quant_linears(model) if scope in ("e2e", role_of(name))]
    if not names and set(kinds) & set(KIND_OF.values()):
        raise ConfigError(
            f"the student has no quantized linears in scope {scope}; quantize it first with "
            "'qat convert' or choose another scope"
        )
    return names


def learnable(model: nn.Module, names: list[str], kinds: tuple[str, ...]) -> dict[str, list[str]]:
    """Parameter names by kind: of the linears `names`, and all norms, gates or routers.

    Static scales of inputs are `scales` as well. Fixed grids have no codebook to learn: beside
    other kinds that one is then left out.

    Raises:
        ConfigError: a wished kind has no parameters here.
    """
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    modules = quant_linears(model)
    for name in names:
        for local in modules[name].weight_parameters():
            kind = KIND_OF[local]
            is_fixed_grid = kind == "codebook" and modules[name].spec.codebook != "lut"
            if kind in found and not is_fixed_grid:
                found[kind].append(f"{name}.{local}")
    shared = {name for name, _ in model.named_parameters()}  # under the first of its names
    if "scales" in found:
        scales = (f"{name}.{INPUT_SCALE}" for name in names)
        found["scales"] += [name for name in scales if name in shared]
    everywhere = {
        "norms": lambda: [n for n, p in model.named_parameters() if p.dim() == 1 and "norm" in n],
        "gates": lambda: [name for name, _ in model.named_parameters() if NSA_PART in name],
        "router": lambda: [
            f"{name}.{local}" for name, router in routers(model).items()
            for local, _ in router.named_parameters()
        ],
    }  # fmt: skip
    found |= {kind: named() for kind, named in everywhere.items() if kind in found}
    if not found.get("codebook", ["other"]) and len(found) > 1:
        del found["codebook"]
    for kind, parameters in found.items():
        if not parameters:
            why = WHY_NONE.get(kind, f"the linears in scope hold no {kind} that can learn")
            raise ConfigError(f"learn={kind}, but {why}; drop it from --learn")
    return found


class Optimizer:
    """AdamW over the learnable parameters; everything else is frozen here.

    Each tensor's learning rate is its kind's, times the schedule, times the natural size that the
    tensor had when the run began. When the step computes in float16, `scale_loss` must be applied
    to every loss.

    Each of `ranks` gives the gradients of its own batches: their sums, alike everywhere, move every
    rank's parameters alike. Of a `ShardedLutLinear`'s latent weight each rank moves the rows that
    it holds; checkpoints hold all of them, and any number of ranks goes on from one.
    """

    def __init__(
        self,
        model: nn.Module,
        by_kind: dict[str, list[str]],
        config: TrainConfig,
        state: dict[str, Tensor] | None = None,
        *,
        ranks: Ranks = ALONE,
    ) -> None:
        self._config = config
        self.ranks = ranks
        self.kinds = tuple(by_kind)
        """What learns."""
        self.copying: Copying | None = None
        """A copy of the parameters that the next step must not overtake."""
        wanted = {name for names in by_kind.values() for name in names}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in wanted)
            if name in wanted:
                self.parameters[name] = parameter
        owners = {f"{name}.weight": linear for name, linear in quant_linears(model).items()}
        self.sharded: dict[str, ShardedLutLinear] = {
            name: owner
            for name, owner in owners.items()
            if name in self.parameters and isinstance(owner, ShardedLutLinear)
        }
        """Owners of the parameters that this rank has some rows of."""
        self.hosted: dict[str, HostedLutLinear] = {
            name: owner
            for name, owner in owners.items()
            if name in self.parameters and isinstance(owner, HostedLutLinear)
        }
        """Owners of the parameters whose values lie on the host."""
        self.sizes = natural_sizes(model, by_kind)
        if state:  # a run that goes on keeps the sizes that it began with
            self.sizes = {name: state[f"size.{name}"].item() for name in self.parameters}
        self._device = next(iter(self.parameters.values())).device
        dtype = backend.select(config.device).dtype(config.dtype)
        here = backend.on(self._device)
        self._least_share = LEAST_SHARE if here.fixed_shapes() else 0.0
        self.loss_scale = LossScale(self._device) if dtype == torch.float16 else None
        self._movers = self._choose_movers(by_kind)
        self._adamw = [mover for mover in self._movers if isinstance(mover, TorchAdamW)]
        if state:
            self._load(state)
            if config.shard_latents:
                # moments that were read shall lie as the weights do; those of a first step follow
                names = {f"{key}.{name}" for name in by_kind["weights"] for key in MOMENTS}
                held = self._state().items()
                backend.on(self._device).spread([t for name, t in held if name in names])

    def _choose_movers(self, by_kind: dict[str, list[str]]) -> list[Mover]:
        """One for the latent weights if they are kept in a way of their own, one for the rest."""
        config, has_scale = self._config, self.loss_scale is not None
        rest: dict[str, Learner] = {}
        for kind, names in by_kind.items():
            rate = config.lr if kind == "weights" else getattr(config, f"lr_{kind}")
            for name in names:
                size = self.sizes[name]
                # AdamW multiplies the decay by the learning rate, which here holds the size
                decay = config.weight_decay / size if kind == "weights" else 0.0
                rest[name] = Learner(self.parameters[name], rate * size, decay)
        latents = {name: rest[name] for name in by_kind.get("weights", ())}
        movers: list[Mover] = []
        if latents and config.optimizer == "adamw8bit":
            movers.append(EightBitAdamW(latents, config, may_overflow=has_scale))
        elif latents and config.latent_dtype == "bf16":
            part = self.ranks.rank if self.sharded else 0
            movers.append(StochasticAdamW(latents, config, part, self.hosted))
        if movers:
            rest = {name: learner for name, learner in rest.items() if name not in latents}
        if rest:
            is_fused = self._device.type == "cuda" or has_scale
            # before the latent weights: what is nearest to them depends on codebooks and scales
            movers.insert(0, TorchAdamW(rest, config, is_fused=is_fused))
        return movers

    def scale_loss(self, loss: Tensor) -> Tensor:
        """What to call `backward` on: `loss`, scaled if gradients pass through float16."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    @torch.no_grad()
    def step(self, step: int) -> Tensor:
        """Clip, move every parameter, forget the gradients; never waits for the device.

        Returns the norm of the unscaled gradients before clipping, a float32 scalar on the device.
        It is zero if float16 gradients overflowed: nothing moved then, and the next step's scale is
        lower. It is not finite if they overflow at the lowest scale, or without scaling at all.
        """
        if self.copying is not None:
            self.copying.hold()
            self.copying = None
        self.ranks.catch_up()
        self.ranks.sum_([p.grad for p in self.replicated() if p.grad is not None])
        norm = self._norm()
        if self.loss_scale is not None:
            norm = norm / self.loss_scale.scale
        # as in clip_grad_norm_; no number at all where the gradients are none
        factor = (self._config.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = torch.where(norm.isfinite(), factor, torch.nan)
        if self.loss_scale is not None:
            factor = factor / self.loss_scale.scale
            norm = self.loss_scale.settle(norm)
        for mover in self._movers:
            mover.move(step, max(self.lr_share(step), self._least_share), factor)
        self.forget_gradients()
        return norm

    def _norm(self) -> Tensor:
        """The norm of all gradients, alike on all ranks."""
        norms = []
        for parameters in (self.replicated(), [self.parameters[name] for name in self.sharded]):
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                each = torch._foreach_norm(gradients, 2, dtype=torch.float32)
                norms.append(torch.linalg.vector_norm(torch.stack(each)))
        if not self.sharded:
            return norms[0]
        square = norms[-1].square()
        self.ranks.sum_([square])
        return torch.linalg.vector_norm(torch.stack([*norms[:-1], square.sqrt()]))

    def replicated(self) -> list[nn.Parameter]:
        """The parameters that every rank holds, all with the same bits."""
        return [p for name, p in self.parameters.items() if name not in self.sharded]

    def hosted_codes(self) -> list[Tensor]:
        """What the device holds of latent weights on the host."""
        return [owner.packed for owner in self.hosted.values()]

    def num_learnable(self) -> int:
        """Numbers that learn, over all ranks."""
        rows = sum(owner.weight_count() for owner in self.sharded.values())
        return rows + sum(p.numel() for p in self.replicated())

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """A block of steps after which parameters and moments are what they were before.

        They wait on the host. A device that compiles finds the same tensors in steps inside and
        behind the block, so their graphs are the same: the moments are made before. Such devices
        know AdamW alone as PyTorch has it (`Backend.check_optimizer`).
        """
        for mover in self._adamw:
            mover.begin()
        moments = (mover.state().values() for mover in self._movers)
        undo = backend.on(self._device).undoing(
            [*self.parameters.values(), *chain.from_iterable(moments)]
        )
        try:
            yield
        finally:
            undo()

    def age(self) -> bool:
        """Let as many steps have been taken as the moments remember, if the run takes so many.

        Then a correction of theirs is exactly one, which may be a constant of the step already: its
        graph becomes another one. Returns whether the run gets there.
        """
        if self._config.beta2**self._config.max_steps > FORGOTTEN:
            return False
        for mover in self._adamw:
            mover.count_from(LATE)
        return True

    def forget_gradients(self) -> None:
        """Drop all gradients, those under way too."""
        self.ranks.catch_up()
        for parameter in self.parameters.values():
            parameter.grad = None

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
        """Parameters, moments, starting sizes and loss scale as flat tensors, for a checkpoint.

        Without those of sharded parameters (`gathered`).
        """
        self._bring_home()
        return {key: t for key, t in self._state().items() if not self._owner(key, t)}

    def gathered(self) -> dict[str, Tensor]:
        """What `state` lacks: whole, and on the first rank's host alone; all call it together.

        To be read after a wait for the device (`Backend.to_host`).
        """
        self._bring_home()
        host, found = backend.on(self._device).to_host, {}
        for key, rows in self._state().items():
            if owner := self._owner(key, rows):
                whole = owner.whole(rows.to(self._device))
                if self.ranks.is_first:
                    found[key] = host(whole)
        return found

    def moving(self) -> dict[str, Tensor]:
        """Moments and loss scale of this rank: what moves the parameters."""
        tensors = {} if self.loss_scale is None else self.loss_scale.state()
        for mover in self._movers:
            tensors |= mover.state()
        return tensors

    def state_bytes(self) -> int:
        """Bytes of `state` and `gathered`."""
        owned = ((self._owner(key, tensor), tensor) for key, tensor in self._state().items())
        return sum(t.itemsize * owner.weight_count() if owner else t.nbytes for owner, t in owned)

    def _bring_home(self) -> None:
        """Wait for what is on its way back to the host."""
        if self._config.offload != "none":
            backend.on(self._device).synchronize()

    def _owner(self, key: str, tensor: Tensor) -> ShardedLutLinear | None:
        """Of which sharded parameter this part of the state holds rows."""
        return self.sharded.get(key.partition(".")[2]) if tensor.dim() else None

    def _state(self) -> dict[str, Tensor]:
        tensors = {}
        for name, parameter in self.parameters.items():
            owner = self.hosted.get(name)
            tensors[f"parameter.{name}"] = owner.latent if owner else parameter.detach()
            tensors[f"size.{name}"] = torch.tensor(self.sizes[name], dtype=torch.float64)
        return tensors | self.moving()

    @torch.no_grad()
    def _load(self, state: dict[str, Tensor]) -> None:
        owners = {key: self._owner(key, whole) for key, whole in state.items()}
        state = state | {key: state[key][owner.rows] for key, owner in owners.items() if owner}
        for name, parameter in self.parameters.items():
            owner = self.hosted.get(name)
            (owner.latent if owner else parameter).copy_(state[f"parameter.{name}"])
        latents = [(owner.latent,) for owner in self.hosted.values()]
        visiting = backend.on(self._device).visiting(latents)
        for owner, (latent,) in zip(self.hosted.values(), visiting, strict=True):
            owner.follow_(latent)
        for mover in self._movers:
            mover.load(state)
        if self.loss_scale is not None:
            self.loss_scale.load(state)


def natural_sizes(model: nn.Module, by_kind: dict[str, list[str]]) -> dict[str, float]:
    """How large each learnable tensor is: what its learning rate is relative to.

    Its root mean square; one for a norm, whose weight scales by itself or by one more than itself.
    A factor of an adapter may be zero: its size is that of factors whose product is as large as the
    weight, so that a step at `lr_lora` moves the weight by about that share of its own size.
    Gates may begin at zero: see `qat.nsa.fit.natural_size`.
    """
    linears, parameters = quant_linears(model), dict(model.named_parameters())
    size_of = {
        "norms": lambda _: 1.0,
        "lora": lambda name: linears[name.rpartition(".")[0]].lora_size(),
        "weights": lambda name: cast(LutLinear, linears[name.rpartition(".")[0]]).latent_size(),
        "gates": lambda name: natural_size(name, parameters[name]),
        # a bias, often zero, adds to logits
        "router": lambda name: rms(parameters[name]) if parameters[name].dim() > 1 else 1.0,
        **dict.fromkeys(("scales", "codebook"), lambda name: rms(parameters[name])),
    }
    return {name: size_of[kind](name) for kind, names in by_kind.items() for name in names}


def lr_share(
    step: int,
    max_steps: int,
    *,
    schedule: Literal["cosine", "constant", "wsd"],
    warmup_steps: int,
    min_ratio: float,
) -> float:
    """The learning rate of optimizer step `step` (from 0) as a share of its peak.

    Rises linearly over `warmup_steps`; then `constant` stays at 1, `cosine` falls to `min_ratio` at
    the end, and `wsd` (warm-up, stable, decay) stays at 1 and falls linearly over the last fifth.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        decay_steps = max(1, round(DECAY_FRAC * max_steps))
        done = max(0.0, 1 - (max_steps - 1 - step) / decay_steps)
        return 1 - (1 - min_ratio) * done
    done = (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * done)) / 2


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
