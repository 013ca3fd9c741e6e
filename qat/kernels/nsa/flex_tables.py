"""The blocks that each tile of queries reads, listed as FlexAttention takes them.

Queries and keys lie in blocks of `EDGE`. Every list goes both ways: forward walks the key blocks of
a tile of queries, backward besides the tiles that read a key block. Nothing of the size
`queries x keys` is made.

Shapes: M tiles of queries, N blocks of keys.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

EDGE = 128
"""Queries of a tile and keys of a block: what the kernels work on at a time."""


class Listing(NamedTuple):
    """Which columns each row holds."""

    counts: Tensor
    """`(..., rows)` int32."""
    indices: Tensor
    """`(..., rows, columns)` int32, ascending; what lies beyond a row's count is not read."""

    def of_heads(self, group: int) -> Self:
        """The same for every query head of a group, from one listing a key-value head."""
        return type(self)(*(each.repeat_interleave(group, 1) for each in self))

    def of_all_heads(self, count: int) -> Self:
        """The same for each of `count` query heads, whose axis is put behind that of the rows."""
        return type(self)(*(each.unsqueeze(1) for each in self)).of_heads(count)


class Both(NamedTuple):
    """One relation between tiles and blocks, listed from both sides."""

    of_tiles: Listing
    """Rows are tiles of queries."""
    of_blocks: Listing
    """Rows are blocks of keys."""

    def of_heads(self, group: int) -> Self:
        """See `Listing.of_heads`."""
        return type(self)(*(each.of_heads(group) for each in self))

    def of_all_heads(self, count: int) -> Self:
        """See `Listing.of_all_heads`."""
        return type(self)(*(each.of_all_heads(count) for each in self))


class Span(NamedTuple):
    """For each row the columns `begin <= column < end`; both bounds never fall along the rows."""

    begin: Tensor
    """`(..., rows)`."""
    end: Tensor
    """`(..., rows)`, at least `begin`."""

    def turned(self, columns: int) -> Self:
        """The rows of each column, which are a span again."""
        places = torch.arange(columns, device=self.begin.device)
        begin, end = ((bound[..., None] <= places).sum(-2) for bound in (self.end, self.begin))
        return type(self)(begin, end)


def listed(is_read: Tensor) -> Both:
    """Any relation, `(..., M, N)` bool."""
    return Both(_listed(is_read), _listed(is_read.mT))


def listed_spans(outer: Span, inner: Span, columns: int) -> tuple[Both, Both]:
    """What lies in `outer` but not in `inner`, and what lies in `inner`, which is a part of it."""
    rows = outer.begin.shape[-1]
    turned = outer.turned(columns), inner.turned(columns)
    empty, turned_empty = (Span(span.begin, span.begin) for span in (inner, turned[1]))
    return (
        Both(_without(outer, inner, columns), _without(*turned, rows)),
        Both(_without(inner, empty, columns), _without(turned[1], turned_empty, rows)),
    )


def listed_diagonal(is_read: Tensor, columns: int) -> Both:
    """Each tile's block of the same number, where `is_read`, `(..., M)` bool, says so."""
    rows = is_read.shape[-1]
    counts = is_read.int()
    own = torch.arange(rows, device=is_read.device, dtype=torch.int32)[:, None]
    of_tiles = Listing(counts, own.expand(*counts.shape, columns).contiguous())
    more = columns - rows
    counts = torch.nn.functional.pad(counts, (0, more))
    own = torch.nn.functional.pad(own, (0, 0, 0, more))
    return Both(of_tiles, Listing(counts, own.expand(*counts.shape, rows).contiguous()))


def block_mask(
    partial: Both, full: Both | None, mask_mod: object, lengths: tuple[int, int]
) -> BlockMask:
    """What FlexAttention reads: blocks in which `mask_mod` decides, and blocks read whole.

    Its kernels find a row's lists by the stride of the heads' axis, which Inductor of torch 2.11
    sets to 0 where that axis has one entry: all rows would read the first one's.

    Args:
        partial: with an axis of rows and one of query heads in front, as `full`.
        full: None: there are no such blocks.
        mask_mod: of row, head, query and key, as FlexAttention has it.
        lengths: of queries and of keys, multiples of `EDGE`.
    """
    nothing = Listing(None, None)
    partial, whole = _strided(partial), (nothing, nothing) if full is None else _strided(full)
    return BlockMask(
        lengths,
        *partial.of_tiles,
        *whole[0],
        *partial.of_blocks,
        *whole[1],
        BLOCK_SIZE=(EDGE, EDGE),
        mask_mod=mask_mod,
    )


def _strided(both: Both) -> Both:
    """The same with a stride of its own for an axis of one head."""
    if both.of_tiles.counts.shape[1] > 1:
        return both
    return Both(*(Listing(*map(laid_out, side)) for side in both))


@torch.library.custom_op("qat::laid_out", mutates_args=())
def laid_out(table: Tensor) -> Tensor:
    """A contiguous copy whose layout no compiler may choose.

    A `mask_mod` may look things up in it, also where the graph computes `table`: Inductor of torch
    2.11 leaves the layout of what it computes open, and a mask needs it settled.
    """
    return table.clone(memory_format=torch.contiguous_format)


@laid_out.register_fake
def _(table: Tensor) -> Tensor:
    return torch.empty(table.shape, dtype=table.dtype, device=table.device)


def _listed(is_read: Tensor) -> Listing:
    order = is_read.int().argsort(dim=-1, descending=True, stable=True)
    return Listing(is_read.sum(-1, dtype=torch.int32), order.int())


def _without(outer: Span, inner: Span, columns: int) -> Listing:
    places = torch.arange(columns, device=outer.begin.device)
    before = (inner.begin - outer.begin)[..., None]
    skipped = torch.where(places < before, 0, (inner.end - inner.begin)[..., None])
    indices = (outer.begin[..., None] + places + skipped).clamp(max=columns - 1)
    counts = inner.begin - outer.begin + outer.end - inner.end
    return Listing(counts.int(), indices.int())
