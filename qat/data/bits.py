"""Integers of any width up to 31 bits, packed into bytes row by row, least significant bit first.

Shapes: N rows, I integers a row, G groups of integers that fill whole bytes.
"""

from functools import cache
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that a row of `count` integers of `bits` bits takes."""
    return -(-count * bits // 8)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """`(N, I)` integers in `0 .. 2**bits - 1` as `(N, ceil(I * bits / 8))` uint8.

    Integer i of a row takes its bits `i * bits ... (i + 1) * bits - 1`; the last byte is filled
    up with zeros. The smallest group of integers that fills whole bytes is packed at once.
    """
    N, I = values.shape
    per_group, group_bytes = _group(bits)
    word = torch.int32 if bits <= 24 else torch.int64  # holds an integer shifted by up to 7 bits
    values_NGI = pad(values.to(word), (0, -I % per_group)).view(N, -1, per_group)
    octets = values_NGI.new_zeros(N, values_NGI.shape[1], group_bytes, dtype=torch.uint8)
    for i in range(per_group):
        first, shift = divmod(i * bits, 8)
        word_NG = values_NGI[..., i] << shift
        for k in range(packed_bytes(1, shift + bits)):
            octets[..., first + k] |= ((word_NG >> (8 * k)) & 255).to(torch.uint8)
    return octets.view(N, -1)[:, : packed_bytes(I, bits)].contiguous()


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `(N, count)` integers that `pack_bits` packed, as int16, int32 or int64.

    A group is looked at as overlapping words, one for each of its integers, equally far apart; each
    is then shifted until its integer comes first.
    """
    N, width = packed.shape
    per_group, group_bytes = _group(bits)
    words, G = _words(bits), -(-width // group_bytes)
    octets = np.zeros(words.lead + N * G * group_bytes + 8, np.uint8)
    octets[words.lead : -8].reshape(N, -1)[:, :width] = packed.numpy()
    shape, strides = (N * G, per_group), (group_bytes, words.step)
    seen = np.ndarray(shape, words.dtype, octets, strides=strides)
    values_NI = torch.from_numpy(seen.copy()).view(N, G * per_group)
    values_NI >>= words.shifts.repeat(G)
    values_NI &= 2**bits - 1
    return values_NI[:, :count]


def unpack_flags(packed: Tensor, count: int) -> Tensor:
    """The `(N, count)` bool that `pack_bits` packed as integers of one bit."""
    flags = np.unpackbits(packed.numpy(), axis=1, count=count, bitorder="little")
    return torch.from_numpy(flags.view(bool))


def _group(bits: int) -> tuple[int, int]:
    """The fewest integers that fill whole bytes, and how many bytes."""
    return 8 // gcd(8, bits), bits // gcd(8, bits)


class _Words(NamedTuple):
    """How to look at a group so that word i holds integer i, the same for all groups."""

    lead: int
    """Bytes before the group where the first word begins."""
    step: int
    """Bytes from one word to the next."""
    shifts: Tensor
    """Bits below each word's integer, in the words' dtype."""
    dtype: np.dtype


@cache
def _words(bits: int) -> _Words:
    per_group, _ = _group(bits)
    step = round(bits / 8)
    drift = bits - 8 * step  # by which the shift grows from word to word
    lead = max(0, -drift * (per_group - 1) + 7) // 8  # so that no shift is negative
    shifts = 8 * lead + drift * np.arange(per_group)
    size = next(size for size in (2, 4, 8) if bits + shifts.max() < 8 * size)
    dtype = np.dtype(f"<i{size}")
    return _Words(lead, step, torch.from_numpy(shifts.astype(dtype)), dtype)
