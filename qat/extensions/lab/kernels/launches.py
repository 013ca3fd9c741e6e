"""Calls of the package that together launch every kernel, with sizes and dtypes of real models.

They are the cases of `qat bench kernels`, and what those leave out. Each goes through the package's
own functions, which choose a kernel's tiles, or other operations, for the device.

Shapes: B sequences, S positions, H query heads, J key-value heads, D width of a head, T tokens,
V vocabulary, K teacher tokens kept, O out_features, I in_features, C codebook entries, d weights of
a vector.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from qat.extensions.decode.kernels.add_norm import add_norm_
from qat.extensions.decode.kernels.cache import Angles, Cache, Scoring
from qat.extensions.decode.kernels.decode_attention import decode_attention
from qat.extensions.decode.kernels.draw_next import draw_next
from qat.extensions.decode.kernels.lut_gemm import Part, lut_gemm
from qat.extensions.decode.kernels.lut_matvec import matvec
from qat.extensions.decode.kernels.lut_rows import LutRows, order_of, spread
from qat.extensions.decode.kernels.row_attention import row_attention
from qat.extensions.decode.kernels.slot_attention import place_heads, slot_attention
from qat.extensions.lab.kernels.cases import EPS, GROUP, all_cases, work_of
from qat.extensions.lab.kernels.gates import InputMaker
from qat.extensions.nsa.kernels import decode as nsa_decode
from qat.extensions.nsa.kernels import gather
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, pool
from qat.kernels.adamw import ManyTensors
from qat.kernels.attention import fits_tile, has_room, tile_attention, tile_bytes
from qat.kernels.column_sweep import nearest_vectors, refit_scale, settle_columns
from qat.kernels.head import Head, HeadSums, LogitGradients, add_gradients, other_words
from qat.kernels.joined_attention import MAX_WIDTH, joined_fits_tile, joined_tile_attention
from qat.kernels.lut_weight import form, levels_as_stored, pull_back
from qat.quant.error_feedback import Columns
from qat.quant.weight import PackedIndices, Scales, index_dtype, packed_width

Call = Callable[[], object]

SHAPE = "qwen3-0.6b"
IN_TILES = ("attention, ", "joined attention, ")
"""The cases of attention in tiles; here `tile_calls` asks first whether the device has room."""
LENGTHS, WIDTHS = (64, 128), (64, 128)
"""Tokens of a training row, and widths of a head, of which one tile is made."""
LONG_ROW = 512
"""Tokens of a training row that is attended to block by block."""
HEADS, KEYS = 16, 8
"""Query heads and key-value heads of a layer."""
WIDEST = 256
"""Width of a head of Gemma 3, which decoding has kernels for."""
SLOTS, CONTEXT = 64, 2048
"""Sequences and positions in decoding."""
PRODUCTS = ((2, 1), (2, 64), (3, 8), (4, 256))
"""Bits, and vectors that a packed matrix is multiplied by: a kind of tile for each."""
RANK = 4
"""Rank of a low-rank scale, as in the reference system's presets."""


def all_calls(maker: InputMaker) -> Iterator[tuple[str, Call]]:
    """Yield every call with its name."""
    work = work_of(SHAPE)
    for name, case in all_cases().items():
        if not name.startswith(IN_TILES):
            size = case.size(work)
            yield name, lambda case=case, size=size: case.kernel(case.inputs(maker, size), size)
    for calls in (tile_calls, weight_calls, decoding_calls, product_calls, sparse_calls):
        yield from calls(maker)
    for dtype in (maker.dtype, torch.float32):
        yield f"a head that learns, {dtype}", partial(learning_head, maker, dtype)
    yield "columns of vectors", partial(columns_of_vectors, maker)
    yield "AdamW on many tensors", partial(many_tensors, maker)


def many_tensors(maker: InputMaker) -> None:
    """Move a matrix and a vector in one launch."""
    sizes = (3, 4096), (4096,)
    moved = [tuple(maker.normal(*size, dtype=torch.float32) for _ in range(4)) for size in sizes]
    many = ManyTensors([(p, m, v) for p, m, v, _ in moved], [(1e-2, 1e-3), (1e-3, 0.0)])
    shared = maker.normal(3, dtype=torch.float32)
    many.step_([g for *_, g in moved], shared, 1.0, (0.9, 0.95), EPS)


def tile_calls(maker: InputMaker) -> Iterator[tuple[str, Call]]:
    """Yield attention with its gradient in blocks, and in the largest tile that has room."""
    qkv = maker.normal(2, LONG_ROW, (HEADS + 2 * KEYS) * MAX_WIDTH)
    if has_room(LONG_ROW, MAX_WIDTH, maker.device) and joined_fits_tile(qkv, MAX_WIDTH):
        name = f"joined attention in blocks, {LONG_ROW} x {MAX_WIDTH}"
        yield name, partial(joined_and_gradient, maker, qkv, MAX_WIDTH)
    sizes = [(S, D) for S in LENGTHS for D in WIDTHS if has_room(S, D, maker.device)]
    for S, D in sorted(sizes, key=lambda size: tile_bytes(*size))[-1:]:
        query = maker.normal(2, S, HEADS, D).transpose(1, 2)
        if fits_tile(query, query):
            yield f"attention in tiles, {S} x {D}", partial(tile_and_gradient, maker, query)
        qkv = maker.normal(2, S, (HEADS + 2 * KEYS) * D)
        if joined_fits_tile(qkv, D):
            yield f"joined attention, {S} x {D}", partial(joined_and_gradient, maker, qkv, D)


def tile_and_gradient(maker: InputMaker, query: Tensor) -> None:
    """Attend with separate heads, and pull back."""
    B, _, S, D = query.shape
    key, value = (maker.normal(B, S, KEYS, D).transpose(1, 2).requires_grad_() for _ in range(2))
    with torch.enable_grad():
        out = tile_attention(query, key, value, maker.positions(B, S), D**-0.5)
        torch.autograd.grad(out.sum(), [key, value])


def joined_and_gradient(maker: InputMaker, qkv: Tensor, D: int) -> None:
    """Attend with concatenated heads behind norms that learn, and pull back."""
    B, S, _ = qkv.shape
    cos, sin = maker.normal(B, S, D), maker.normal(B, S, D)
    norms = [maker.uniform(D).requires_grad_() for _ in range(2)]
    with torch.enable_grad():
        rest = (cos, sin, *norms, maker.positions(B, S), D**-0.5, EPS, HEADS)
        torch.autograd.grad(joined_tile_attention(qkv, *rest).sum(), norms)


def weight_calls(maker: InputMaker) -> Iterator[tuple[str, Call]]:
    """Yield the calls that form weights in formats which no case of `qat bench kernels` has."""
    yield "form and pull back, low-rank scales", partial(low_rank_weight, maker)
    yield "codewords as stored", partial(levels_as_stored, maker.uniform(256, 4), 8)


def low_rank_weight(maker: InputMaker) -> None:
    """Form a weight with low-rank scales, and pull back."""
    O, I = 3072, 1024
    scales = Scales(
        scale_out=maker.uniform(O, RANK), rank_gain=maker.uniform(RANK),
        scale_in=maker.uniform(RANK, I),
    )  # fmt: skip
    latent, levels, dW = maker.normal(O, I), maker.uniform(4), maker.normal(O, I)
    form(latent, levels, scales, maker.dtype)
    pull_back(dW, latent, levels, scales, wanted=("codebook", *scales.present()))


def learning_head(maker: InputMaker, dtype: torch.dtype) -> None:
    """Take the gradients of a head whose logits are kept: the losses over all words."""
    T, K, V, D = 4096, 64, 151_936, 1024
    hidden, weight = maker.normal(T, D, dtype=dtype), maker.normal(V, D, dtype=dtype)
    ids, head = maker.integers(V, T, K), Head(weight, maker.normal(V), softcap=30.0)
    others = other_words(hidden, head, ids, keep=True)
    g_logits = LogitGradients(ids, maker.uniform(T, K), K, others.lse, maker.uniform(T))
    add_gradients(hidden, head, g_logits, others, HeadSums(head), out=torch.empty_like(hidden))


def decoding_calls(maker: InputMaker) -> Iterator[tuple[str, Call]]:
    """Yield the calls of decoding that are no products: attention over caches, norms and draws."""
    yield f"decode attention, {WIDEST}", partial(one_position, maker, WIDEST)
    yield f"attention of a row, {WIDEST}", partial(row, maker, WIDEST)
    for B, D, dtype, bits in (
        (SLOTS, WIDTHS[-1], maker.dtype, None), (SLOTS, WIDEST, maker.dtype, None),
        (SLOTS, WIDEST, torch.float32, None), (1, WIDTHS[0], maker.dtype, 8),
        (SLOTS, WIDTHS[0], maker.dtype, 4),
    ):  # fmt: skip
        kept = f"{bits} bits" if bits else dtype
        yield f"{B} slots, {D}, {kept}", partial(slots, maker, B, D, dtype=dtype, bits=bits)
    logits, uniforms = maker.normal(SLOTS, 151_936, dtype=torch.float32), maker.uniform(SLOTS)
    for top_p in (1.0, 0.9):
        yield f"draw, top-p {top_p}", partial(draw_next, logits, uniforms, top_p=top_p)
    stream, gain = maker.uniform(SLOTS, 4096), maker.uniform(4096)
    yield "add and norm", partial(add_norm_, stream, stream, gain, EPS, maker.dtype)


def one_position(maker: InputMaker, D: int) -> None:
    """Attend with one new position of one sequence."""
    angles, scoring = _angles(maker, D), Scoring(D**-0.5, maker.uniform(D), maker.uniform(D), EPS)
    cache = Cache.empty((1, KEYS, CONTEXT, D), maker.dtype, maker.device)
    qkv = maker.normal(1, (HEADS + 2 * KEYS) * D, dtype=torch.float32)
    decode_attention(qkv, cache, maker.integers(CONTEXT, 1), angles, scoring)


def row(maker: InputMaker, D: int) -> None:
    """Attend with several new positions of one sequence, as drafts are read."""
    angles, scoring = _angles(maker, D), Scoring(D**-0.5, maker.uniform(D), maker.uniform(D), EPS)
    cache = Cache.empty((1, KEYS, CONTEXT, D), maker.dtype, maker.device)
    qkv = maker.normal(5, (HEADS + 2 * KEYS) * D, dtype=torch.float32)
    row_attention(qkv, cache, maker.integers(CONTEXT - 5, 1), angles, scoring)


def slots(
    maker: InputMaker, B: int, D: int, *, dtype: torch.dtype, bits: int | None = None
) -> None:
    """Attend with a new position of each of B sequences, whose caches may be packed."""
    scoring = Scoring(D**-0.5, maker.uniform(D), maker.uniform(D), EPS)
    cache = Cache.empty((B, KEYS, CONTEXT, D), dtype, maker.device, bits)
    positions, places = maker.integers(CONTEXT, B), maker.integers(B, B)
    qkv = maker.normal(B, (HEADS + 2 * KEYS) * D, dtype=dtype)
    query = place_heads(qkv, cache, places, positions, _angles(maker, D), scoring)
    slot_attention(query, cache, positions, D**-0.5)


def _angles(maker: InputMaker, D: int) -> Angles:
    return Angles(maker.uniform(CONTEXT, D), maker.uniform(CONTEXT, D))


def product_calls(maker: InputMaker) -> Iterator[tuple[str, Call]]:
    """Yield products with packed weights for several vectors."""
    for bits, M in PRODUCTS:
        yield f"lut_gemm, {bits} bits, {M} vectors", partial(product, maker, bits, M)
    yield "matvec, 4 vectors", partial(few_vectors, maker)


def product(maker: InputMaker, bits: int, num_vectors: int) -> None:
    """Multiply the joined weight of queries, keys and values, each with a codebook of its own."""
    I, sizes = 2048, (4096, 1024, 1024)
    parts = [
        Part(
            maker.integers(256, O, packed_width(I, bits), dtype=torch.uint8),
            maker.integers(256, O, I // GROUP, dtype=torch.uint8), maker.uniform(2**bits), bits,
        )
        for O in sizes
    ]  # fmt: skip
    lut_gemm(maker.normal(num_vectors, I), parts, maker.normal(sum(sizes)))


def few_vectors(maker: InputMaker) -> None:
    """Multiply several vectors at once, as drafts of a decoder are."""
    O, I, B = 3072, 1024, 4
    octets = maker.integers(256, O, packed_width(I, 2), dtype=torch.uint8)
    scales = Scales(maker.uniform(O, I // GROUP), bits=8)
    rows = LutRows.of(PackedIndices(octets, 2, I), maker.uniform(4), scales, is_short=True)
    matvec(spread(maker.uniform(B, I), order_of(rows)), rows, bias=maker.normal(O))


def sparse_calls(maker: InputMaker) -> Iterator[tuple[str, Call]]:
    """Yield sparse attention: training, and one new position."""
    config = NSAConfig(
        mode="merged", select_tile=1, compress_block=16, compress_stride=16, select_block=64
    )
    narrow, wide = WIDTHS
    for D, dtype in ((wide, maker.dtype), (narrow, torch.float32)):
        facts = {"group": HEADS // KEYS, "head_dim": D, "device": maker.device}
        if gather.refusal(config, **facts) is None:
            yield f"nsa, {D}, {dtype}", partial(sparse, maker, config, D, dtype)
    own = config.model_copy(update={"mode": "residual", "select_tile": 128})
    yield "nsa, one position", partial(sparse_position, maker, own, wide)


def sparse(maker: InputMaker, config: NSAConfig, D: int, dtype: torch.dtype) -> None:
    """Attend to selected blocks, and pull back."""
    B, S = 2, 4096
    query = maker.normal(B, HEADS, S, D, dtype=dtype)
    key, value = (maker.normal(B, KEYS, S, D, dtype=dtype).requires_grad_() for _ in range(2))
    with torch.enable_grad():
        first = maker.positions(B, S)
        inputs = Inputs(query, key, value, pool(key, config), None, None, first, D**-0.5)
        torch.autograd.grad(gather.attend(inputs, config).sum(), [key, value])


def sparse_position(maker: InputMaker, config: NSAConfig, D: int) -> None:
    """Put one new position into the cache, and attend to what it selects."""
    B = 4
    key, position = maker.normal(B, KEYS, D), maker.integers(CONTEXT, B)
    past = nsa_decode.Past.empty(key, CONTEXT, config)
    query, gates = maker.normal(B, HEADS, D), maker.normal(B, HEADS, 3)
    nsa_decode.append(past, key, key, position, config=config)
    nsa_decode.choose(query, past, position, config=config, scale=D**-0.5)
    nsa_decode.attend(query, past, position, gates=gates, config=config, scale=D**-0.5)


def columns_of_vectors(maker: InputMaker) -> None:
    """Settle a block of columns in vectors, refit its scales, and search codewords."""
    B, O, C, d = 16, 3072, 256, 4
    weight, codebook = maker.uniform(B, O), maker.uniform(C, d)
    columns = Columns(
        weight, weight.clone(), weight.clone(), maker.uniform(1, O), codebook,
        indices=maker.integers(C, B // d, O, dtype=index_dtype(C)), metric=maker.uniform(B, d),
    )  # fmt: skip
    target, coupling = weight.clone(), maker.uniform(B, B)
    settle_columns(columns, target, coupling)
    refit_scale(columns, target, coupling, maker.uniform(B, d))
    nearest_vectors(maker.uniform(O, 64), maker.uniform(O, 64), codebook, maker.uniform(O, 64))
