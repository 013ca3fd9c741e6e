"""Native Sparse Attention by FlexAttention: each branch reads only the blocks that it may see.

FlexAttention respects block lists only if it is compiled; eagerly it would compute another
function. So nothing here runs eagerly: inside a graph that is being compiled it becomes a part of
that graph, elsewhere it is compiled as a graph of its own.

Queries and keys are grouped into blocks of `EDGE`. Every block list exists in both directions:
forward iterates over the key blocks of a tile of queries, and backward also over the tiles that
read a key block. No tensor of size `queries x keys` is made.

Shapes as in `qat.extensions.nsa.kernels.select`; M tiles of `EDGE` queries, N blocks of `EDGE`
keys.
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
from qat.extensions.nsa.kernels import reference
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, pool, select

EDGE = 128
"""Queries per tile and keys per block of the kernels."""
MOST_PARTS = 8
"""Parts of a row that sum the gradients of pooled keys separately; a few long sums would
dominate."""
SHARED_TILES = 16
"""Tiles that share one copy of the first blocks, which all tiles read."""
LEAST_WIDTH = 16  # of a head: the least side of a tensor-core product
CANARY = 0.02
"""The largest error of `check`: more than TF32 rounding of results around 0.2, less than the error
of dense attention."""
_checked: set[torch.device] = set()
MOST_GRAPHS = 64
"""The most graphs (lengths, batches and modes) that are compiled before it is an error."""


class Listing(NamedTuple):
    """The columns that each row holds, as lists."""

    counts: Tensor
    """`(..., rows)` int32."""
    indices: Tensor
    """`(..., rows, columns)` int32, ascending; entries past a row's count are not read."""


class TwoWayListing(NamedTuple):
    """One relation between tiles and blocks, listed in both directions."""

    of_tiles: Listing
    """The blocks of each tile of queries."""
    of_blocks: Listing
    """The tiles of each block of keys."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Change all four tensors in the same way."""
        return type(self)(*(Listing(*map(change, listing)) for listing in self))

    def of_heads(self, group: int) -> Self:
        """Repeat a listing per key-value head for every query head of its group."""
        return self.each(lambda tensor: tensor.repeat_interleave(group, 1))

    def of_all_heads(self, count: int) -> Self:
        """Insert an axis of `count` query heads after the rows, with equal listings."""
        return self.each(lambda tensor: tensor[:, None].repeat_interleave(count, 1))


class Span(NamedTuple):
    """The columns `begin <= column < end` of each row; neither bound decreases along the rows."""

    begin: Tensor
    """`(..., rows)`."""
    end: Tensor
    """`(..., rows)`, at least `begin`."""

    def turned(self, columns: int) -> Self:
        """Return the rows of each column, which form a span again."""
        places = torch.arange(columns, device=self.begin.device)
        begin, end = ((bound[..., None] <= places).sum(-2) for bound in (self.end, self.begin))
        return type(self)(begin, end)


def listed(is_read: Tensor) -> TwoWayListing:
    """List any relation `(..., M, N)` bool in both directions."""
    return TwoWayListing(_listed(is_read), _listed(is_read.mT))


def listed_spans(outer: Span, inner: Span, columns: int) -> tuple[TwoWayListing, TwoWayListing]:
    """List the columns in `outer` but not in `inner`, and those in `inner`, a subset of `outer`."""
    rows = outer.begin.shape[-1]
    turned = outer.turned(columns), inner.turned(columns)
    empty, turned_empty = (Span(span.begin, span.begin) for span in (inner, turned[1]))
    return (
        TwoWayListing(_without(outer, inner, columns), _without(*turned, rows)),
        TwoWayListing(_without(inner, empty, columns), _without(turned[1], turned_empty, rows)),
    )


def listed_diagonal(is_read: Tensor, columns: int) -> TwoWayListing:
    """List for each tile its own block if `is_read`, `(..., M)` bool, is true."""
    rows = is_read.shape[-1]
    counts = is_read.int()
    own = torch.arange(rows, device=is_read.device, dtype=torch.int32)[:, None]
    of_tiles = Listing(counts, own.expand(*counts.shape, columns).contiguous())
    more = columns - rows
    counts, own = pad(counts, (0, more)), pad(own, (0, 0, 0, more))
    return TwoWayListing(of_tiles, Listing(counts, own.expand(*counts.shape, rows).contiguous()))


def block_mask(
    partial: TwoWayListing, full: TwoWayListing | None, mask_mod: object, lengths: tuple[int, int]
) -> BlockMask:
    """Build FlexAttention's mask from partial blocks, where `mask_mod` decides, and full blocks.

    Args:
        partial: with axes of rows and of query heads in front, as for `full`.
        full: None if there are no such blocks.
        mask_mod: function of row, head, query and key, as in FlexAttention.
        lengths: of queries and of keys, multiples of `EDGE`.
    """
    nothing = Listing(None, None)
    whole = (nothing, nothing) if full is None else full
    if partial.of_tiles.counts.shape[1] == 1:
        # Its kernels find a row's lists by the stride of the head axis, which Inductor of torch
        # 2.11 sets to 0 if that axis has one entry: all rows would read the first row's lists.
        partial = partial.each(laid_out)
        whole = whole if full is None else full.each(laid_out)
    return BlockMask(
        lengths,
        *partial.of_tiles,
        *whole[0],
        *partial.of_blocks,
        *whole[1],
        BLOCK_SIZE=(EDGE, EDGE),
        mask_mod=mask_mod,
    )


@torch.library.custom_op("qat::laid_out", mutates_args=())
def laid_out(table: Tensor) -> Tensor:
    """Return a contiguous copy whose layout the compiler must not change.

    Inductor of torch 2.11 leaves the layout of computed tensors open; a `mask_mod` needs a fixed
    one.
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
"""A function of row, head, query and key that is true if the query sees the key."""


class Tiles(NamedTuple):
    """The start of each tile of queries, and the document starts of its first and last query."""

    start: Tensor
    """`(M,)`."""
    lowest: Tensor
    """`(B, M)`; B is 1 without documents."""
    highest: Tensor
    """`(B, M)`."""


class Copies(NamedTuple):
    """Copies of the first blocks, appended, so that tiles sum gradients separately."""

    blocks: int
    count: int


class BranchInputs(NamedTuple):
    """The inputs that the branches of one layer share."""

    inputs: Inputs
    """Inputs padded to whole tiles."""
    config: NSAConfig
    tiles: Tiles
    documents: Tensor | None
    """`first`, padded."""

    @classmethod
    def of(cls, inputs: Inputs, config: NSAConfig) -> "BranchInputs":
        """Pad `inputs` with zeros at the end of every row; padding belongs to the last document."""
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
        """Return a mask for the keys in the query's past and document."""
        documents = self.documents
        if documents is None:
            return lambda row, head, query, key: key <= query
        return lambda row, head, query, key: (key <= query) & (key >= documents[row, query])

    def flex(self, query: Tensor, keys: tuple[Tensor, Tensor], mask: BlockMask) -> Tensor:
        """Return `(B, S, H, D)`: FlexAttention over `keys`, a pair of keys and values."""
        inputs = self.inputs
        out = flex_attention(
            query, *keys, block_mask=mask, scale=inputs.scale, enable_gqa=inputs.group > 1
        )
        return out.transpose(1, 2)


def selected(case: BranchInputs, selection: Tensor) -> Tensor:
    """Return the branch of selected blocks, `(B, S, H, D)`."""
    inputs, config = case.inputs, case.config
    # `(B, K, M, M)` bool: blocks of `EDGE` keys with a block that a query of the tile selected
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
) -> tuple[TwoWayListing, TwoWayListing, Copies]:
    """List partial and full blocks of `blocks`, `(B, K, M, M)` bool, for each key-value head.

    Without documents only a tile's own block is partial. Full blocks among the first, which almost
    every tile reads, are read from copies: the gradient of a block is the work of one program, and
    the first block's would take longest.
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
    """Return the number of copies of the forced first blocks that pays off; none in short rows."""
    count = num_tiles // SHARED_TILES
    blocks = config.init_blocks * config.select_block // EDGE
    return Copies(blocks, count) if blocks and count > 1 else Copies(0, 0)


def _from_copies(is_full: Tensor, copies: Copies) -> Tensor:
    """Return `(B, K, M, M + copies)`: reads of the first blocks moved to the tile's copy."""
    M = is_full.shape[-1]
    first = is_full[..., : copies.blocks]
    numbers = torch.arange(M, device=is_full.device) * copies.count // M
    is_own = numbers[:, None] == torch.arange(copies.count, device=is_full.device)
    copied = (first[..., None, :] & is_own[..., None]).flatten(-2)
    return torch.cat([torch.zeros_like(first), is_full[..., copies.blocks :], copied], -1)


def _in_edges(selection: Tensor, size: int, length: int) -> Tensor:
    """Convert the last axis from steps of `size` places to steps of `EDGE`."""
    count = length // EDGE
    if size >= EDGE:
        return selection.repeat_interleave(size // EDGE, -1)[..., :count]
    per_edge = EDGE // size
    more = count * per_edge - selection.shape[-1]
    return pad(selection, (0, more)).unflatten(-1, (count, per_edge)).any(-1)


def _in_sight(blocks: Tensor, tiles: Tiles) -> Tensor:
    """Return the `blocks` that a tile may read: those in its past and in its documents."""
    numbers = torch.arange(blocks.shape[-1], device=blocks.device)
    is_past = numbers <= numbers[:, None]
    return blocks & (is_past & (numbers >= tiles.lowest[..., None] // EDGE))[:, None]


def _sees_selected(case: BranchInputs, selection: Tensor) -> Sees:
    """Return a mask that looks up every key's block, for tiles or blocks smaller than `EDGE`."""
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
    """Return the branch of the last keys, `(B, S, H, D)`."""
    inputs, width = case.inputs, case.config.window
    length = inputs.length
    spans = window_spans(case.tiles, case.config)
    partial, full = (
        listing.of_all_heads(inputs.query.shape[1])
        for listing in listed_spans(*spans, length // EDGE)
    )
    sees_past = case.sees_past()

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key > query - width) & sees_past(row, head, query, key)

    mask = block_mask(partial, full, sees, (length, length))
    return case.flex(inputs.query, (inputs.key, inputs.value), mask)


def window_spans(tiles: Tiles, config: NSAConfig) -> tuple[Span, Span]:
    """Return the blocks `(B, M)` that any query of a tile sees, and those all see whole."""
    own = tiles.start // EDGE
    begin = torch.maximum(tiles.start - config.window + 1, tiles.lowest) // EDGE
    whole = torch.maximum(tiles.start + EDGE - config.window, tiles.highest)
    whole = torch.minimum(_up(whole, EDGE), own)
    own = own.expand_as(begin)
    return Span(begin, own + 1), Span(whole, own)


def compressed(case: BranchInputs) -> Tensor:
    """Return the branch of pooled keys, `(B, S, H, D)`, computed in parts of a row."""
    inputs, config = case.inputs, case.config
    B, H, S, D = inputs.query.shape
    if inputs.pooled_key.shape[2] == 0:
        return inputs.query.new_zeros(B, S, H, D)
    parts = math.gcd(S // EDGE, MOST_PARTS)
    pooled = inputs.pooled_key, inputs.pooled_value
    # repeat each row of pooled keys once for every part of its row of queries
    filled = (_filled(tensor, 2)[:, None].expand(-1, parts, -1, -1, -1) for tensor in pooled)
    keys = tuple(tensor.flatten(0, 1).contiguous() for tensor in filled)
    query = inputs.query.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1)
    columns = keys[0].shape[2] // EDGE
    outer, inner = (
        Span(*(bound.expand(B, -1).reshape(B * parts, -1) for bound in span))
        for span in compressed_spans(case.tiles, config, columns)
    )
    partial, full = (listing.of_all_heads(H) for listing in listed_spans(outer, inner, columns))
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
    """Do what `window_spans` does, for `columns` blocks of `EDGE` pooled keys."""
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
    return (value + step - 1) // step  # rounded up


def _filled(tensor: Tensor, dim: int) -> Tensor:
    """Pad axis `dim` with zeros to a multiple of `EDGE`."""
    more = -tensor.shape[dim] % EDGE
    return tensor if more == 0 else pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, more))


def refusal(config: NSAConfig, *, head_dim: int) -> str | None:
    """Return why FlexAttention does not support this configuration, or None if it does."""
    if head_dim < LEAST_WIDTH:
        return f"head_dim={head_dim} is below {LEAST_WIDTH}"
    for name in ("select_tile", "select_block"):
        small, large = sorted((getattr(config, name), EDGE))
        if large % small:
            return f"{name}={getattr(config, name)} and {EDGE} do not divide one another"
    return None


def attend(inputs: Inputs, config: NSAConfig, selection: Tensor | None = None) -> Tensor:
    """Return attention `(B, S, H, D)` over the blocks in `selection`, or those `select` chooses."""
    inputs = of_one_dtype(inputs)
    if torch.compiler.is_compiling():
        return attend_compiling(inputs, config, selection)
    S = inputs.length
    if selection is None:
        inputs = lengthened(inputs, config, bucket(S))
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        return _compiled(inputs, config, selection)[:, :S]


def attend_other(inputs: Inputs, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Return the compressed and the window branch, `(B, S, H, D)` each."""
    if torch.compiler.is_compiling():
        return other_compiling(inputs, config)
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        return _compiled_other(inputs, config)


@torch.no_grad()
def check(device: torch.device) -> None:
    """Check, once per process and device, that FlexAttention respects block lists.

    Raises:
        ConfigError: it does not.
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
    """Compute `attend` inside a graph; the graph is specialized to the batch and the length."""
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
    """Compute `attend_other` inside a graph."""
    case = BranchInputs.of(inputs, config)
    return compressed(case)[:, : inputs.length], window(case)[:, : inputs.length]


_compiled = torch.compile(attend_compiling, fullgraph=True, dynamic=False)
_compiled_other = torch.compile(other_compiling, fullgraph=True, dynamic=False)


def bucket(length: int) -> int:
    """Return the padded length of rows, so that few lengths are compiled; at most 1/4 more."""
    step = max(EDGE, 2 ** max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


def lengthened(inputs: Inputs, config: NSAConfig, length: int) -> Inputs:
    """Pad every row with zeros that no query of the row sees."""
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
    """Cast the inputs to the autocast dtype, since autocast does not cover FlexAttention."""
    query = inputs.query
    if not torch.is_autocast_enabled(query.device.type) or query.dtype == torch.float64:
        return inputs
    dtype = torch.get_autocast_dtype(query.device.type)
    names = ("query", "key", "value", "pooled_key", "pooled_value")
    found = {name: getattr(inputs, name) for name in names}
    return inputs._replace(**{n: t.to(dtype) for n, t in found.items() if t is not None})
