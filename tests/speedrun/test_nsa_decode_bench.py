"""What the decoding bench times is attention, and it counts the bytes that are there."""

import torch
from nsa_decode_bench import Bench, NSABench, Shape, seconds_of_tile
from torch.nn import functional as F

from qat.backend.device import on
from qat.kernels.nsa.config import PRESETS

SMALL = Shape(length=384, heads=4, key_heads=2, width=16, layers=2, dtype=torch.float32)


@torch.no_grad()
def test_dense_ways_say_the_same_and_so_does_nsa_within_its_reach() -> None:
    bench = Bench(SMALL, on(torch.device("cpu")))
    bench.position.fill_(SMALL.length - 1)
    ways = dict(bench.dense_layers())
    ours = ways["own kernel"](bench.caches[0])
    keys, values = bench.caches[0]
    expected = F.scaled_dot_product_attention(
        bench.query[:, :, None], keys, values, enable_gqa=True
    )
    for found in (
        ours,
        ways["math, grouped heads"](bench.caches[0]),
        ways["math, groups as rows"](bench.caches[0]),
    ):
        torch.testing.assert_close(found, expected[:, :, 0])
    sparse = NSABench(bench, PRESETS["nsa-merged-shared"])  # reaches 2,048
    assert torch.equal(bench.position, torch.tensor([256]))  # the last tile's first query chose
    bench.position.fill_(SMALL.length - 1)
    found = sparse.attend(sparse.kept[0], is_leader=False)
    torch.testing.assert_close(found, expected[:, :, 0])
    assert sparse.reads().selected == SMALL.length
    assert SMALL.dense_bytes == 2 * keys.nbytes


@torch.no_grad()
def test_a_tile_is_told_from_its_leader_to_the_last_position() -> None:
    bench = Bench(SMALL, on(torch.device("cpu")))
    sparse = NSABench(bench, PRESETS["nsa-shared"])
    told = []

    def token(name: str) -> None:
        told.append((name, int(bench.position)))
        bench.position += 1

    seconds_of_tile(bench, lambda: token("plain"), 3, lambda: token("leader"))
    assert told == [("leader", 381), ("plain", 382), ("plain", 383)]
    plain, leader = (sparse.token(is_leader=is_leader) for is_leader in (False, True))
    assert seconds_of_tile(bench, plain, 128, leader) > 0
    assert int(bench.position) == SMALL.length
    assert (
        seconds_of_tile(bench, bench.dense_token(dict(bench.dense_layers())["own kernel"]), 2) > 0
    )
