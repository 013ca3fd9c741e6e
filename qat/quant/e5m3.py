"""E5M3: non-negative floats of 5 exponent and 3 mantissa bits, the upper byte of a float16.

Without its sign a float16 has 15 bits; a byte holds the upper 8 of them, from 2**-17 (subnormal
below 2**-14) to 61440.
"""

import torch
from torch import Tensor

from qat.backend.device import on

SMALLEST = 2.0**-17
"""The smallest positive value."""
LARGEST_VALUE = 61440.0
"""The largest finite one."""
LARGEST = 0x7B80
"""Its float16 bits."""
CUT = 7
"""Bits of a float16 that a byte does not hold."""


def round_to_e5m3(value: Tensor) -> Tensor:
    """`value` in float32, rounded to float16 first and then to a byte, both to nearest even.

    Negative values become 0. A finite float16 above 61440 becomes that; infinity, what a float16
    rounds to infinity (from 65520 on) and NaN stay what they are, and no byte is meant to hold
    them. What is rounded already stays as it is.
    """
    half = value.clamp_min(0).half()
    if on(value.device).compares():
        return torch.where(half.isfinite(), _rounded_by_comparing(half.float()), half.float())
    bits = half.view(torch.int16).int() & 0x7FFF  # the sign of a zero
    bits = (bits + (2 ** (CUT - 1) - 1) + (bits >> CUT & 1)) >> CUT << CUT
    rounded = bits.clamp_max(LARGEST).to(torch.int16).view(torch.float16)
    return torch.where(half.isfinite(), rounded, half).float()


def _rounded_by_comparing(value: Tensor) -> Tensor:
    """As `round_to_e5m3`, of float16 numbers in float32, with no look at their bits.

    Divided by powers of two, which is exact, until what is left is a mantissa in eighths.
    """
    units, unit = value * (1 / SMALLEST), torch.full_like(value, SMALLEST)
    for octaves in (16, 8, 4, 2, 1):
        is_above = units >= 2.0 ** (3 + octaves)
        units = torch.where(is_above, units * 2.0**-octaves, units)
        unit = torch.where(is_above, unit * 2.0**octaves, unit)
    return (units.round() * unit).clamp(0.0, LARGEST_VALUE).abs()


def encode(value: Tensor) -> Tensor:
    """The bytes (uint8) of finite values as `round_to_e5m3` gives them."""
    return (value.half().view(torch.int16) >> CUT).to(torch.uint8)


def decode(octets: Tensor) -> Tensor:
    """The values of `octets` (uint8) in float32."""
    return (octets.to(torch.int16) << CUT).view(torch.float16).float()
