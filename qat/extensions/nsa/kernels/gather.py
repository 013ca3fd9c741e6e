"""Native Sparse Attention with per-query selection, at the cost of the selected blocks only.

FlexAttention reads all blocks that any of 128 queries selected, so per-query selection makes it
slow. Here each block of keys gathers the queries that selected it (arXiv 2508.18224); the other two
branches use FlexAttention. Forward and backward over 16,384 random positions took 7.1 ms, dense
cuDNN attention 7.1 ms, and FlexAttention 39.9 ms (one H200).

A block's keys and values are loaded once for all queries that read them; the rows of these queries
fill the tiles of the tensor cores for any group size. Each pair of a query and a block that it
selected has a place in the block's list. Its partial output is stored at that place, and a second
kernel adds up the partial outputs of each query. All sums have a fixed order, so results are
deterministic to the bit.

Shapes: R = B K rows of a key-value head each, G query heads per key-value head, S positions, D head
width, C scoring keys, N blocks, n blocks that a query selects at most, E = S n places for pairs.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qat.backend.device import on
from qat.errors import ConfigError
from qat.extensions.nsa.kernels import flex
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.reference import combine
from qat.extensions.nsa.kernels.select import Inputs, scoring_keys, select
from qat.kernels.dispatch import tl, triton

LEAST_BLOCK, MOST_BLOCK = 16, 128  # keys: sides of a tensor-core tile
MOST_WIDTH, MOST_SELECTED, MOST_GROUP = 256, 255, 32
"""A rank among the selected fits a byte; a query's heads fit a tile's rows (32 in float32)."""
TILES = 7.2
"""Bytes of shared memory for each number in a block's keys, with which backward has enough rows."""
LOG2E = tl.constexpr(1.4426950408889634)
"""The factor for logits in base 2, for which the hardware has an exponential."""
FORCED_BITS = tl.constexpr(0x7F000000)
"""The score bits of a forced block, larger than those of any real score."""
SCORE_QUERIES, SELECT_QUERIES, LIST_QUERIES = 32, 16, 1024
"""Queries of a program that scores blocks, of one that picks them, and of one step of listing."""
LEAST = 16
"""The fewest rows of a `tl.dot` tile."""
FORWARD_ROWS, BACKWARD_ROWS = 64, 128
"""Rows (one head of a query each) that are multiplied by a block at a time; half in float32, and
fewer in backward where shared memory is short."""
CHUNK = 512
"""Pairs of a block that one program processes."""
MOST_BYTES = 2**30
"""Bytes of scores, or of partial results, in memory at a time."""


def refusal(config: NSAConfig, *, group: int, head_dim: int, device: torch.device) -> str | None:
    """Return why these kernels do not support this configuration, or None if they do."""
    block = config.select_block
    if not LEAST_BLOCK <= block <= MOST_BLOCK or block & (block - 1):
        return f"select_block={block} is no power of two from {LEAST_BLOCK} to {MOST_BLOCK}"
    for name, value, most in (
        ("head_dim", head_dim, MOST_WIDTH),
        ("num_selected", config.num_selected, MOST_SELECTED),
        ("the group", group, MOST_GROUP),
    ):
        if value > most:
            return f"{name}={value} is above {most}"
    gpu = on(device)
    if not gpu.has_bf16():  # Triton 3.7 multiplies without tensor cores, in four times the memory
        return "the GPU is older than Ampere"
    needed, room = int(TILES * block * head_dim), gpu.shared_memory_bytes()
    if needed > room:
        return f"a block of {block} keys takes {needed:,} bytes of shared memory of {room:,}"
    return None if config.mode == "merged" else flex.refusal(config, head_dim=head_dim)


def attend(inputs: Inputs, config: NSAConfig, selection: Tensor | None = None) -> Tensor:
    """Return attention `(B, S, H, D)` over the blocks in `selection`, or those `select` chooses."""
    inputs = flex.of_one_dtype(inputs)
    ranks = chosen(inputs, config) if selection is None else ranks_of(selection, inputs, config)
    group, first = inputs.group, inputs.first
    query = inputs.query.unflatten(1, (-1, group)).flatten(0, 1)
    key, value = inputs.key.flatten(0, 1), inputs.value.flatten(0, 1)
    sizes = config.num_selected, config.select_block
    found = _attend(query, key, value, first, ranks, *sizes, inputs.scale)[0]
    found = found.unflatten(0, (len(inputs.query), -1)).transpose(1, 2).flatten(2, 3)
    if config.mode == "merged":
        return found
    compressed, window = flex.attend_other(inputs, config)
    return combine(inputs.gates, compressed, found, window)


def has_kernel(config: NSAConfig) -> bool:
    """Return whether a kernel selects: pooled blocks are apart, and each query selects its own."""
    is_apart = config.compress_block == config.compress_stride
    is_power = not config.compress_stride & (config.compress_stride - 1)
    return is_apart and is_power and config.select_tile == 1


def read_by_query(inputs: Inputs, config: NSAConfig) -> Tensor:
    """Return the number of blocks that the kernel selects for each query, `(B, K, S)`."""
    ranks = chosen(flex.of_one_dtype(inputs), config)
    return (ranks > 0).sum(1).unflatten(0, (len(inputs.query), -1))


@torch.no_grad()
def chosen(inputs: Inputs, config: NSAConfig) -> Tensor:
    """Return `(R, N, S)` uint8: a block's rank among those a query selects; 0: not selected.

    A kernel computes it if `has_kernel`, otherwise `select` does.
    """
    if not has_kernel(config):
        return ranks_of(select(inputs, config), inputs, config)
    scoring = scoring_keys(inputs.key, inputs.pooled_key, config).flatten(0, 1)
    query = inputs.query.unflatten(1, (-1, inputs.group)).flatten(0, 1)
    numbers = (config.num_selected, config.select_block, config.compress_stride)
    forced = (config.init_blocks, config.local_blocks)
    return _choose(query, scoring, inputs.first, *numbers, *forced, config.bound > 0, inputs.scale)


def ranks_of(selection: Tensor, inputs: Inputs, config: NSAConfig) -> Tensor:
    """Convert `selection` `(B, K, T, N)` to ranks as `chosen` returns them."""
    each = selection.repeat_interleave(config.select_tile, 2)[:, :, : inputs.length]
    each = each[..., : -(-inputs.length // config.select_block)]
    own = torch.arange(inputs.length, device=each.device)[:, None] // config.select_block
    each = each & (torch.arange(each.shape[-1], device=each.device) <= own)
    ranks = (each.cumsum(-1) * each).to(torch.uint8)
    return ranks.flatten(0, 1).transpose(1, 2).contiguous()


@torch.library.custom_op("qat::nsa_choose", mutates_args=())
def _choose(
    query: Tensor,
    scoring: Tensor,
    first: Tensor | None,
    count: int,
    block: int,
    stride: int,
    init: int,
    local: int,
    has_bound: bool,
    scale: float,
) -> Tensor:
    """Return `(R, N, S)` uint8: the rank, from 1, of each block that a query selects; else 0.

    Args:
        query: `(R, G, S, D)`.
        scoring: `(R, C, D)`, or with a bound `(R, C, 2 D)`: `scoring_keys`.
        first: `(B, S)` int64, the start of each position's document.
        count: n.
        block: keys per block.
        stride: keys per pooled block; a power of two; pooled blocks do not overlap.
        init: `NSAConfig.init_blocks`.
        local: `NSAConfig.local_blocks`.
        has_bound: True if scoring keys are bounds.
        scale: factor of `query @ key`.
    """
    query, scoring = query.contiguous(), scoring.contiguous()
    (R, G, S, D), C = query.shape, scoring.shape[1]
    N = triton.cdiv(S, block)
    ranks = torch.empty(R, N, S, dtype=torch.uint8, device=query.device)
    heads = R if first is None else R // first.shape[0]
    most = (
        max(SELECT_QUERIES, MOST_BYTES // (4 * R * N)) // SCORE_QUERIES * SCORE_QUERIES
        or SCORE_QUERIES
    )
    scores = torch.empty(R, min(most, S), N, dtype=torch.float32, device=query.device)
    group = triton.next_power_of_2(G)
    queries = max(LEAST // group, SCORE_QUERIES // group, 1)
    per_block = block // stride
    for begin in range(0, S, most):
        some = min(most, S - begin)
        _score_kernel[(triton.cdiv(some, queries), R)](
            query, scoring, first, scores, S, C, N, begin, some, scores.shape[1], scale, heads,
            G=G, GROUP=group, D=D, WIDTH=max(LEAST, triton.next_power_of_2(D)),
            STRIDE=stride, PER_BLOCK=per_block, HAS_BOUND=has_bound,
            QUERIES=queries, KEYS=max(LEAST, per_block, 64), PRECISION=_precision(query),
        )  # fmt: skip
        _select_kernel[(triton.cdiv(some, SELECT_QUERIES), R)](
            scores, first, ranks, S, N, begin, some, scores.shape[1], heads,
            COUNT=count, BLOCK=block, INIT=init, LOCAL=local,
            QUERIES=SELECT_QUERIES, WIDE=triton.next_power_of_2(N),
        )  # fmt: skip
    return ranks


@_choose.register_fake
def _(
    query: Tensor,
    scoring: Tensor,
    first: Tensor | None,
    count: int,
    block: int,
    *_: object,
) -> Tensor:
    R, _, S, _ = query.shape
    return query.new_empty(R, -(-S // block), S, dtype=torch.uint8)


@torch.library.custom_op("qat::nsa_gather", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    ranks: Tensor,
    count: int,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return `(R, S, G, D)` attention to the selected blocks, and `(R, G, S)` float32 log2-sum-exp.

    `query` is `(R, G, S, D)`, `key` and `value` `(R, S, D)`, `first` `(B, S)` int64; `ranks` are
    from `_choose`; `count` is n, `block` the keys per block, `scale` the factor of `query @ key`.
    """
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    (R, G, S, D), (queries, places, ends) = query.shape, pairs_of(ranks, count, block)
    out, sums = query.new_empty(R, S, G, D), query.new_empty(R, G, S, dtype=torch.float32)
    E, n = queries.shape[1], places.shape[2]
    blocks, starts, _ = _work(ends, E)
    for some in _slices(R, E * G * D * query.element_size()):
        parts = query.new_empty(some.stop - some.start, E, G, D)
        part_sums = sums.new_empty(some.stop - some.start, E, G)
        grid = (blocks.shape[1], len(parts))
        _forward_kernel[grid](
            query[some], key[some], value[some], first, queries[some], ends[some], blocks[some],
            starts[some], parts, part_sums, S, E, ends.shape[1], blocks.shape[1], scale,
            some.start, R if first is None else R // first.shape[0],
            **_sizes(query, block, FORWARD_ROWS), num_warps=4,
        )  # fmt: skip
        _add_up_kernel[(triton.cdiv(S, SELECT_QUERIES), len(parts) * G)](
            parts, part_sums, places[some], out[some], sums[some], S, E,
            G=G, D=D, WIDTH=triton.next_power_of_2(D), COUNT=n,
            WIDE=triton.next_power_of_2(n), QUERIES=SELECT_QUERIES, HAS_SUMS=True,
        )  # fmt: skip
    return out, sums


@_attend.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    R, G, S, D = query.shape
    return query.new_empty(R, S, G, D), query.new_empty(R, G, S, dtype=torch.float32)


@torch.library.custom_op("qat::nsa_gather_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    out: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    ranks: Tensor,
    count: int,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query `(R, G, S, D)`, key and value; see `_attend`."""
    tensors = (tensor.contiguous() for tensor in (grad, out, sums, query, key, value))
    grad, out, sums, query, key, value = tensors
    (R, G, S, D), (queries, places, ends) = query.shape, pairs_of(ranks, count, block)
    E, n, N = queries.shape[1], places.shape[2], ends.shape[1]
    wide = torch.promote_types(grad.dtype, torch.float32)
    # `sum(p * d_p)` of each row, from the output instead of all weights
    delta = (grad.to(wide) * out).sum(-1).transpose(1, 2).contiguous()
    grad_rows = query.new_empty(R, S, G, D)
    d_key, d_value = torch.empty_like(key), torch.empty_like(value)
    blocks, starts, chunks = _work(ends, E)
    P = blocks.shape[1]
    of_row = E * G * D * query.element_size() + 2 * P * block * D * 4
    for some in _slices(R, of_row):
        rows = some.stop - some.start
        parts = query.new_empty(rows, E, G, D)
        d_keys, d_values = torch.empty(2, rows, P, block, D, dtype=wide, device=query.device)
        launch = partial(
            _backward_kernel[(P, rows)],
            query[some], key[some], value[some], first, queries[some], ends[some], blocks[some],
            starts[some], grad[some], sums[some], delta[some], parts, d_keys, d_values,
            S, E, N, P, scale, some.start, R if first is None else R // first.shape[0],
            num_warps=8 if D > 64 else 4,
        )  # fmt: skip
        _launch_in_room(launch, _sizes(query, block, BACKWARD_ROWS), query.device)
        _add_up_kernel[(triton.cdiv(S, SELECT_QUERIES), rows * G)](
            parts, None, places[some], grad_rows[some], None, S, E,
            G=G, D=D, WIDTH=triton.next_power_of_2(D), COUNT=n,
            WIDE=triton.next_power_of_2(n), QUERIES=SELECT_QUERIES, HAS_SUMS=False,
        )  # fmt: skip
        steps = triton.cdiv(block, LEAST)
        _add_blocks_kernel[(N * steps, rows)](
            d_keys, d_values, d_key[some], d_value[some], chunks[some], S, N, P,
            D=D, WIDTH=triton.next_power_of_2(D), BLOCK=block, PART=LEAST,
        )  # fmt: skip
    return grad_rows.transpose(1, 2), d_key, d_value


@_attend_backward.register_fake
def _(
    grad: Tensor, out: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    R, G, S, D = query.shape
    d_query = query.new_empty(R, S, G, D).transpose(1, 2)
    return d_query, key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.count, ctx.block, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)


def _gradients(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: None) -> tuple:
    sizes = ctx.count, ctx.block, ctx.scale
    return (*_attend_backward(grad, *ctx.saved_tensors, *sizes), None, None, None, None, None)


_attend.register_autograd(_gradients, setup_context=_keep)


def pairs_of(ranks: Tensor, count: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each block, the list of queries that read it; the lists are concatenated.

    Args:
        ranks: `(R, N, S)`, from `chosen`.
        count: n.
        block: keys per block.

    Returns:
        queries: `(R, E)` int32, ascending in each list.
        places: `(R, S, n)` int32, the positions of each query's pairs in `queries`; -1: none.
        ends: `(R, N)` int32, the end of each list.
    """
    R, N, S = ranks.shape
    new = {"dtype": torch.int32, "device": ranks.device}
    sizes = (ranks != 0).sum(-1, dtype=torch.int32)
    ends = sizes.cumsum(-1, dtype=torch.int32)
    queries, places = torch.empty(R, S * count, **new), torch.full((R, S, count), -1, **new)
    _list_kernel[(N, R)](
        ranks, ends, sizes, queries, places, N, S, COUNT=count, BLOCK=block, QUERIES=LIST_QUERIES
    )
    return queries, places, ends


def _work(ends: Tensor, num_places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assign blocks and chunks to P programs; all results are int32.

    Returns:
        `(R, P)` the program's block, N for none; `(R, P)` the chunk of the block's list; `(R, N)`
        the cumulative number of chunks up to and including each block.
    """
    R, N = ends.shape
    sizes = ends.diff(dim=-1, prepend=ends.new_zeros(R, 1))
    chunks = ((sizes + CHUNK - 1) // CHUNK).cumsum(-1, dtype=torch.int32)
    numbers = torch.arange(num_places // CHUNK + N, dtype=torch.int32, device=ends.device)
    numbers = numbers.expand(R, -1).contiguous()
    blocks = torch.searchsorted(chunks, numbers, right=True, out_int32=True)
    before = torch.nn.functional.pad(chunks, (1, 0)).gather(1, blocks.long())
    return blocks, numbers - before, chunks


def _slices(rows: int, bytes_of_row: int) -> list[slice]:
    step = max(1, MOST_BYTES // bytes_of_row)
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]


def _sizes(query: Tensor, block: int, rows: int) -> dict[str, object]:
    G, D = query.shape[1], query.shape[3]
    return {
        "G": G,
        "D": D,
        "WIDTH": max(LEAST, triton.next_power_of_2(D)),
        "BLOCK": block,
        "ROWS": rows * 2 // query.element_size(),
        "CHUNK": CHUNK,
        "PRECISION": _precision(query),
    }


_FITTING: dict[tuple[object, ...], dict[str, int]] = {}
"""Options with which backward fits in a GPU's memories, where it needs less than by default."""


def _launch_in_room(
    launch: Callable[..., None], sizes: dict[str, object], device: torch.device
) -> None:
    """Launch backward with as many rows as the GPU has memory for.

    What a tile takes depends on how a GPU multiplies: for blocks of 64 keys, 128 wide, 150 KB of
    shared memory on Ampere, 199 KB on Hopper and 272 KB on Blackwell (Triton 3.7), so that Triton
    is asked. Without prefetching rows, it needs less.

    Raises:
        ConfigError: the GPU has no memory for any number of rows.
    """
    kind = (device, *sizes.values())
    fitting = _FITTING.get(kind, {})
    least = max(LEAST, triton.next_power_of_2(sizes["G"]))
    while True:
        try:
            launch(**sizes | fitting)
        except triton.OutOfResources as error:
            rows = fitting.get("ROWS", 2 * sizes["ROWS"]) // 2
            if rows < least:
                raise ConfigError(
                    f"select_block={sizes['BLOCK']} with heads of {sizes['D']} takes "
                    f"{error.required:,} bytes of {error.name}, expected at most {error.limit:,}; "
                    "choose a smaller select_block, --dtype bf16 or backend=flex"
                ) from None
            fitting = _FITTING[kind] = {"ROWS": rows, "num_stages": 1}
        else:
            return


def _precision(tensor: Tensor) -> str:
    """Return the precision of float32 products: three TF32 products if available.

    Their sum is as precise as float32; products of 16-bit numbers ignore the setting.
    """
    has_tf32 = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return "tf32x3" if has_tf32 else "ieee"


@triton.jit
def _logits(
    query, negative, scoring, first_key, keys, wide, num_keys, at, begins, is_row, scale,
    D: tl.constexpr, STRIDE: tl.constexpr, HAS_BOUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return base-2 logits of a tile of rows and `KEYS` scoring keys; -inf where masked."""
    LENGTH: tl.constexpr = 2 * D if HAS_BOUND else D
    place = first_key + keys
    is_in = (place < num_keys)[None, :] & (wide < D)[:, None]
    source = scoring + place[None, :] * LENGTH + wide[:, None]
    found = tl.dot(query, tl.load(source, mask=is_in, other=0.0), input_precision=PRECISION)
    if HAS_BOUND:
        low = tl.load(source + D, mask=is_in, other=0.0)
        found += tl.dot(negative, low, input_precision=PRECISION)
    start = place[None, :] * STRIDE
    is_seen = (start + STRIDE - 1 <= at[:, None]) & (start >= begins[:, None]) & is_row[:, None]
    is_seen &= (place < num_keys)[None, :]
    return tl.where(is_seen, found * (scale * LOG2E), -float("inf"))


@triton.jit
def _score_kernel(
    query, scoring, first, scores, S, C, N, begin, some, span, scale, heads,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE: tl.constexpr, PER_BLOCK: tl.constexpr, HAS_BOUND: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write scores `(R, some, N)` of queries from `begin` on: softmax, summed over groups."""
    row = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, QUERIES * GROUP)
    inside = tl.program_id(0) * QUERIES + rows // GROUP
    at, head, wide = begin + inside, rows % GROUP, tl.arange(0, WIDTH)
    is_row = (inside < some) & (head < G)
    source = query + ((row * G + head) * S + at)[:, None] * D + wide[None, :]
    q = tl.load(source, mask=is_row[:, None] & (wide < D)[None, :], other=0.0)
    negative = tl.minimum(q, 0.0).to(query.dtype.element_ty)
    if HAS_BOUND:
        q = tl.maximum(q, 0.0).to(query.dtype.element_ty)
    begins = tl.zeros_like(at)
    if first is not None:
        begins = tl.load(first + row // heads * S + at, mask=is_row, other=0).to(tl.int32)
    scoring += row * C * (2 * D if HAS_BOUND else D)
    last = tl.minimum(begin + tl.minimum((tl.program_id(0) + 1) * QUERIES, some), S)
    num_keys = tl.minimum(last // STRIDE, C)
    keys = tl.arange(0, KEYS)
    peak = tl.full([QUERIES * GROUP], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP], tl.float32)
    for first_key in range(0, num_keys, KEYS):
        x = _logits(
            q, negative, scoring, first_key, keys, wide, num_keys, at, begins, is_row, scale,
            D, STRIDE, HAS_BOUND, PRECISION,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(x, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(x - base[:, None]), 1)
        peak = higher
    base = tl.where(peak == -float("inf"), 0.0, peak)
    share = 1.0 / tl.where(total > 0, total, 1.0)
    blocks = tl.arange(0, KEYS // PER_BLOCK)
    of_query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    for first_key in range(0, num_keys, KEYS):
        x = _logits(
            q, negative, scoring, first_key, keys, wide, num_keys, at, begins, is_row, scale,
            D, STRIDE, HAS_BOUND, PRECISION,
        )  # fmt: skip
        p = tl.exp2(x - base[:, None]) * share[:, None]
        p = tl.sum(tl.reshape(p, (QUERIES, GROUP, KEYS)), 1)
        p = tl.sum(tl.reshape(p, (QUERIES, KEYS // PER_BLOCK, PER_BLOCK)), 2)
        block = first_key // PER_BLOCK + blocks
        is_in = (of_query < some)[:, None] & (block < N)[None, :]
        into = scores + (row * span + of_query)[:, None] * N + block[None, :]
        tl.store(into, p, mask=is_in)


@triton.jit
def _select_kernel(
    scores, first, ranks, S, N, begin, some, span, heads,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    QUERIES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Select each query's highest scores: bisect the score bits for a threshold, then take ties."""
    row = tl.program_id(1).to(tl.int64)
    inside = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    at, is_in = begin + inside, inside < some
    begins = tl.zeros_like(at)
    if first is not None:
        begins = tl.load(first + row // heads * S + at, mask=is_in, other=0).to(tl.int32)
    own, least = (at // BLOCK)[:, None], (begins // BLOCK)[:, None]
    block = tl.arange(0, WIDE)[None, :]
    source = scores + (row * span + inside)[:, None] * N + block
    # the query's own block may not have a score; it is forced
    score = tl.load(source, mask=is_in[:, None] & (block < own), other=0.0)
    is_forced = (block < least + INIT) | (block > own - LOCAL)
    bits = tl.where(is_forced, FORCED_BITS, score.to(tl.int32, bitcast=True))
    bits = tl.where((block >= least) & (block <= own), bits, -1)
    threshold = tl.zeros([QUERIES], tl.int32)
    for power in range(31):
        higher = threshold | (1 << (30 - power))
        is_enough = tl.sum((bits >= higher[:, None]).to(tl.int32), 1) >= COUNT
        threshold = tl.where(is_enough, higher, threshold)
    is_above, is_tie = bits > threshold[:, None], bits == threshold[:, None]
    left = COUNT - tl.sum(is_above.to(tl.int32), 1)
    is_chosen = is_above | (is_tie & (tl.cumsum(is_tie.to(tl.int32), 1) <= left[:, None]))
    rank = tl.where(is_chosen, tl.cumsum(is_chosen.to(tl.int32), 1), 0)
    into = ranks + (row * N + block) * S + at[:, None]
    tl.store(into, rank.to(tl.uint8), mask=is_in[:, None] & (block < N))


@triton.jit
def _list_kernel(
    ranks, ends, sizes, queries, places, N, S,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Write one block's list of queries, and the places of its pairs."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.load(ends + row * N + block) - tl.load(sizes + row * N + block)
    for start in range(block * BLOCK // QUERIES * QUERIES, S, QUERIES):
        at = start + tl.arange(0, QUERIES)
        rank = tl.load(ranks + (row * N + block) * S + at, mask=at < S, other=0).to(tl.int32)
        is_chosen = rank > 0
        into = place + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        tl.store(queries + row * S * COUNT + into, at, mask=is_chosen)
        tl.store(places + (row * S + at) * COUNT + rank - 1, into, mask=is_chosen)
        place += tl.sum(is_chosen.to(tl.int32), 0)


@triton.jit
def _list_of(ends, blocks, starts, N, P, CHUNK: tl.constexpr):
    """Return a program's row and block, and the begin and end of its chunk of the list."""
    row, program = tl.program_id(1).to(tl.int64), tl.program_id(0)
    block = tl.load(blocks + row * P + program)
    is_any = block < N
    end = tl.load(ends + row * N + block, mask=is_any, other=0)
    begin = tl.load(ends + row * N + block - 1, mask=is_any & (block > 0), other=0)
    begin += CHUNK * tl.load(starts + row * P + program)
    return row, block, begin, tl.where(is_any, tl.minimum(end, begin + CHUNK), 0)


@triton.jit
def _tile(
    query, queries, first, key_tile, keys, place, end, row, first_row, heads, S, E, scale,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Load rows of `ROWS / G` pairs from `place` on, and compute their base-2 logits."""
    rows = tl.arange(0, ROWS)
    pair, head, wide = place + rows // G, rows % G, tl.arange(0, WIDTH)
    is_row = (pair < end) & (rows < ROWS // G * G)
    at = tl.load(queries + row * E + pair, mask=is_row, other=0)
    begins = tl.zeros_like(at)
    if first is not None:
        source = first + (first_row + row) // heads * S + at
        begins = tl.load(source, mask=is_row, other=0).to(tl.int32)
    is_in = is_row[:, None] & (wide < D)[None, :]
    source = ((row * G + head) * S + at)[:, None] * D + wide[None, :]
    q = tl.load(query + source, mask=is_in, other=0.0)
    x = tl.dot(q, key_tile, input_precision=PRECISION) * (scale * LOG2E)
    is_seen = (keys[None, :] <= at[:, None]) & (keys[None, :] >= begins[:, None])
    x = tl.where(is_seen & is_row[:, None], x, -float("inf"))
    return q, x, at, head, pair, is_row, is_in


@triton.jit
def _forward_kernel(
    query, key, value, first, queries, ends, blocks, starts, parts, part_sums,
    S, E, N, P, scale, first_row, heads,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute, for each pair in a chunk, attention to the block alone, and its log2-sum-exp."""
    row, block, begin, end = _list_of(ends, blocks, starts, N, P, CHUNK)
    if begin >= end:
        return
    keys, wide = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    source = (row * S + keys)[None, :] * D + wide[:, None]
    is_key = (keys < S)[None, :] & (wide < D)[:, None]
    key_tile = tl.load(key + source, mask=is_key, other=0.0)
    source = (row * S + keys)[:, None] * D + wide[None, :]
    value_tile = tl.load(value + source, mask=(keys < S)[:, None] & (wide < D)[None, :], other=0.0)
    for place in range(begin, end, ROWS // G):
        _, x, _, head, pair, is_row, is_in = _tile(
            query, queries, first, key_tile, keys, place, end, row, first_row, heads, S, E, scale,
            G, D, WIDTH, ROWS, PRECISION,
        )  # fmt: skip
        peak = tl.max(x, 1)
        base = tl.where(peak == -float("inf"), 0.0, peak)
        p = tl.exp2(x - base[:, None])
        total = tl.sum(p, 1)
        found = tl.dot(p.to(value_tile.dtype), value_tile, input_precision=PRECISION)
        is_any, total = total > 0, tl.where(total > 0, total, 1.0)
        into = (row * E + pair) * G + head
        sums = tl.where(is_any, base + tl.log2(total), -float("inf"))
        tl.store(part_sums + into, sums, mask=is_row)
        found = found / total[:, None]
        into = into[:, None] * D + wide[None, :]
        tl.store(parts + into, found.to(parts.dtype.element_ty), mask=is_in)


@triton.jit
def _backward_kernel(
    query, key, value, first, queries, ends, blocks, starts, grad, sums, delta, parts, d_keys,
    d_values, S, E, N, P, scale, first_row, heads,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute each pair's part of the query gradient and a chunk's key and value gradients."""
    row, block, begin, end = _list_of(ends, blocks, starts, N, P, CHUNK)
    if begin >= end:
        return
    keys, wide = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    of_keys = (row * S + keys)[:, None] * D + wide[None, :]
    is_key = (keys < S)[:, None] & (wide < D)[None, :]
    key_tile = tl.load(key + of_keys, mask=is_key, other=0.0)
    value_tile = tl.load(value + of_keys, mask=is_key, other=0.0)
    d_key = tl.zeros([BLOCK, WIDTH], tl.float32)
    d_value = tl.zeros([BLOCK, WIDTH], tl.float32)
    for place in range(begin, end, ROWS // G):
        q, x, at, head, pair, is_row, is_in = _tile(
            query, queries, first, tl.trans(key_tile), keys, place, end, row, first_row, heads,
            S, E, scale, G, D, WIDTH, ROWS, PRECISION,
        )  # fmt: skip
        of_row = (row * G + head) * S + at
        total = tl.load(sums + of_row, mask=is_row, other=0.0)
        p = tl.exp2(x - total[:, None])
        source = ((row * S + at) * G + head)[:, None] * D + wide[None, :]
        g = tl.load(grad + source, mask=is_in, other=0.0)
        d_value += tl.dot(tl.trans(p.to(g.dtype)), g, input_precision=PRECISION)
        d_p = tl.dot(g, tl.trans(value_tile), input_precision=PRECISION)
        d_x = p * (d_p - tl.load(delta + of_row, mask=is_row, other=0.0)[:, None]) * scale
        d_x = d_x.to(q.dtype)
        d_key += tl.dot(tl.trans(d_x), q, input_precision=PRECISION)
        d_query = tl.dot(d_x, key_tile, input_precision=PRECISION)
        into = ((row * E + pair) * G + head)[:, None] * D + wide[None, :]
        tl.store(parts + into, d_query.to(parts.dtype.element_ty), mask=is_in)
    of_chunk = ((row * P + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK))[:, None] * D
    of_chunk += wide[None, :]
    tl.store(d_keys + of_chunk, d_key, mask=(wide < D)[None, :])
    tl.store(d_values + of_chunk, d_value, mask=(wide < D)[None, :])


@triton.jit
def _add_up_kernel(
    parts, part_sums, places, out, sums, S, E,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr,
    WIDE: tl.constexpr, QUERIES: tl.constexpr, HAS_SUMS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of each query's pairs: weighted by their sums, or added."""
    row, head = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    at = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_in, wide = at < S, tl.arange(0, WIDTH)
    if HAS_SUMS:
        numbers = tl.arange(0, WIDE)
        every = places + (row * S + at)[:, None] * COUNT + numbers[None, :]
        each = tl.load(every, mask=is_in[:, None] & (numbers < COUNT)[None, :], other=-1)
        every = part_sums + (row * E + each) * G + head
        every = tl.load(every, mask=each >= 0, other=-float("inf"))
        peak = tl.max(every, 1)
        base = tl.where(peak == -float("inf"), 0.0, peak)
        total = tl.sum(tl.exp2(every - base[:, None]), 1)
        total = base + tl.log2(tl.where(total > 0, total, 1.0))
        tl.store(sums + (row * G + head) * S + at, total, mask=is_in)
    found = tl.zeros([QUERIES, WIDTH], tl.float32)
    for number in range(COUNT):
        place = tl.load(places + (row * S + at) * COUNT + number, mask=is_in, other=-1)
        is_pair = place >= 0
        source = (row * E + place) * G + head
        mask = is_pair[:, None] & (wide < D)[None, :]
        part = tl.load(parts + source[:, None] * D + wide[None, :], mask=mask, other=0.0)
        part = part.to(tl.float32)
        if HAS_SUMS:
            share = tl.load(part_sums + source, mask=is_pair, other=-float("inf"))
            part *= tl.exp2(share - total)[:, None]
        found += part
    into = ((row * S + at) * G + head)[:, None] * D + wide[None, :]
    mask = is_in[:, None] & (wide < D)[None, :]
    tl.store(out + into, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_blocks_kernel(
    d_keys, d_values, d_key, d_value, chunks, S, N, P,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Add up the chunks' gradients of `PART` keys and values of a block, in a fixed order."""
    row = tl.program_id(1).to(tl.int64)
    block, part = tl.program_id(0) // (BLOCK // PART), tl.program_id(0) % (BLOCK // PART)
    first = tl.load(chunks + row * N + block - 1, mask=block > 0, other=0)
    last = tl.load(chunks + row * N + block)
    inside, wide = part * PART + tl.arange(0, PART), tl.arange(0, WIDTH)
    mask = (wide < D)[None, :]
    k = tl.zeros([PART, WIDTH], tl.float32)
    v = tl.zeros([PART, WIDTH], tl.float32)
    for number in range(first, last):
        source = ((row * P + number) * BLOCK + inside)[:, None] * D + wide[None, :]
        k += tl.load(d_keys + source, mask=mask, other=0.0)
        v += tl.load(d_values + source, mask=mask, other=0.0)
    keys = block * BLOCK + inside
    into = (row * S + keys)[:, None] * D + wide[None, :]
    mask &= (keys < S)[:, None]
    tl.store(d_key + into, k.to(d_key.dtype.element_ty), mask=mask)
    tl.store(d_value + into, v.to(d_value.dtype.element_ty), mask=mask)
