"""The Triton side of `qat.kernels.adamw`."""

import torch
from torch import Tensor

from qat.kernels.adamw import Moving, Noise, Rates
from qat.kernels.dispatch import tl, triton

BLOCK = 1024
ROUNDS = tl.constexpr(7)
"""Of Philox: the fewest that pass every test of the Crush batteries (Salmon et al. 2011)."""


def stochastic_adamw_by_kernel_(moving: Moving, shared: Tensor, rates: Rates, noise: Noise) -> None:
    """See `qat.kernels.adamw.stochastic_adamw_`; the random bits are others, of the same kind."""
    parameter = moving.parameter
    count = parameter.numel()
    with torch.cuda.device_of(parameter):
        _step[(triton.cdiv(count, 2 * BLOCK),)](
            parameter,
            moving.gradient.contiguous(),
            moving.exp_avg,
            moving.exp_avg_sq,
            shared,
            count,
            rates.lr,
            rates.decay,
            1 - rates.beta1,
            1 - rates.beta2,
            rates.eps,
            noise.seed & (2**31 - 1),
            noise.step,
            noise.index,
            BLOCK=BLOCK,
        )


@triton.jit
def _rounded(exact, noise):
    """Float32 plus 16 random bits below what bfloat16 keeps, cut; NaN stays."""
    bits = exact.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)
    cut = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where(exact == exact, cut, exact.to(tl.bfloat16))


@triton.jit(do_not_specialize=["seed", "step", "index"])
def _step(
    parameter_ptr,
    gradient_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    shared_ptr,
    count,
    lr,
    decay,
    weight1,
    weight2,
    eps,
    seed,
    step,
    index,
    BLOCK: tl.constexpr,
):
    factor = tl.load(shared_ptr)
    if tl.abs(factor) < float("inf"):
        bias1 = tl.load(shared_ptr + 1)
        root_bias2 = tl.load(shared_ptr + 2)
        block = tl.program_id(0)
        counter = block * BLOCK + tl.arange(0, BLOCK)
        zero = counter * 0
        # one call gives 128 bits: three roundings of 16 bits, for each of two elements
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
