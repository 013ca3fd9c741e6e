"""The choice of blocks, against loops over the definition; sizes that cannot be are refused."""

import pytest
import torch
from covering import covering
from nsa_case import blocks_of_tile, documents, nsa_inputs, small

from qat.errors import ConfigError
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.reference import causal_mask, selected_mask
from qat.extensions.nsa.kernels.select import (
    FORCED,
    UNSEEN,
    highest,
    overlap,
    pool,
    scoring_keys,
    scoring_query,
    select,
)

SIZES = [
    {},
    {"select_tile": 1},
    {"select_tile": 4},
    {"select_tile": 32, "num_selected": 5},
    {"compress_block": 4, "init_blocks": 0, "local_blocks": 3},
    {"compress_block": 16, "compress_stride": 16, "mode": "merged"},
    {"bound": 0.3, "select_tile": 1},
    {"bound": 1.0, "compress_block": 16, "compress_stride": 8, "mode": "merged"},
]


@pytest.mark.parametrize(("changes", "packed"), covering(SIZES, [False, True]))
def test_tiles_read_what_the_definition_says(changes: dict, packed: bool) -> None:
    config = small(**changes)
    for length in (1, 7, 8, 16, 33, 83):
        inputs = nsa_inputs(config, length, first=documents(length) if packed else None)
        selection = select(inputs, config)
        assert selection.shape == (2, 2, config.num_tiles(length), config.num_blocks(length))
        for at in [(r, k, t) for r in (0, 1) for k in (0, 1) for t in range(selection.shape[2])]:
            wanted = blocks_of_tile(inputs, config, at)
            assert set(selection[at].nonzero().flatten().tolist()) == wanted, (length, at)


@pytest.mark.parametrize("sizes", [(32, 16, 64), (8, 4, 8), (16, 16, 16), (24, 8, 40), (4, 4, 128)])
def test_overlap_counts_common_keys(sizes: tuple[int, int, int]) -> None:
    l, d, size = sizes
    config = NSAConfig(compress_block=l, compress_stride=d, select_block=size, select_tile=1)
    for length in (l, 2 * size + l + 1):
        C, N = config.num_compressed(length), config.num_blocks(length)
        keys = [set(range(c * d, c * d + l)) for c in range(C)]
        blocks = [set(range(j * size, j * size + size)) for j in range(N)]
        wanted = torch.tensor([[len(k & b) / l for b in blocks] for k in keys])
        torch.testing.assert_close(overlap(C, N, config), wanted.view(C, N))


def test_pooling_is_a_mean_that_weights_generalise() -> None:
    config = small()
    keys = torch.randn(2, 3, 30, 5, dtype=torch.float64)
    pooled = pool(keys, config)
    assert pooled.shape == (2, 3, config.num_compressed(30), 5)
    torch.testing.assert_close(pooled[:, :, 2], keys[:, :, 8:16].mean(2))
    even = torch.full((3, 8), 1 / 8, dtype=torch.float64)
    torch.testing.assert_close(pool(keys, config, even), pooled)
    last = torch.zeros(3, 8, dtype=torch.float64)
    last[:, 7] = 1
    assert torch.equal(pool(keys, config, last)[:, :, 1], keys[:, :, 11])
    assert pool(keys[:, :, :7], config).shape[2] == 0


def test_of_equal_scores_the_lower_block_is_taken() -> None:
    scores = torch.tensor([[0.5, FORCED, 0.5, 0.5, UNSEEN], [UNSEEN] * 4 + [0.0]])
    assert highest(scores, 3).tolist() == [[True, True, True, False, False], [False] * 4 + [True]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_stride": 3}, "compress_stride=3 does not divide compress_block=8; make"),
        ({"compress_block": 32}, "compress_block=32 is more than select_block=16; lower the"),
        ({"select_tile": 24}, "select_tile=24 and select_block=16 do not divide one another"),
        ({"num_selected": 2}, "num_selected=2, but 3 blocks are forced (first, local and"),
        ({"select_tile": 64, "num_selected": 5}, "num_selected=5, but 6 blocks are forced"),
        ({"num_selected": 0}, "num_selected=0: Input should be greater than or equal to 1"),
        ({"window": 0}, "window=0: Input should be greater than or equal to 1"),
        ({"mode": "merged", "pooling": "weighted"}, "pooling=weighted learns, but merged branches"),
        ({"mode": "dense"}, "mode='dense': Input should be 'residual', 'sigmoid' or 'merged'"),
    ],
)
def test_sizes_that_cannot_be(changes: dict, message: str) -> None:
    values = {**small().model_dump(), "local_blocks": 2, **changes}
    with pytest.raises(ConfigError) as raised:
        NSAConfig.parse(values, "attention.toml")
    assert str(raised.value).startswith("attention.toml: ") and message in str(raised.value)


@pytest.mark.parametrize(("tile", "count"), [(1, 4), (16, 4), (32, 4), (32, 5), (64, 7), (128, 11)])
def test_every_key_is_read_as_far_as_reach_and_not_much_further(tile: int, count: int) -> None:
    config = small(select_tile=tile, num_selected=count)
    for length in range(1, config.reach + 1, 5):
        inputs = nsa_inputs(config, length)
        mask = selected_mask(inputs, select(inputs, config), config)
        assert torch.equal(mask, causal_mask(inputs)[:, None].expand_as(mask)), length
    beyond = nsa_inputs(config, config.reach + 2 * max(tile, 16))
    mask = selected_mask(beyond, select(beyond, config), config)
    assert not torch.equal(mask, causal_mask(beyond)[:, None].expand_as(mask))


def test_a_bound_is_above_every_key_and_finds_a_needle_that_a_mean_hides() -> None:
    config = small(bound=1.0, compress_block=16, compress_stride=16, select_tile=1)
    inputs = nsa_inputs(config, 512, heads=(2, 2))
    scoring = scoring_keys(inputs.key, inputs.pooled_key, config)
    bounds = scoring_query(inputs.query, config) @ scoring.mT
    logits = (inputs.query @ inputs.key.mT)[..., : scoring.shape[2] * 16].unflatten(-1, (-1, 16))
    assert (bounds >= logits.amax(-1) - 1e-12).all()
    needle = inputs.query[:, :, 500] / inputs.query[:, :, 500].norm(dim=-1, keepdim=True)
    inputs.key[:, :, 100] = 12 * needle
    for bound, finds in ((0.0, False), (0.5, True)):
        config = config.model_copy(update={"bound": bound})
        pooled = pool(inputs.key, config)
        chosen = select(inputs._replace(pooled_key=pooled), config)
        assert chosen[:, :, 500, 100 // 16].all() == finds, bound
