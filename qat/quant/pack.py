"""Indices of 1 to 8 bits, packed into bytes row by row, least significant bit first."""

from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """The packed indices of one weight, and what is needed to read them."""

    octets: Tensor
    """`(O, packed_width)` uint8."""
    bits: int
    in_features: int

    @property
    def shape(self) -> torch.Size:
        """`(O, I)`, that of the indices."""
        return torch.Size((self.octets.shape[0], self.in_features))

    def indices(self) -> Tensor:
        """`(O, I)` uint8."""
        return unpack(self.octets, self.bits, self.in_features)


def packed_width(in_features: int, bits: int) -> int:
    """Bytes that one row of indices takes."""
    return -(-in_features * bits // 8)


def pack(indices: Tensor, bits: int) -> Tensor:
    """`(O, I)` indices below `2**bits` as `(O, ceil(I * bits / 8))` uint8.

    Index i of a row lies in its bits `i * bits ... (i + 1) * bits - 1`; the last byte is padded
    with zeros. Eight indices fill `bits` whole bytes, so a row is packed eight at a time; where
    `bits` divides 8, as many as fill one.
    """
    O, I = indices.shape
    if 8 % bits == 0:
        return _pack_bytes(indices.to(torch.uint8), bits)
    padded = torch.nn.functional.pad(indices, (0, -I % 8)).view(O, -1, 8).to(_word(bits))
    word = (padded << _shifts(bits, indices.device)).sum(-1, dtype=_word(bits))
    byte_shifts = torch.arange(0, 8 * bits, 8, device=indices.device)
    octets = (word[..., None] >> byte_shifts) & 255
    return octets.view(O, -1)[:, : packed_width(I, bits)].to(torch.uint8).contiguous()


def unpack(packed: Tensor, bits: int, in_features: int) -> Tensor:
    """The `(O, in_features)` uint8 indices that `pack` packed."""
    O, width = packed.shape
    if 8 % bits == 0:
        parts = [packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
        return torch.stack(parts, -1).flatten(1)[:, :in_features].contiguous()
    octets = torch.nn.functional.pad(packed, (0, -width % bits)).view(O, -1, bits).to(_word(bits))
    byte_shifts = torch.arange(0, 8 * bits, 8, device=packed.device)
    word = (octets << byte_shifts).sum(-1, dtype=_word(bits))
    indices = (word[..., None] >> _shifts(bits, packed.device)) & (2**bits - 1)
    return indices.view(O, -1)[:, :in_features].to(torch.uint8).contiguous()


def _pack_bytes(indices: Tensor, bits: int) -> Tensor:
    """The same without leaving uint8, where a byte holds a whole number of indices."""
    num = 8 // bits
    padded = torch.nn.functional.pad(indices, (0, -indices.shape[1] % num))
    octets = padded[:, ::num].clone()
    for place in range(1, num):
        octets |= padded[:, place::num] << place * bits
    return octets


def _word(bits: int) -> torch.dtype:
    """What holds eight indices."""
    return torch.int32 if bits <= 4 else torch.int64


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8 * bits, bits, device=device)
