"""AdamW on bfloat16 tensors: computed in float32, rounded stochastically.

A bfloat16 weight has 8 significant bits: with rounding to nearest, a step below 2**-9 of the weight
is lost every time. Rounded up with the probability of the cut-off part, it is kept on average
(arXiv:2010.06192). The moments, also in bfloat16, are rounded in the same way.
"""

from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from qat.kernels.dispatch import tl, triton, use_triton

BLOCK = 1024
"""Counters per program, for two elements each: 16 elements per thread of four warps."""
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
