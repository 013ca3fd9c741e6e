"""Native Sparse Attention by FlexAttention: each branch reads only the blocks that it may see.

FlexAttention heeds lists of blocks only where it is compiled; run eagerly it would compute another
function. So nothing here runs eagerly: inside a graph that is being compiled it becomes a part of
that, elsewhere a graph of its own.

Queries and keys lie in blocks of `EDGE`. Every list of blocks goes both ways: forward walks the key
blocks of a tile of queries, backward besides the tiles that read a key block. Nothing of the size
`queries x keys` is made.

Shapes as in `qat.kernels.nsa.select`; M tiles of `EDGE` queries, N blocks of `EDGE` keys.
"""

import math
import operator
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from qat.errors import ConfigError
from qat.kernels.nsa import reference
from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.select import Inputs, pool, select

EDGE = 128
"""Queries of a tile and keys of a block: what the kernels work on at a time."""
MOST_PARTS = 8
"""Parts of a row that add up gradients of pooled keys apart, lest a few long sums be waited for."""
SHARED_TILES = 16
"""Tiles that read one copy of the first blocks, which all tiles read."""
LEAST_WIDTH = 16
CANARY = 0.02
"""What rounding to TF32 may add to results around 0.2; dense attention is further away."""
_checked: set[torch.device] = set()
MOST_GRAPHS = 64
"""Lengths, batches and modes that are compiled before it is an error."""


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


Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether, of a row and a head, a query sees a key."""


class Tiles(NamedTuple):
    """Where each tile of queries begins, and the documents of its first and its last query."""

    start: Tensor
    """`(M,)`."""
    lowest: Tensor
    """`(B, M)`; B is 1 without documents."""
    highest: Tensor
    """`(B, M)`."""


class Copies(NamedTuple):
    """Copies of the first blocks behind the last: tiles that share none add up gradients apart."""

    blocks: int
    count: int


class BranchInputs(NamedTuple):
    """What the branches of one layer share."""

    inputs: Inputs
    """Filled up to whole tiles."""
    config: NSAConfig
    tiles: Tiles
    documents: Tensor | None
    """`first`, filled up."""

    @classmethod
    def of(cls, inputs: Inputs, config: NSAConfig) -> "BranchInputs":
        """`inputs` with zeros behind every row; what fills a row is of its last document."""
        documents = None
        if inputs.first is not None:
            documents = _filled(inputs.first, 1).cummax(-1).values
        filled = {name: _filled(getattr(inputs, name), 2) for name in ("query", "key", "value")}
        inputs = inputs._replace(**filled)
        start = torch.arange(0, inputs.length, EDGE, device=inputs.query.device)
        lowest = highest = torch.zeros_like(start)[None]
        if documents is not None:
            lowest, highest = documents[:, ::EDGE], documents[:, EDGE - 1 :: EDGE]
        return cls(inputs, config, Tiles(start, lowest, highest), documents)

    def sees_past(self) -> Sees:
        """Keys of the query's past and document."""
        documents = self.documents
        if documents is None:
            return lambda row, head, query, key: key <= query
        return lambda row, head, query, key: (key <= query) & (key >= documents[row, query])

    def flex(self, query: Tensor, keys: tuple[Tensor, Tensor], mask: BlockMask) -> Tensor:
        """`(B, S, H, D)`, from `keys` and values."""
        inputs = self.inputs
        out = flex_attention(
            query, *keys, block_mask=mask, scale=inputs.scale, enable_gqa=inputs.group > 1
        )
        return out.transpose(1, 2)


def selected(case: BranchInputs, selection: Tensor) -> Tensor:
    """`(B, S, H, D)`: the branch of selected blocks."""
    inputs, config = case.inputs, case.config
    # `(B, K, M, M)` bool: blocks of `EDGE` keys of which some query of the tile selects any
    blocks = selection
    for dim, size in ((2, config.select_tile), (3, config.select_block)):
        blocks = _in_edges(blocks.transpose(dim, -1), size, inputs.length).transpose(dim, -1)
    keys = inputs.key, inputs.value
    if config.select_tile % EDGE or config.select_block % EDGE:
        partial, full = listed(_in_sight(blocks, case.tiles)), None
        sees = _sees_selected(case, selection)
    else:
        has_documents = case.documents is not None
        partial, full, copies = listed_selection(blocks, case.tiles, config, has_documents)
        if copies.count:
            first = copies.blocks * EDGE
            keys = tuple(
                torch.cat([tensor, tensor[:, :, :first].repeat(1, 1, copies.count, 1)], 2)
                for tensor in keys
            )
        sees, full = case.sees_past(), full.of_heads(inputs.group)
    lengths = inputs.length, keys[0].shape[2]
    mask = block_mask(partial.of_heads(inputs.group), full, sees, lengths)
    return case.flex(inputs.query, keys, mask)


def listed_selection(
    blocks: Tensor, tiles: Tiles, config: NSAConfig, has_documents: bool
) -> tuple[Both, Both, Copies]:
    """Partial and whole blocks of `blocks`, `(B, K, M, M)` bool, a listing a key-value head.

    Without documents only a tile's own block is partial. Whole ones among the first, which almost
    every tile reads, are read from copies: the gradient of a block is one program's work, and all
    would wait for that of the first.
    """
    M = blocks.shape[-1]
    numbers = torch.arange(M, device=blocks.device)
    starts_behind = numbers * EDGE >= tiles.highest[..., None]
    is_full = blocks & ((numbers < numbers[:, None]) & starts_behind)[:, None]
    copies = copies_of(M, config)
    columns = M + copies.blocks * copies.count
    if has_documents:
        is_partial = _in_sight(blocks, tiles) & ~is_full
        partial = listed(pad(is_partial, (0, columns - M)))
    else:
        partial = listed_diagonal(blocks.diagonal(dim1=-2, dim2=-1), columns)
    if copies.count:
        is_full = _from_copies(is_full, copies)
    return partial, listed(is_full), copies


def copies_of(num_tiles: int, config: NSAConfig) -> Copies:
    """How many copies of the forced first blocks are worth their while; none in short rows."""
    count = num_tiles // SHARED_TILES
    blocks = config.init_blocks * config.select_block // EDGE
    return Copies(blocks, count) if blocks and count > 1 else Copies(0, 0)


def _from_copies(is_full: Tensor, copies: Copies) -> Tensor:
    """`(B, K, M, M + copies)`: what was read from the first blocks is read from the tile's copy."""
    M = is_full.shape[-1]
    first = is_full[..., : copies.blocks]
    numbers = torch.arange(M, device=is_full.device) * copies.count // M
    is_own = numbers[:, None] == torch.arange(copies.count, device=is_full.device)
    copied = (first[..., None, :] & is_own[..., None]).flatten(-2)
    return torch.cat([torch.zeros_like(first), is_full[..., copies.blocks :], copied], -1)


def _in_edges(selection: Tensor, size: int, length: int) -> Tensor:
    """The last axis, in steps of `size` places, in steps of `EDGE`."""
    count = length // EDGE
    if size >= EDGE:
        return selection.repeat_interleave(size // EDGE, -1)[..., :count]
    per_edge = EDGE // size
    more = count * per_edge - selection.shape[-1]
    return pad(selection, (0, more)).unflatten(-1, (count, per_edge)).any(-1)


def _in_sight(blocks: Tensor, tiles: Tiles) -> Tensor:
    """The `blocks` that a tile may read: in its past and in its documents."""
    numbers = torch.arange(blocks.shape[-1], device=blocks.device)
    is_past = numbers <= numbers[:, None]
    return blocks & (is_past & (numbers >= tiles.lowest[..., None] // EDGE))[:, None]


def _sees_selected(case: BranchInputs, selection: Tensor) -> Sees:
    """Looks every key's block up: for tiles and blocks below `EDGE`."""
    tile, block = case.config.select_tile, case.config.select_block
    length, group = case.inputs.length, case.inputs.group
    rows, columns = (-(-length // size) for size in (tile, block))
    more = columns - selection.shape[3], rows - selection.shape[2]
    table = laid_out(pad(selection, (0, more[0], 0, more[1])))
    sees_past = case.sees_past()

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_selected = table[row, head // group, query // tile, key // block]
        return is_selected & sees_past(row, head, query, key)

    return sees


def window(case: BranchInputs) -> Tensor:
    """`(B, S, H, D)`: the branch of the last keys."""
    inputs, width = case.inputs, case.config.window
    length = inputs.length
    spans = window_spans(case.tiles, case.config)
    partial, full = (
        both.of_all_heads(inputs.query.shape[1]) for both in listed_spans(*spans, length // EDGE)
    )
    sees_past = case.sees_past()

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key > query - width) & sees_past(row, head, query, key)

    mask = block_mask(partial, full, sees, (length, length))
    return case.flex(inputs.query, (inputs.key, inputs.value), mask)


def window_spans(tiles: Tiles, config: NSAConfig) -> tuple[Span, Span]:
    """Blocks `(B, M)` of which some query of the tile sees a key, and those seen whole by all."""
    own = tiles.start // EDGE
    begin = torch.maximum(tiles.start - config.window + 1, tiles.lowest) // EDGE
    whole = torch.maximum(tiles.start + EDGE - config.window, tiles.highest)
    whole = torch.minimum(_up(whole, EDGE), own)
    own = own.expand_as(begin)
    return Span(begin, own + 1), Span(whole, own)


def compressed(case: BranchInputs) -> Tensor:
    """`(B, S, H, D)`: the branch of pooled keys, a row in parts."""
    inputs, config = case.inputs, case.config
    B, H, S, D = inputs.query.shape
    if inputs.pooled_key.shape[2] == 0:
        return inputs.query.new_zeros(B, S, H, D)
    parts = math.gcd(S // EDGE, MOST_PARTS)
    pooled = inputs.pooled_key, inputs.pooled_value
    # each row of pooled keys as often as a row of queries has parts
    filled = (_filled(tensor, 2)[:, None].expand(-1, parts, -1, -1, -1) for tensor in pooled)
    keys = tuple(tensor.flatten(0, 1).contiguous() for tensor in filled)
    query = inputs.query.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1)
    columns = keys[0].shape[2] // EDGE
    outer, inner = (
        Span(*(bound.expand(B, -1).reshape(B * parts, -1) for bound in span))
        for span in compressed_spans(case.tiles, config, columns)
    )
    partial, full = (both.of_all_heads(H) for both in listed_spans(outer, inner, columns))
    sees = _sees_pooled(case, parts)
    lengths = S // parts, columns * EDGE
    mask = block_mask(partial, full, sees, lengths)
    return case.flex(query, keys, mask).unflatten(0, (B, parts)).flatten(1, 2)


def _sees_pooled(case: BranchInputs, parts: int) -> Sees:
    stride, block = case.config.compress_stride, case.config.compress_block
    length, documents = case.inputs.length // parts, case.documents

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query + row % parts * length
        is_past = key * stride + block - 1 <= place
        if documents is None:
            return is_past
        return is_past & (key * stride >= documents[row // parts, place])

    return sees


def compressed_spans(tiles: Tiles, config: NSAConfig, columns: int) -> tuple[Span, Span]:
    """As `window_spans`, of `columns` blocks of `EDGE` pooled keys."""
    stride, block = config.compress_stride, config.compress_block

    def seen_at(place: Tensor) -> Tensor:
        return ((place + 1 - block) // stride + 1).clamp(min=0)

    end = _up(seen_at(tiles.start + EDGE - 1), EDGE).clamp(max=columns)
    begin = torch.minimum(_up(tiles.lowest, stride) // EDGE, end)
    whole_end = torch.maximum(torch.minimum(seen_at(tiles.start) // EDGE, end), begin)
    whole = torch.maximum(_up(_up(tiles.highest, stride), EDGE), begin)
    return (
        Span(begin, end.expand_as(begin)),
        Span(torch.minimum(whole, whole_end), whole_end),
    )


def _up(value: Tensor, step: int) -> Tensor:
    """`value / step`, rounded up."""
    return (value + step - 1) // step


def _filled(tensor: Tensor, dim: int) -> Tensor:
    """Zeros behind axis `dim` up to a multiple of `EDGE`."""
    more = -tensor.shape[dim] % EDGE
    return tensor if more == 0 else pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, more))


def refusal(config: NSAConfig, *, head_dim: int) -> str | None:
    """Why FlexAttention cannot compute this; None: it can."""
    if head_dim < LEAST_WIDTH:
        return f"head_dim={head_dim} is below {LEAST_WIDTH}"
    for name in ("select_tile", "select_block"):
        small, large = sorted((getattr(config, name), EDGE))
        if large % small:
            return f"{name}={getattr(config, name)} and {EDGE} do not divide one another"
    return None


def attend(inputs: Inputs, config: NSAConfig, selection: Tensor | None = None) -> Tensor:
    """`(B, S, H, D)`; the blocks are those of `selection`, or those that `select` chooses."""
    inputs = of_one_dtype(inputs)
    if torch.compiler.is_compiling():
        return attend_compiling(inputs, config, selection)
    S = inputs.length
    if selection is None:
        inputs = lengthened(inputs, config, bucket(S))
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        return _compiled(inputs, config, selection)[:, :S]


def attend_other(inputs: Inputs, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """The compressed branch and the window, `(B, S, H, D)` each."""
    if torch.compiler.is_compiling():
        return other_compiling(inputs, config)
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        return _compiled_other(inputs, config)


@torch.no_grad()
def check(device: torch.device) -> None:
    """Make sure, once in a process, that lists of blocks are heeded on `device`.

    Raises:
        ConfigError: they are not.
    """
    if device in _checked:
        return
    config = NSAConfig(mode="merged", num_selected=3)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 6 * EDGE, 32, generator=generator).to(device)
    inputs = Inputs(query, key, value, pool(key, config), None, None, None, 32**-0.5)
    with torch.autocast(device.type, enabled=False):
        selection = select(inputs, config)
        expected = reference.attend(inputs, selection, config)
        error = (attend(inputs, config, selection) - expected).abs().max().item()
    if not error < CANARY:
        raise ConfigError(
            f"nsa backend=flex is off by {error:.3g} on {device}, expected below {CANARY}: "
            f"FlexAttention of torch {torch.__version__} heeds no lists of blocks; use "
            "backend=reference, or another version of torch"
        )
    _checked.add(device)


def attend_compiling(inputs: Inputs, config: NSAConfig, selection: Tensor | None) -> Tensor:
    """`attend` as a graph has it: one for every batch and length, whatever the compiler asks."""
    for size in inputs.query.shape:
        operator.index(size)
    if selection is None:
        selection = select(inputs, config)
    S = inputs.length
    case = BranchInputs.of(inputs, config)
    chosen = selected(case, selection)[:, :S]
    if config.mode == "merged":
        return chosen
    return reference.combine(inputs.gates, compressed(case)[:, :S], chosen, window(case)[:, :S])


def other_compiling(inputs: Inputs, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """`attend_other` as a graph has it."""
    case = BranchInputs.of(inputs, config)
    return compressed(case)[:, : inputs.length], window(case)[:, : inputs.length]


_compiled = torch.compile(attend_compiling, fullgraph=True, dynamic=False)
_compiled_other = torch.compile(other_compiling, fullgraph=True, dynamic=False)


def bucket(length: int) -> int:
    """The length that rows of `length` are filled up to, so that few are compiled: <= 1/4 more."""
    step = max(EDGE, 2 ** max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


def lengthened(inputs: Inputs, config: NSAConfig, length: int) -> Inputs:
    """Zeros behind every row, which no query of the row sees."""
    more = length - inputs.length
    if more == 0:
        return inputs
    more_pooled = config.num_compressed(length) - inputs.pooled_key.shape[2]
    sizes = {"query": more, "key": more, "value": more}
    sizes |= {"pooled_key": more_pooled, "pooled_value": more_pooled}
    found = {name: getattr(inputs, name) for name in sizes}
    filled = {n: pad(t, (0, 0, 0, sizes[n])) for n, t in found.items() if t is not None}
    gates = None if inputs.gates is None else pad(inputs.gates, (0, 0, 0, 0, 0, more))
    first = None if inputs.first is None else pad(inputs.first, (0, more))
    return inputs._replace(gates=gates, first=first, **filled)


def of_one_dtype(inputs: Inputs) -> Inputs:
    """What autocast would do, which does not know FlexAttention."""
    query = inputs.query
    if not torch.is_autocast_enabled(query.device.type) or query.dtype == torch.float64:
        return inputs
    dtype = torch.get_autocast_dtype(query.device.type)
    names = ("query", "key", "value", "pooled_key", "pooled_value")
    found = {name: getattr(inputs, name) for name in names}
    return inputs._replace(**{n: t.to(dtype) for n, t in found.items() if t is not None})
