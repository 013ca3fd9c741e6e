"""`row_attention` says of tokens at once what `decode_attention` says one after the other."""

from collections.abc import Iterator

import pytest
import torch

from qat.extensions.decode.kernels.cache import EVERY, Angles, Cache, Scoring
from qat.extensions.decode.kernels.decode_attention import decode_attention
from qat.extensions.decode.kernels.lut_rows import gathered
from qat.extensions.decode.kernels.row_attention import row_attention
from qat.kernels.dispatch import computing_by

T, H, J, N, D = 5, 4, 2, 80, 16


@pytest.fixture(autouse=True)
def _both_ways(is_kernel: bool) -> Iterator[None]:
    with computing_by(kernel=is_kernel):
        yield


@pytest.mark.parametrize(("at", "bits"), [(0, None), (61, None), (61, 8)])
def test_tokens_at_once_are_those_one_after_the_other(at: int, bits: int | None) -> None:
    qkv = torch.randn(T, (H + 2 * J) * D)
    angle = torch.rand(N, D) * 6
    angles = Angles(angle.cos(), angle.sin())
    heads = Scoring(D**-0.5, torch.rand(D) + 0.5, torch.rand(D) + 0.5, eps=1e-6)
    # what is there from `at` on was drafted before, and is written again
    caches = [Cache.empty((1, J, N, D), torch.float32, qkv.device, bits) for _ in range(2)]
    old = torch.randn(2, 1, J, N, D)
    for cache in caches:
        cache.put(*old, EVERY, EVERY, EVERY)
    found = row_attention(qkv, caches[0], torch.tensor([at]), angles, heads, order=16)
    expected = [
        decode_attention(row[None], caches[1], torch.tensor([at + t]), angles, heads, order=16)
        for t, row in enumerate(qkv)
    ]
    assert found.shape[0] == T
    torch.testing.assert_close(
        gathered(found, 16), torch.cat([gathered(row, 16) for row in expected])
    )
    for one, other in zip(*(cache.at(EVERY, EVERY, EVERY) for cache in caches), strict=True):
        torch.testing.assert_close(one, other)
