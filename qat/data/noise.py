"""Random numbers that are a function of where they are used, not of what was drawn before.

Shapes: T tokens, n numbers of a token.
"""

import torch
import xxhash
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def stream(*names: object) -> int:
    """A 64-bit stream of numbers for whatever the names name."""
    return _signed(xxhash.xxh3_64_intdigest("/".join(map(str, names)).encode()))


def uniforms(stream: int, places: Tensor, count: int) -> Tensor:
    """`(T, count)` float64 in [0, 1) for `(T,)` int64 places of a stream, equal on every device.

    The numbers of place p are outputs `p * count` to `(p + 1) * count - 1` of splitmix64 seeded
    with the stream (Steele, Lea and Flood, OOPSLA 2014), whose n-th output needs no other.
    """
    numbers = places[:, None] * count + torch.arange(1, count + 1, device=places.device)
    bits = stream + numbers * _signed(GOLDEN)
    for shift, multiplier in MIXERS:
        bits = (bits ^ _shift(bits, shift)) * _signed(multiplier)
    bits = bits ^ _shift(bits, 31)
    return _shift(bits, 11).double() * 2.0**-53


def _shift(bits: Tensor, count: int) -> Tensor:
    """A right shift that fills with zeros.

    The sign goes by itself: XLA's shift of a negative number divides, and rounds up.
    """
    return (bits & (2**63 - 1)) >> count | (bits < 0) * 2 ** (63 - count)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
