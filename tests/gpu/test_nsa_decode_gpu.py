"""Decoding with Native Sparse Attention on a GPU: the kernels, recorded. Run with `-m gpu`."""

import pytest
import torch
from nsa_case import nsa_inputs, small
from nsa_decode_case import decoded, upto
from nsa_model_case import opened_model
from three_way import assert_no_worse_than_eager
from torch import Tensor
from transformers import DynamicCache

from qat.backend.device import on
from qat.extensions.nsa.kernels.config import PRESETS
from qat.extensions.nsa.kernels.decode import Past, append, attend, choose, fill
from qat.extensions.nsa.kernels.select import Inputs, select
from qat.kernels.dispatch import computing_by
from qat.nn.swap import CACHE

pytestmark = pytest.mark.gpu

SLACKS = {torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 5e-4}


def on_gpu(inputs: Inputs) -> Inputs:
    return Inputs(*(t.cuda() if isinstance(t, Tensor) else t for t in inputs))


def doubled(kept: Past) -> Past:
    return Past(*(t if t is None or t.dtype == torch.int32 else t.double() for t in kept))


@pytest.mark.parametrize("dtype", SLACKS)
@pytest.mark.parametrize("heads", [(16, 8, 128), (8, 1, 64), (10, 2, 96), (40, 2, 128)])
@pytest.mark.parametrize("preset", ["nsa", "nsa-merged", "nsa-shared", "nsa-paper"])
def test_the_kernels_err_no_more_than_plain_pytorch(
    dtype: torch.dtype, heads: tuple[int, int, int], preset: str
) -> None:
    config = PRESETS[preset]
    inputs = on_gpu(nsa_inputs(config, 3001, heads=heads[:2], width=heads[2], dtype=dtype))
    for length in (1, 31, 32, 129, 1025, 3001):
        before = upto(inputs, length - 1, config)
        kept = Past.empty(inputs.key, 3333, config)
        if length > 1:
            fill(kept, before, select(before, config), config)
        position = torch.tensor([length - 1] * 2, device="cuda")
        query, key, value = (tensor[:, :, length - 1] for tensor in inputs[:3])
        other = Past(*(None if tensor is None else tensor.clone() for tensor in kept))
        append(kept, key, value, position, config=config)
        with computing_by(kernel=False):
            append(other, key, value, position, config=config)
        for found, expected in zip(kept, other, strict=True):
            if found is not None:
                torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        choose(query, kept, position, config=config, scale=inputs.scale)
        gates = None if inputs.gates is None else inputs.gates[:, length - 1]
        sizes = {"gates": gates, "config": config, "scale": inputs.scale}
        found = attend(query, kept, position, **sizes)
        with computing_by(kernel=False):
            eager = attend(query, kept, position, **sizes)
        sizes["gates"] = None if gates is None else gates.double()
        exact = attend(query.double(), doubled(kept), position, **sizes)
        assert_no_worse_than_eager(found, eager, exact, SLACKS[dtype])


@pytest.mark.parametrize("mode", ["residual", "merged"])
@pytest.mark.parametrize("tile", [1, 16, 32])
def test_positions_one_by_one_equal_the_whole_row(mode: str, tile: int) -> None:
    config = small(mode=mode, select_tile=tile)
    inputs = on_gpu(nsa_inputs(config, 300, width=64, dtype=torch.float32))
    with computing_by(kernel=False):
        expected, _ = decoded(inputs, config)
    found, _ = decoded(inputs, config)
    assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("preset", ["nsa-shared", "nsa-merged-shared"])
@torch.no_grad()
def test_a_recorded_token_equals_one_that_is_not(preset: str) -> None:
    config, length = PRESETS[preset], 4096
    inputs = on_gpu(nsa_inputs(config, length, heads=(16, 8), width=128, dtype=torch.bfloat16))
    kept = Past.empty(inputs.key, length, config)
    fill(kept, inputs, select(inputs, config), config)
    query, key, value = (tensor[:, :, -1] for tensor in inputs[:3])
    gates = None if inputs.gates is None else inputs.gates[:, -1]
    position = torch.full((2,), length - 1, device="cuda")

    def token() -> Tensor:
        append(kept, key, value, position, config=config)
        choose(query, kept, position, config=config, scale=inputs.scale)
        return attend(query, kept, position, gates=gates, config=config, scale=inputs.scale)

    token()
    replay, found = on(position.device).record(token)
    for at in (3968, 3969, 4000, 4095):  # a graph serves every place
        position.fill_(at)
        replay()
        assert torch.equal(found, token())


@torch.no_grad()
def test_a_model_generates_as_without_a_cache() -> None:
    model = opened_model(small(backend="reference")).cuda()
    ids = torch.arange(100, device="cuda")[None] * 11 % 320
    whole = model(ids).logits
    cache = DynamicCache(config=model.config)
    pieces = [model(ids[:, :37], **{CACHE: cache}).logits]
    pieces += [model(ids[:, at : at + 1], **{CACHE: cache}).logits for at in range(37, 100)]
    assert (torch.cat(pieces, 1) - whole).abs().max() <= 1e-5
