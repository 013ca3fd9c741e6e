"""Integers of any width up to 31 bits, packed into bytes row by row, least significant bit first.

Shapes: N rows, I integers a row, G groups of integers that fill whole bytes.
"""

from math import gcd

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
    """The `(N, count)` int64 integers that `pack_bits` packed."""
    N, width = packed.shape
    per_group, group_bytes = _group(bits)
    octets = pad(packed, (0, -width % group_bytes)).view(N, -1, group_bytes)
    columns = [octets[..., k].long() for k in range(group_bytes)]
    values_NGI = packed.new_empty(N, octets.shape[1], per_group, dtype=torch.int64)
    for i in range(per_group):
        first, shift = divmod(i * bits, 8)
        word_NG = columns[first].clone()
        for k in range(1, packed_bytes(1, shift + bits)):
            word_NG |= columns[first + k] << (8 * k)
        values_NGI[..., i] = (word_NG >> shift) & (2**bits - 1)
    return values_NGI.view(N, -1)[:, :count]


def _group(bits: int) -> tuple[int, int]:
    """The fewest integers that fill whole bytes, and how many bytes."""
    return 8 // gcd(8, bits), bits // gcd(8, bits)
