"""`packed_attention` in Triton's interpreter against attention in float64 over the same numbers."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.decode.kernels import packed_attention as module
from qat.extensions.decode.kernels.cache import EVERY, Cache
from qat.extensions.decode.kernels.lut_rows import SPLIT, empty_inputs, gathered
from qat.extensions.decode.kernels.packed_attention import (
    empty_parts,
    is_read_packed,
    merge,
    packed_attention,
)

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels themselves", allow_module_level=True)

KINDS = [torch.bfloat16, torch.float16]
CASES = [
    (3, 1, 64, 4, torch.bfloat16),
    (2, 1, 128, 4, torch.float16),
    (6, 1, 64, 4, torch.float16),
    (4, 2, 64, 4, torch.float16),
    (4, 4, 64, 8, torch.float16),
]
"""Query heads, key heads, width, bits and dtype."""
# both factors' remainders are rounded: 2**-16 of a number in bfloat16, 2**-22 in float16
SLACK = {torch.bfloat16: 2.0**-13, torch.float16: 2.0**-17}


def packed(B: int, J: int, N: int, D: int, kind: torch.dtype, bits: int) -> Cache:
    """Heads whose scales span those that a cache knows."""
    cache = Cache.empty((B, J, N, D), kind, torch.device("cpu"), bits)
    sizes = torch.logspace(-3, 1, N)[:, None]
    cache.put(*(torch.randn(2, B, J, N, D) * sizes).to(kind), EVERY, EVERY, EVERY)
    return cache


def exact(query: Tensor, cache: Cache, positions: Tensor) -> Tensor:
    """Attention over what the cache gives back, in float64."""
    seen = (torch.arange(cache.shape[2]) <= positions[:, None])[:, None, None]
    keys, values = (part.double() for part in cache.at(EVERY, EVERY, EVERY))
    scale = query.shape[-1] ** -0.5
    return F.scaled_dot_product_attention(
        query[:, :, None].double(), keys, values, attn_mask=seen, scale=scale, enable_gqa=True
    ).flatten(1)


@pytest.mark.parametrize("case", CASES)
def test_each_sequence_reads_up_to_its_position(
    case: tuple[int, int, int, int, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MERGED", 0)
    (H, J, D, bits, kind), B, N = case, 2, 130
    cache, positions = packed(B, J, N, D, kind, bits), torch.tensor([40, 129])
    query, out = torch.randn(B, H, D), torch.empty(B, H * D)
    assert is_read_packed(cache, H // J)
    found = packed_attention(out, query, cache, positions, D**-0.5, order=1)
    expected = exact(query, cache, positions)
    assert (found - expected).abs().max() <= SLACK[kind] * expected.abs().max()


@pytest.mark.parametrize("case", [(8, 4, 4, 1), (12, 12, 8, SPLIT), (20, 4, 4, 1)])
def test_a_warp_may_have_all_of_a_head(monkeypatch, case: tuple[int, int, int, int]) -> None:
    """The cases of many sequences or few positions leave nothing to merge."""
    monkeypatch.setattr(module, "merge", None)
    (H, J, bits, order), B, N, D = case, 2, 70, 64
    cache, positions = packed(B, J, N, D, torch.float16, bits), torch.tensor([69, 33])
    query, out = torch.randn(B, H, D), empty_inputs(B, H * D, order, torch.device("cpu"))
    found = packed_attention(out, query, cache, positions, D**-0.5, order=order)
    expected = exact(query, cache, positions)
    off = (gathered(found, order) - expected).abs().max()
    assert off <= SLACK[torch.float16] * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_number_is_the_one_that_training_computes(bits: int, kind: torch.dtype) -> None:
    """The query sees only one position, whose weight is 1."""
    N, D = 40, 64
    cache, out = packed(1, 1, N, D, kind, bits), torch.empty(1, D)
    _, values = cache.at(EVERY, EVERY, EVERY)
    keys, others = cache
    for at in (0, 17, 39):
        one = Cache(*(part.at(EVERY, EVERY, slice(at, at + 1)) for part in (keys, others)))
        one = Cache(*(p._replace(codes=p.codes.clone(), steps=p.steps.clone()) for p in one))
        found = packed_attention(out, torch.randn(1, 1, D), one, torch.tensor([0]), 1.0, order=1)
        assert torch.equal(found[0], values[0, 0, at].float())


def test_what_is_read_otherwise() -> None:
    shape, device = (1, 1, 8, 64), torch.device("cpu")
    assert is_read_packed(Cache.empty(shape, torch.float16, device, 4), 8)
    assert not is_read_packed(Cache.empty(shape, torch.float16, device, 4), 9)
    assert not is_read_packed(Cache.empty(shape, torch.float32, device, 4), 1)
    assert not is_read_packed(Cache.empty((1, 1, 8, 32), torch.float16, device, 4), 1)
    assert not is_read_packed(Cache.empty(shape, torch.float16, device), 1)


def test_splits_are_one_softmax() -> None:
    B, H, N, D = 2, 3, 70, 16
    scores, values = torch.randn(B * H, N) * 5, torch.randn(B * H, N, D)
    parts, peaks, sums = empty_parts(B * H, 35, D, torch.device("cpu"))
    of_splits = scores.view(B * H, 35, 2)
    peaks.copy_(of_splits.amax(-1))
    masses = (of_splits - peaks[..., None]).exp()
    sums.copy_(masses.sum(-1))
    parts.copy_((masses[..., None] * values.view(B * H, 35, 2, D)).sum(2))
    found = merge(torch.empty(B, H * D), parts, peaks, sums, order=1)
    exact = (scores.double().softmax(-1)[..., None] * values.double()).sum(1).view(B, -1)
    assert torch.allclose(found.double(), exact, atol=1e-6)
