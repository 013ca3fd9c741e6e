"""Small NSA inputs and the definition spelled out a query at a time, in float64 loops."""

import math
from functools import cache, partial

import torch
from torch import Tensor

from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, pool

SMALL = {
    "compress_block": 8,
    "compress_stride": 4,
    "select_block": 16,
    "num_selected": 4,
    "window": 12,
}


def small(**changes: object) -> NSAConfig:
    """Sizes that are sparse from 65 positions on."""
    return NSAConfig(**{**SMALL, "select_tile": 16, **changes})


def nsa_inputs(
    config: NSAConfig,
    length: int,
    *,
    heads: tuple[int, int] = (4, 2),
    width: int = 8,
    first: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Two rows of random heads; pooled by the mean."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    query = drawn(2, heads[0], length, width)
    key, value = (drawn(2, heads[1], length, width) for _ in range(2))
    gates = None if config.mode == "merged" else drawn(2, length, heads[0], 3)
    pooled_value = None if config.mode == "merged" else pool(value, config)
    return Inputs(query, key, value, pool(key, config), pooled_value, gates, first, width**-0.5)


def documents(length: int) -> Tensor:
    """`(2, length)`: document_starts of documents at odd places, others in each row."""
    starts = [[0, length // 3, length // 3 + 1], [0, length // 2 + 1]]
    places = torch.arange(length)
    rows = [torch.stack([torch.where(places >= s, s, 0) for s in row]).amax(0) for row in starts]
    return torch.stack(rows)


def softmax(scores: list[float]) -> list[float]:
    """Return the textbook softmax."""
    most = max(scores)
    powers = [math.exp(score - most) for score in scores]
    return [power / sum(powers) for power in powers]


def blocks_of_tile(inputs: Inputs, config: NSAConfig, at: tuple[int, int, int]) -> set[int]:
    """Return the blocks that the tile `(row, key-value head, tile)` reads, by the definition."""
    row, head, tile = at
    leader = tile * config.select_tile
    start = int(inputs.document_starts().expand(2, -1)[row, leader])
    l, d, size = config.compress_block, config.compress_stride, config.select_block
    visible = [
        c for c in range(inputs.pooled_key.shape[2]) if c * d + l - 1 <= leader and c * d >= start
    ]
    own = leader // size
    last = own + max(1, config.select_tile // size) - 1
    score = dict.fromkeys(range(start // size, last + 1), 0.0)
    for of_group in range(inputs.group if visible else 0):
        query = inputs.query[row, head * inputs.group + of_group, leader]
        logits = []
        for c in visible:
            keys, pooled = inputs.key[row, head, c * d : c * d + l], inputs.pooled_key[row, head, c]
            highest = torch.maximum(query * keys.amax(0), query * keys.amin(0)).sum()
            mean = query @ pooled
            logits.append(float(mean + config.bound * (highest - mean)) * inputs.scale)
        shares = softmax(logits)
        for c, share in zip(visible, shares, strict=True):
            for j in score:
                shared = min(c * d + l, (j + 1) * size) - max(c * d, j * size)
                score[j] += share * max(0, shared) / l
    for j in score:
        is_init = start // size <= j < start // size + config.init_blocks
        if is_init or own - config.local_blocks < j:
            score[j] = math.inf
    # float32 decides in the code under test: scores that it holds for equal are equal here
    order = sorted(score, key=lambda j: (-round(score[j], 6), j))
    return set(order[: config.num_selected])


def by_loops(inputs: Inputs, config: NSAConfig) -> Tensor:
    """`(B, S, H, D)`: every query alone."""
    B, H, S, D = inputs.query.shape
    out = torch.zeros(B, S, H, D, dtype=torch.float64)
    document_starts = inputs.document_starts().expand(B, -1)
    blocks = cache(partial(blocks_of_tile, inputs, config))
    for row in range(B):
        for head in range(H):
            for t in range(S):
                chosen = blocks((row, head // inputs.group, t // config.select_tile))
                past = range(int(document_starts[row, t]), t + 1)
                read = [i for i in past if i // config.select_block in chosen]
                selected = _attend(inputs, (row, head, t), inputs.key, inputs.value, read)
                if config.mode == "merged":
                    out[row, t, head] = selected
                    continue
                window = [i for i in past if i > t - config.window]
                passed = [
                    c
                    for c in range(inputs.pooled_key.shape[2])
                    if c * config.compress_stride >= past[0]
                    and c * config.compress_stride + config.compress_block - 1 <= t
                ]
                pooled = (inputs.pooled_key, inputs.pooled_value)
                gate = inputs.gates[row, t, head]
                out[row, t, head] = (
                    gate[0] * _attend(inputs, (row, head, t), *pooled, passed)
                    + gate[1] * selected
                    + gate[2] * _attend(inputs, (row, head, t), inputs.key, inputs.value, window)
                )
    return out


def _attend(
    inputs: Inputs, at: tuple[int, int, int], keys: Tensor, values: Tensor, read: list[int]
) -> Tensor:
    """One query over the keys `read`; zero where there are none."""
    row, head, t = at
    if not read:
        return torch.zeros(values.shape[-1], dtype=torch.float64)
    of = head // inputs.group
    scores = keys[row, of, read] @ inputs.query[row, head, t] * inputs.scale
    return values.new_tensor(softmax(scores.tolist())) @ values[row, of, read]
