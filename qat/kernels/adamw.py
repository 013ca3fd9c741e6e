"""AdamW on many float32 tensors at once, and on bfloat16 tensors with stochastic rounding.

A model has hundreds of tensors that learn, each at its own rate. A kernel for each costs a GPU more
than the arithmetic: most are too small to fill it, and the host launches them one by one. One
kernel finds the tensor of each of its programs in a table.

A bfloat16 weight has 8 significant bits: with rounding to nearest, a step below 2**-9 of the weight
is lost every time. Rounded up with the probability of the cut-off part, it is kept on average
(arXiv:2010.06192). The moments, also in bfloat16, are rounded in the same way.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from qat.kernels.dispatch import tl, triton, use_triton

BLOCK = 1024
"""Counters per program, for two elements each: 16 elements per thread of four warps."""
MANY_BLOCK = 1024
"""Elements per program where one kernel updates many tensors."""
ROUNDS = tl.constexpr(7)
"""Philox rounds: the fewest that pass all Crush batteries (Salmon et al. 2011)."""


class Moving(NamedTuple):
    """A weight with its gradient and moments: four contiguous tensors of one shape."""

    parameter: Tensor
    """The weight, bfloat16."""
    gradient: Tensor
    """The gradient, any float dtype."""
    exp_avg: Tensor
    """The first moment, bfloat16."""
    exp_avg_sq: Tensor
    """The second moment, bfloat16."""


class Rates(NamedTuple):
    """The scalars of one AdamW step that the host passes."""

    lr: float
    decay: float
    """The fraction of the weight that decay removes: learning rate times weight decay."""
    beta1: float
    beta2: float
    eps: float


class Noise(NamedTuple):
    """The seed of the random bits, which depend on nothing else."""

    seed: int
    step: int
    index: int
    """The index of the tensor among all updated tensors."""


def stochastic_adamw_(moving: Moving, shared: Tensor, rates: Rates, noise: Noise) -> None:
    """Apply one AdamW step to a bfloat16 weight in place; on CUDA one kernel reads all once.

    The result is that of `torch.optim.AdamW` in float32 from the stored values, rounded
    stochastically; a kernel's random bits differ from plain PyTorch's. `shared` is float32 `(3,)`,
    on the device: the factor of the gradient, `1 - beta1**t` and `sqrt(1 - beta2**t)`. If the
    factor is not finite, nothing changes.
    """
    if not use_triton(moving.parameter, __name__):
        _reference_(moving, shared, rates, noise)
        return
    parameter = moving.parameter
    count = parameter.numel()
    with torch.cuda.device_of(parameter):
        _step[(triton.cdiv(count, 2 * BLOCK),)](
            parameter, moving.gradient.contiguous(), moving.exp_avg, moving.exp_avg_sq, shared,
            count, rates.lr, rates.decay, 1 - rates.beta1, 1 - rates.beta2, rates.eps,
            noise.seed & (2**31 - 1), noise.step, noise.index,
            BLOCK=BLOCK,
        )  # fmt: skip


class ManyTensors:
    """Float32 tensors on one device that one kernel updates, each with its own rates.

    Args:
        tensors: of each its parameter, first and second moment, contiguous and of one shape; they
            keep their memory.
        rates: of each the peak learning rate, and that times the weight decay.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[Tensor, Tensor, Tensor]],
        rates: Sequence[tuple[float, float]],
    ) -> None:
        device = tensors[0][0].device
        counts = torch.tensor([parameter.numel() for parameter, *_ in tensors], device="cpu")
        blocks = -(-counts // MANY_BLOCK)
        places = [[tensor.data_ptr() for tensor in each] for each in tensors]
        self._addresses = _on_device(places, device)
        self._is_aligned = _are_aligned(sum(places, [])) and not (counts % 4).any()
        self._counts = counts.to(device)
        self.set_rates(rates)
        self._first = (blocks.cumsum(0) - blocks).int().to(device)
        """The first program of each tensor."""
        owners = torch.arange(len(counts), device="cpu").repeat_interleave(blocks)
        self._owners = owners.int().to(device)
        """The tensor of each program."""
        self._gradients: list[int] = []
        self._table = self._counts  # the addresses of the gradients, which the first step brings

    def set_rates(self, rates: Sequence[tuple[float, float]]) -> None:
        """Take these rates from now on; the host does not wait."""
        self._rates = _on_device(rates, self._counts.device).float()

    def step_(
        self,
        gradients: Sequence[Tensor | None],
        shared: Tensor,
        share: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Apply one step of `torch.optim.AdamW` at `share` of the peak rates, in place.

        `shared` is as in `stochastic_adamw_`, or has a row of these for each tensor: `(N, 3)`. A
        tensor without a gradient stays as it is.
        """
        found = [None if g is None else g.float().contiguous() for g in gradients]
        addresses = [0 if g is None else g.data_ptr() for g in found]
        if addresses != self._gradients:  # a recorded step always leaves them in the same place
            self._gradients, self._table = addresses, _on_device(addresses, self._counts.device)
        with torch.cuda.device_of(shared):
            _step_many[(len(self._owners),)](
                self._addresses, self._table, self._counts, self._rates, self._first, self._owners,
                shared, shared.stride(0) if shared.dim() == 2 else 0,
                share, 1 - betas[0], 1 - betas[1], eps,
                ALIGNED=self._is_aligned and _are_aligned(addresses), BLOCK=MANY_BLOCK,
            )  # fmt: skip


def _are_aligned(addresses: Sequence[int]) -> bool:
    """Return whether a thread can load four numbers at once from each of these addresses."""
    return all(address % 16 == 0 for address in addresses)


def _on_device(numbers: Sequence[int] | Sequence[Sequence[float]], device: torch.device) -> Tensor:
    # NumPy knows no default device or dtype; from pinned memory the host does not wait for the copy
    table = torch.from_numpy(np.array(numbers))
    table = table.pin_memory() if torch.cuda.is_available() else table
    return table.to(device, non_blocking=True)


def round_stochastically(exact: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to one of its two bfloat16 neighbours, unbiased; NaN and infinity stay."""
    bits = exact.view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 1 << 16, generator=generator)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(exact.isnan(), exact, rounded).to(torch.bfloat16)


def _reference_(moving: Moving, shared: Tensor, rates: Rates, noise: Noise) -> None:
    factor, bias1, root_bias2 = shared.unbind()
    p, g, m, v = (tensor.float() for tensor in moving)
    g = g * factor
    m = m.lerp(g, 1 - rates.beta1)
    v = v.lerp(g.square(), 1 - rates.beta2)
    change = (m / bias1) / (v.sqrt() / root_bias2 + rates.eps)
    p = p - rates.decay * p - rates.lr * change
    seed = xxhash.xxh3_64_intdigest(repr(tuple(noise)).encode()) >> 1
    generator = torch.Generator(p.device).manual_seed(seed)
    for old, new in ((moving.parameter, p), (moving.exp_avg, m), (moving.exp_avg_sq, v)):
        rounded = round_stochastically(new, generator)
        old.copy_(torch.where(factor.isfinite(), rounded, old))


@triton.jit
def _rounded(exact, noise):
    # 16 random bits are added below the precision of bfloat16, then the lower half is cut off
    bits = exact.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)
    cut = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    # NaN stays: its bits plus noise might be those of infinity
    return tl.where(exact == exact, cut, exact.to(tl.bfloat16))


# not specialized: these change with every call, and Triton would compile again for 1 and for
# multiples of 16
@triton.jit(do_not_specialize=["seed", "step", "index"])
def _step(
    parameter_ptr, gradient_ptr, exp_avg_ptr, exp_avg_sq_ptr, shared_ptr, count, lr, decay, weight1,
    weight2, eps, seed, step, index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    factor = tl.load(shared_ptr)
    if tl.abs(factor) < float("inf"):  # false for NaN too
        bias1 = tl.load(shared_ptr + 1)
        root_bias2 = tl.load(shared_ptr + 2)
        block = tl.program_id(0)
        counter = block * BLOCK + tl.arange(0, BLOCK)
        zero = counter * 0
        # one call gives 128 random bits: three roundings of 16 bits for each of two elements
        a, b, c, d = tl.philox(seed, counter, zero + index, zero + step, zero, ROUNDS)
        for half in tl.static_range(2):
            low, high = (a, b) if half == 0 else (c, d)
            at = block * (2 * BLOCK) + half * BLOCK + tl.arange(0, BLOCK)
            inside = at < count
            p = tl.load(parameter_ptr + at, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(gradient_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
            m = tl.load(exp_avg_ptr + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0).to(tl.float32)
            m += weight1 * (g - m)
            v += weight2 * (g * g - v)
            change = (m / bias1) / (tl.sqrt(v) / root_bias2 + eps)
            p = p - decay * p - lr * change
            tl.store(parameter_ptr + at, _rounded(p, low), mask=inside)
            tl.store(exp_avg_ptr + at, _rounded(m, low >> 16), mask=inside)
            tl.store(exp_avg_sq_ptr + at, _rounded(v, high), mask=inside)


@triton.jit
def _numbers(address, start, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def _step_many(
    addresses, gradients, counts, rates, first, owners, shared_ptr, row, share, weight1, weight2,
    eps,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner = tl.load(owners + tl.program_id(0))
    gradient = tl.load(gradients + owner)
    shared_ptr += row * owner
    factor = tl.load(shared_ptr)
    if (gradient != 0) & (tl.abs(factor) < float("inf")):  # false for NaN too
        bias1 = tl.load(shared_ptr + 1)
        root_bias2 = tl.load(shared_ptr + 2)
        lr = tl.load(rates + 2 * owner) * share
        decay = tl.load(rates + 2 * owner + 1) * share
        start = (tl.program_id(0) - tl.load(first + owner)).to(tl.int64) * BLOCK
        at = tl.arange(0, BLOCK)
        room = tl.load(counts + owner) - start
        if ALIGNED:
            room = tl.multiple_of(room, 4)
        inside = at < room
        gradient_ptr = _numbers(gradient, start, ALIGNED) + at
        parameter_ptr = _numbers(tl.load(addresses + 3 * owner), start, ALIGNED) + at
        exp_avg_ptr = _numbers(tl.load(addresses + 3 * owner + 1), start, ALIGNED) + at
        exp_avg_sq_ptr = _numbers(tl.load(addresses + 3 * owner + 2), start, ALIGNED) + at
        p = tl.load(parameter_ptr, mask=inside, other=0.0)
        g = tl.load(gradient_ptr, mask=inside, other=0.0) * factor
        m = tl.load(exp_avg_ptr, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq_ptr, mask=inside, other=0.0)
        m += weight1 * (g - m)
        v += weight2 * (g * g - v)
        change = (m / bias1) / (tl.sqrt(v) / root_bias2 + eps)
        tl.store(parameter_ptr, p - decay * p - lr * change, mask=inside)
        tl.store(exp_avg_ptr, m, mask=inside)
        tl.store(exp_avg_sq_ptr, v, mask=inside)
