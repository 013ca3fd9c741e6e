"""A low-rank adapter of a weight: `W = codebook[indices] * S + lora_out @ lora_in`.

Shapes: O out_features, I in_features, R rank.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from qat.quant.weight import round_as_stored


class Lora(NamedTuple):
    """The two factors of an adapter."""

    lora_out: Tensor  # the output factor, `(O, R)`
    lora_in: Tensor  # the input factor, `(R, I)`


LORA_NAMES = Lora._fields


def round_lora(lora: Lora) -> Lora:
    """Return both factors in float32, rounded as a checkpoint stores them."""
    return Lora(*(round_as_stored(name, t) for name, t in lora._asdict().items()))


def add_product_(weight: Tensor, lora: Lora) -> Tensor:
    """Add `lora_out @ lora_in` to a float32 `weight` `(O, I)` in place, rounded once; return
    `weight`.

    The bits are the same on every device: the product of float16 values is taken in float64, where
    the sum is exact in any order as long as it stays below 32.
    """
    lora_out, lora_in = round_lora(lora)
    return weight.add_(lora_out.double() @ lora_in.double())


def pull_back_product(dW: Tensor, lora: Lora, wanted: Collection[str]) -> dict[str, Tensor]:
    """Return the gradients of the `wanted` factors that `dW` `(O, I)` implies, in float32.

    `d_lora_out = dW @ lora_in.T` and `d_lora_in = lora_out.T @ dW`, with the factors as stored.
    """
    if not any(name in wanted for name in LORA_NAMES):
        return {}
    dW = dW.float()
    lora_out, lora_in = round_lora(lora)
    gradients = {}
    if "lora_out" in wanted:
        gradients["lora_out"] = dW @ lora_in.T
    if "lora_in" in wanted:
        gradients["lora_in"] = lora_out.T @ dW
    return gradients


def factor_size(weight: Tensor, rank: int) -> float:
    """Return the root mean square for both factors of an adapter whose product is as large as
    `weight`.

    Factors of that size, drawn at random, have a product of the same root mean square as `weight`:
    `size**2 * sqrt(R) = rms(W)`.
    """
    rms = weight.double().pow(2).mean().sqrt().item()
    return math.sqrt(max(rms, 1e-8) / math.sqrt(rank))


def random_lora(weight: Tensor, rank: int, generator: torch.Generator) -> Lora:
    """Return a new adapter of `weight` `(O, I)` that changes nothing yet: `lora_out` is zero.

    `lora_in` is normal with the standard deviation `factor_size`. `generator` must be on the CPU,
    so that every device gets the same values.
    """
    O, I = weight.shape
    lora_in = torch.randn(rank, I, generator=generator) * factor_size(weight, rank)
    return Lora(weight.new_zeros(O, rank), lora_in.to(weight))
