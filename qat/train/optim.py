"""The optimizer of the parameters that learn, each kind with its own learning rate."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from qat.backend import device as backend
from qat.backend.copies import Copying
from qat.kernels import adamw as kernels
from qat.kernels.dispatch import use_triton
from qat.models.stored_state import quantized_modules
from qat.nn.hosted import HostedWeight
from qat.nn.lut_embedding import QuantTable
from qat.nn.sharded import ShardedWeight
from qat.ranks import ALONE, Ranks
from qat.train.adamw import MOMENTS, KernelAdamW, Learner, Mover, TorchAdamW
from qat.train.adamw8bit import EightBitAdamW
from qat.train.adamw16bit import StochasticAdamW
from qat.train.learnable import natural_sizes
from qat.train.loss_scale import LossScale
from qat.train.step_config import OptimConfig

FORGOTTEN, LATE = 2.0**-24, 2**24
"""Relative size below which float32 loses an addend; a step count at which bias corrections are
1."""
LEAST_SHARE = 2.0**-64
"""Least share of a peak learning rate on devices that compile: a rate of zero would be treated as a
constant, which changes the graph. So small a rate moves no weight in float32."""
DECAY_FRAC = 0.2
"""Share of a run's steps over which `wsd` decays: the last fifth."""


class Optimizer:
    """AdamW over the learnable parameters; everything else is frozen here.

    Each tensor's learning rate is its kind's, times the schedule, times the natural size that the
    tensor had when the run began. When the step computes in float16, `scale_loss` must be applied
    to every loss.

    Each of `ranks` contributes the gradients of its own batches; their sums, equal everywhere,
    update every rank's parameters equally. For the latent weight of a `ShardedWeight` each rank
    updates the rows that it holds; checkpoints hold all rows and can be resumed with any number of
    ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        by_kind: dict[str, list[str]],
        config: OptimConfig,
        state: dict[str, Tensor] | None = None,
        *,
        ranks: Ranks = ALONE,
        is_spread: bool = False,
    ) -> None:
        self._config = config
        self.ranks = ranks
        self.kinds = tuple(by_kind)
        """Kinds of parameter that learn."""
        self.copying: Copying | None = None
        """A copy of the parameters in flight; the next step's updates start after it."""
        wanted = {name for names in by_kind.values() for name in names}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in wanted)
            if name in wanted:
                self.parameters[name] = parameter
        owners = {f"{name}.weight": each for name, each in quantized_modules(model).items()}
        learning = [(name, owner) for name, owner in owners.items() if name in self.parameters]
        self.sharded = {name: each for name, each in learning if isinstance(each, ShardedWeight)}
        """Owners of parameters of which this rank holds some rows."""
        self.hosted = {name: each for name, each in learning if isinstance(each, HostedWeight)}
        """Owners of parameters whose values are on the host."""
        self._tables = {name for name, each in learning if isinstance(each, QuantTable)}
        if state:  # a resumed run keeps its original sizes, and the rates that it began with
            self.sizes = {name: state[f"size.{name}"].item() for name in self.parameters}
        else:
            self.sizes = natural_sizes(model, by_kind, config.rates["weights"])
        self._device = next(iter(self.parameters.values())).device
        dtype = backend.select(config.device).dtype(config.dtype)
        here = backend.on(self._device)
        self._least_share = LEAST_SHARE if here.is_traced else 0.0
        self.loss_scale = LossScale(self._device) if dtype == torch.float16 else None
        self._movers = self._choose_movers(by_kind)
        self._adamw = [mover for mover in self._movers if isinstance(mover, TorchAdamW)]
        if state:
            self._load(state)
            if is_spread:
                # shard loaded moments like the weights; new ones inherit it in the first step
                names = {f"{key}.{name}" for name in by_kind["weights"] for key in MOMENTS}
                held = self._state().items()
                backend.on(self._device).tracing.spread([t for name, t in held if name in names])

    def _choose_movers(self, by_kind: dict[str, list[str]]) -> list[Mover]:
        """Return one mover for latent weights with their own optimizer, and one for the rest."""
        config, has_scale = self._config, self.loss_scale is not None
        rest: dict[str, Learner] = {}
        for kind, names in by_kind.items():
            rate = config.rates[kind]
            for name in names:
                size = self.sizes[name]
                # AdamW multiplies the decay by the learning rate, which includes the size here
                decay = config.weight_decay / size if kind == "weights" else 0.0
                rest[name] = Learner(self.parameters[name], rate * size, decay)
        latents = {name: rest[name] for name in by_kind.get("weights", ())}
        movers: list[Mover] = []
        if config.optimizer == "adamw8bit":
            # a word's gradients are seldom: 8 bits round some of its second moments to zero but not
            # the first, and a step would be their ratio
            dense = {name: each for name, each in latents.items() if name not in self._tables}
            if dense:
                movers.append(EightBitAdamW(dense, config.beta2, may_overflow=has_scale))
            latents = {name: each for name, each in latents.items() if name not in dense}
            rest = {name: each for name, each in rest.items() if name not in dense}
        if latents and config.latent_dtype == "bf16":
            movers.append(
                StochasticAdamW(
                    latents,
                    config.beta2,
                    seed=config.seed,
                    part=self.ranks.rank if self.sharded else 0,
                    is_offloaded=config.offload != "none",
                    hosted=self.hosted,
                )
            )
            rest = {name: each for name, each in rest.items() if name not in latents}
        if rest:
            parameters = [each.parameter for each in rest.values()]
            is_plain = all(p.dtype == torch.float32 and p.is_contiguous() for p in parameters)
            # an expert's gradients may begin late; by one count its first step would be longer
            is_plain &= not any("experts" in name.split(".") for name in rest)
            mover: Mover
            if is_plain and use_triton(parameters[0], kernels.__name__):
                mover = KernelAdamW(rest, config.beta2)
            else:
                is_fused = self._device.type == "cuda" or has_scale
                mover = TorchAdamW(rest, config.beta2, is_fused=is_fused)
            # before the latent weights, whose nearest codes depend on codebooks and scales
            movers.insert(0, mover)
        return movers

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on, scaled if gradients pass through float16."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    @torch.no_grad()
    def step(self, step: int) -> Tensor:
        """Clip, move every parameter, drop the gradients; never waits for the device.

        Returns:
            The norm of the unscaled gradients before clipping, a float32 scalar on the device. Zero
            if float16 gradients overflowed: nothing moved then, and the next step's scale is lower.
            Not finite if they overflow at the lowest scale, or without scaling at all.
        """
        if self.copying is not None:  # a save still copies the parameters
            self.copying.hold()
            self.copying = None
        self.ranks.finish_deferred()  # sums of rows that backward left in flight
        self.ranks.sum_([p.grad for p in self.replicated() if p.grad is not None])
        norm = self._norm()
        if self.loss_scale is not None:
            norm = norm / self.loss_scale.scale
        # as in clip_grad_norm_; NaN where the gradients are not finite
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
        """Return the norm of all gradients, equal on all ranks."""
        norms = []
        for parameters in (self.replicated(), [self.parameters[name] for name in self.sharded]):
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                # in float32: a sum of squares in bf16 would lose small addends
                each = torch._foreach_norm(gradients, 2, dtype=torch.float32)
                norms.append(torch.linalg.vector_norm(torch.stack(each)))
        if not self.sharded:
            return norms[0]
        square = norms[-1].square()  # of this rank's rows; what all hold counts once
        self.ranks.sum_([square])
        return torch.linalg.vector_norm(torch.stack([*norms[:-1], square.sqrt()]))

    def replicated(self) -> list[nn.Parameter]:
        """Return the parameters that every rank holds whole, with the same bits."""
        return [p for name, p in self.parameters.items() if name not in self.sharded]

    def hosted_codes(self) -> list[Tensor]:
        """Return the device's codes of the latent weights on the host."""
        return [owner.packed for owner in self.hosted.values()]

    def num_learnable(self) -> int:
        """Return the number of learnable values over all ranks."""
        rows = sum(owner.weight_count() for owner in self.sharded.values())
        return rows + sum(p.numel() for p in self.replicated())

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Restore parameters and moments after the block; until then copies are on the host.

        Devices that compile need the same tensors inside and after the block to reuse its graphs,
        so the moments are created before it. Such devices support only PyTorch's AdamW
        (`Tracing.check_optimizer`).
        """
        for mover in self._adamw:
            mover.begin()
        # all moments exist now, so that new ones are set back to zero too
        moments = (mover.state().values() for mover in self._movers)
        undo = backend.on(self._device).undoing(
            [*self.parameters.values(), *chain.from_iterable(moments)]
        )
        try:
            yield
        finally:
            undo()

    def skip_bias_correction(self) -> bool:
        """Set the step count to where AdamW's bias corrections are exactly one.

        A correction of one may be folded into the step's graph as a constant, which changes the
        graph.

        Returns:
            True if the run takes enough steps to get there; otherwise nothing is set.
        """
        if self._config.beta2**self._config.max_steps > FORGOTTEN:
            return False
        for mover in self._adamw:
            mover.count_from(LATE)
        return True

    def forget_gradients(self) -> None:
        """Drop all gradients, including those in flight."""
        self.ranks.finish_deferred()
        for parameter in self.parameters.values():
            parameter.grad = None

    def lr_share(self, step: int) -> float:
        """Return the learning rates at `step` as a share of their peaks."""
        config = self._config
        return lr_share(
            step,
            config.max_steps,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            min_ratio=config.min_lr_ratio,
        )

    def state(self) -> dict[str, Tensor]:
        """Return parameters, moments, starting sizes and loss scale for a checkpoint.

        Tensors of sharded parameters are excluded (see `gathered`).
        """
        self._wait_for_copies()
        return {key: t for key, t in self._state().items() if not self._owner(key, t)}

    def gathered(self) -> dict[str, Tensor]:
        """Gather what `state` excludes to the first rank's host; all ranks call it together.

        Read the result after waiting for the device (`Backend.to_host`).
        """
        self._wait_for_copies()
        host, found = backend.on(self._device).to_host, {}
        for key, rows in self._state().items():
            if owner := self._owner(key, rows):
                whole = owner.whole(rows.to(self._device))
                if self.ranks.is_first:
                    found[key] = host(whole)
        return found

    def moving(self) -> dict[str, Tensor]:
        """Return this rank's moments and loss scale."""
        tensors = {} if self.loss_scale is None else self.loss_scale.state()
        for mover in self._movers:
            tensors |= mover.state()
        return tensors

    def state_bytes(self) -> int:
        """Return the bytes of `state` and `gathered`."""
        owned = ((self._owner(key, tensor), tensor) for key, tensor in self._state().items())
        return sum(t.itemsize * owner.weight_count() if owner else t.nbytes for owner, t in owned)

    def _wait_for_copies(self) -> None:
        """Wait for copies back to the host."""
        if self._config.offload != "none":
            backend.on(self._device).synchronize()

    def _owner(self, key: str, tensor: Tensor) -> ShardedWeight | None:
        """Return the sharded parameter of which this part of the state holds rows, if any."""
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


def lr_share(
    step: int,
    max_steps: int,
    *,
    schedule: Literal["cosine", "constant", "wsd"],
    warmup_steps: int,
    min_ratio: float,
) -> float:
    """Return the learning rate of optimizer step `step` (from 0) as a share of its peak.

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
