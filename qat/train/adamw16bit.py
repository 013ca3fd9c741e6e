"""AdamW whose weights and moments are bfloat16, rounded stochastically."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from qat.backend.device import on
from qat.kernels.adamw import Moving, Noise, Rates, stochastic_adamw_
from qat.nn.hosted import HostedWeight
from qat.train.adamw import EPS, MOMENTS, Counted, Learner


class StochasticAdamW(Counted):
    """AdamW for weights and moments in bfloat16: six bytes a weight instead of twelve.

    All three are rounded stochastically: with `beta2 = 0.999` a second moment rounded to nearest
    never decays (after gradients shrink tenfold it stays 22 times too large; rounded stochastically
    it is right on average with a spread of 10 %).

    Args:
        part: the rank's number where each has rows of its own, which selects separate noise.
        is_offloaded: keep the moments in pinned host memory, two bytes a weight on the device.
        hosted: owners of the weights that are on the host too.
    """

    def __init__(
        self,
        learners: dict[str, Learner],
        beta2: float,
        *,
        seed: int,
        part: int = 0,
        is_offloaded: bool = False,
        hosted: Mapping[str, HostedWeight] | None = None,
    ) -> None:
        parameters = [learner.parameter for learner in learners.values()]
        device = parameters[0].device
        super().__init__(device, beta2)
        self._learners = learners
        self._hosted = [(hosted or {}).get(name) for name in learners]
        self._seed = seed
        self._first = part * len(learners)  # the noise's number of the first tensor
        self._backend = on(device)
        both = [p for p in parameters for _ in MOMENTS]
        if is_offloaded:
            zeros = self._backend.pinned_zeros([p.shape for p in both], both[0].dtype)
        else:
            zeros = [torch.zeros_like(p) for p in both]
        pairs = zip(zeros[::2], zeros[1::2], strict=True)
        self._moments = dict(zip(learners, pairs, strict=True))

    def move(self, step: int, share: float, factor: Tensor) -> None:
        """See `Mover`."""
        shared = self._advance(factor)
        every = zip(self._learners.values(), self._hosted, self._moments.values(), strict=True)
        moved = [each for each in enumerate(every) if each[1][0].parameter.grad is not None]
        visitors = [
            moments if linear is None else (*moments, linear.latent)
            for _, (_, linear, moments) in moved
        ]
        visiting = self._backend.visiting(visitors)  # on the device, one tensor after the other
        for (index, ((p, lr, decay), linear, _)), here in zip(moved, visiting, strict=True):
            rates = Rates(lr * share, lr * share * decay, *self._betas, EPS)
            weight = p.detach() if linear is None else here[2]
            moving = Moving(weight, cast(Tensor, p.grad), *here[:2])
            # noise from seed, step and tensor alone: a resumed run repeats an uninterrupted one
            stochastic_adamw_(moving, shared, rates, Noise(self._seed, step, self._first + index))
            if linear is not None:
                linear.follow_(weight)  # update its codes before the weight is copied back
