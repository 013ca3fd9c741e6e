"""Packed rows of a matrix, and the orders in which such a matrix reads its inputs.

A packed matrix reads its inputs in units of 16. They are spread: input k is at `k % 16 * (I / 16) +
k // 16`; or split into two numbers of 16 bits (`split`). The kernel that produces the inputs writes
them in that order; `order_of` returns the order for a matrix.

Shapes: B sequences, O out_features, I in_features, G groups per row, C codebook entries, P parts,
d weights that an index names.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.backend.device import on
from qat.kernels.dispatch import tl, triton
from qat.quant.spec import LutSpec
from qat.quant.weight import (
    PackedIndices,
    Scales,
    from_stored,
    to_stored,
    unpack,
    vector_size,
)

UNIT = 16
"""Consecutive weights of a row that are read together."""
SPLIT = 0
"""The order value for split inputs, which tensor cores read."""
SPLIT_FACTOR = 16.0
"""The divisor of split inputs: float16 then does not overflow below a million."""
MMA_FORMATS, MMA_INPUTS = ((2, 1), (4, 1), (8, 4)), 64
"""(Bits per index, weights per index) that tensor cores can read, and the number of inputs that
rows must be a multiple of."""
MOST_PARTS = 3
"""The most parts of one product (queries, keys and values); the kernel takes one start for each."""
KERNEL_BITS = (1, 2, 3, 4, 8)
"""Bits per weight index for which a unit fills whole half-words, in one word or two; see
`lut_matvec._draw`."""


class LutRows(NamedTuple):
    """One or more packed weights with the same input, stacked along the rows."""

    octets: Tensor
    """`(O, packed_width)` uint8."""
    scales: Tensor
    """`(O, G)` as stored: uint8 (`quant.e5m3`), float16 or float32."""
    codebooks: Tensor
    """`(P, C)` float32: the levels of each part, C = 2**bits; or `(P, C, d)`: the codewords."""
    tables: Tensor | None
    """`(P, C / 2)` int32: lower, then upper bytes of the levels as float16 (`short_levels`); or
    `(P, C)` int64: codewords as float16 (`short_codewords`)."""
    factors: Tensor | None
    """`(P,)` float32: factors by which products with `tables` are multiplied."""
    bits: int
    """Bits per index."""
    starts: tuple[int, ...]
    """The first row of each part."""

    @classmethod
    def of(
        cls, source: PackedIndices, codebook: Tensor, scales: Scales, *, is_short: bool = False
    ) -> Self:
        """Return one packed weight with group scales encoded as a checkpoint stores them.

        With `is_short`, a kernel may read levels and inputs as numbers of 16 bits
        (`short_levels`, `split`).
        """
        C, is_levels = 2**source.bits, codebook.dim() == 1
        padded = F.pad(codebook.detach().float(), (0, C - len(codebook) if is_levels else 0))
        tables = factors = None
        is_format = is_mma_format(source.bits, vector_size(codebook), source.in_features)
        # `mma.m16n8k16` came with Ampere, as bfloat16 did
        if is_short and is_format and (not codebook.is_cuda or on(codebook.device).has_bf16()):
            tables, factors = short_levels(padded) if is_levels else short_codewords(padded)
        encoded = to_stored("scales", scales.scales, scales.bits)
        return cls(source.octets, encoded, padded[None], tables, factors, source.bits, (0,))

    @property
    def shape(self) -> torch.Size:
        """`(O, I)`."""
        return torch.Size((self.octets.shape[0], self.octets.shape[1] * 8 // self.weight_bits))

    @property
    def vector_size(self) -> int:
        """Weights per index."""
        return vector_size(self.codebooks[0])

    @property
    def weight_bits(self) -> int:
        """Index bits per weight."""
        return self.bits // self.vector_size

    def part(self, index: int) -> Self:
        """Return one of the parts as a view."""
        rows = slice(*(*self.starts, self.shape[0])[index : index + 2])
        one = slice(index, index + 1)
        tables, factors = (None if t is None else t[one] for t in (self.tables, self.factors))
        members = (self.octets[rows], self.scales[rows], self.codebooks[one])
        return LutRows(*members, tables, factors, self.bits, (0,))

    def dense(self) -> Tensor:
        """Return `W`, `(O, I)` float32."""
        O, I = self.shape
        indices = unpack(self.octets, self.bits, I // self.vector_size).int()
        ends = (*self.starts[1:], O)
        part = torch.zeros(O, dtype=torch.int32, device=indices.device)
        for index, (start, end) in enumerate(zip(self.starts, ends, strict=True)):
            part[start:end] = index
        flat = (indices + (part * 2**self.bits)[:, None]).flatten()
        levels = self.codebooks.flatten(0, 1).index_select(0, flat).view(O, I)
        stored_bits = 8 * self.scales.element_size()
        scales = from_stored("scales", self.scales, stored_bits)
        return levels * scales.repeat_interleave(I // scales.shape[1], 1)


Rows = LutRows | Tensor
"""A packed matrix, or a dense one `(O, I)`."""


def reads(spec: LutSpec) -> bool:
    """Return whether packed weights of this format can be read: one codebook, and group scales."""
    is_whole = spec.scale == "group" and spec.group_size % UNIT == 0 and not spec.table_rows
    return is_whole and spec.bits / spec.vector_size in KERNEL_BITS


def is_mma_format(bits: int, d: int, in_features: int) -> bool:
    """Return whether tensor cores can read rows with `bits` per index of d weights."""
    return (bits, d) in MMA_FORMATS and in_features % MMA_INPUTS == 0


def stack(members: Sequence[Rows]) -> Rows:
    """Stack matrices with the same input: all dense, or all packed alike (see `stacks`)."""
    if isinstance(members[0], Tensor):
        return torch.cat([*members])
    starts = torch.tensor([0, *(member.shape[0] for member in members)]).cumsum(0)
    fields = zip(*(member[:5] for member in members), strict=True)
    joined = [None if tensors[0] is None else torch.cat(tensors) for tensors in fields]
    if (starts[:-1] % UNIT).any():
        joined[3:] = None, None  # each 16 rows read one table
    return LutRows(*joined, members[0].bits, tuple(starts[:-1].tolist()))


def stacks(members: Sequence[Rows]) -> bool:
    """Return whether `stack` accepts these members."""
    if any(isinstance(member, Tensor) for member in members):
        return all(isinstance(member, Tensor) for member in members)
    kinds = {
        (m.codebooks.shape[1:], m.scales.dtype, m.scales.shape[1], m.shape[1], m.tables is None)
        for m in members
    }
    return len(kinds) == 1 and len(members) <= MOST_PARTS


def order_of(rows: Rows) -> int:
    """Return the order in which a matrix reads inputs: 16 (spread), 1 (as they are) or `SPLIT`."""
    if isinstance(rows, Tensor):
        return 1
    return UNIT if rows.tables is None else SPLIT


def spread(x: Tensor, order: int) -> Tensor:
    """Return `(B, I)` reordered as float32; for `SPLIT`, `(B, 2 I)` float16."""
    if order == SPLIT:
        return split(x)
    return x.float().unflatten(1, (-1, order)).transpose(1, 2).flatten(1)


def split(x: Tensor) -> Tensor:
    """Split `(B, I)` into float16 `(B, 2 I)`: `x / 16` rounded, then the remainder.

    In each unit of 16 the even places come first. The error is at most 2**-22 of an input, or
    2**-21 absolute.
    """
    ordered = x.float().unflatten(1, (-1, UNIT // 2, 2)).transpose(2, 3).flatten(1) / SPLIT_FACTOR
    upper = ordered.half()
    return torch.cat([upper, (ordered - upper.float()).half()], 1)


def gathered(x: Tensor, order: int) -> Tensor:
    """Undo `spread`."""
    if order == SPLIT:
        upper, lower = x.double().chunk(2, 1)
        both = (upper + lower).to(torch.float32) * SPLIT_FACTOR
        return both.unflatten(1, (-1, 2, UNIT // 2)).transpose(2, 3).flatten(1)
    return x.unflatten(1, (order, -1)).transpose(1, 2).flatten(1)


def short_levels(codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of levels `(C,)` as float16, `(1, C / 2)` int32, and a factor for sums.

    The lower bytes of all levels come first, four per word, then the upper ones. A power of two
    scales the largest level to between 1/2 and 1; each then errs by at most 2**-11 of itself, or
    2**-25 of the largest. The factor `(1,)` float32 undoes that scale and `SPLIT_FACTOR`.
    """
    levels = codebook.detach().float()
    _, exponent = torch.frexp(levels.abs().amax())
    octets = torch.ldexp(levels, -exponent).half().view(torch.uint8).view(-1, 2)
    factor = torch.ldexp(levels.new_tensor(SPLIT_FACTOR), exponent)
    return octets.T.contiguous().view(torch.int32).view(1, -1), factor.view(1)


def short_codewords(codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Return codewords `(C, 4)` as float16, `(1, C)` int64 with numbers in the order 0 2 1 3.

    float16 holds them exactly. The two pairs match the order of inputs in `split`. The factor
    `(1,)` float32 undoes `SPLIT_FACTOR`.
    """
    halves = codebook.detach()[:, [0, 2, 1, 3]].half()
    return halves.view(torch.int64).view(1, -1), codebook.new_tensor([SPLIT_FACTOR])


def empty_inputs(B: int, I: int, order: int, device: torch.device) -> Tensor:
    """Allocate inputs in the given order (see `spread`)."""
    is_split = order == SPLIT
    dtype = torch.float16 if is_split else torch.float32
    return torch.empty(B, 2 * I if is_split else I, dtype=dtype, device=device)


@triton.jit
def put_inputs(out, b, place, y, is_there, size, ORDER: tl.constexpr):
    """Write inputs of the next matrix, `size` per vector, in the layout of `spread`."""
    if ORDER == 0:
        at = b * 2 * size + place // 16 * 16 + place % 2 * 8 + place % 16 // 2
        part = y * 0.0625
        upper = part.to(tl.float16)
        tl.store(out + at, upper, mask=is_there)
        tl.store(out + at + size, (part - upper.to(tl.float32)).to(tl.float16), mask=is_there)
    else:
        at = b * size + place % ORDER * (size // ORDER) + place // ORDER
        tl.store(out + at, y, mask=is_there)
