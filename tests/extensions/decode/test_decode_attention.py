"""`decode_attention` against textbook attention in float64, and its kernel, interpreted."""

from collections.abc import Iterator

import pytest
import torch
from covering import covering
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.decode.kernels.cache import EVERY, Angles, Cache, Scoring
from qat.extensions.decode.kernels.decode_attention import decode_attention
from qat.extensions.decode.kernels.lut_rows import gathered
from qat.kernels.dispatch import computing_by
from qat.quant.kv import dequantize_heads, fake_quantize_heads

B, H, J, N, D = 2, 4, 2, 80, 16


@pytest.fixture(autouse=True)
def _both_ways(is_kernel: bool) -> Iterator[None]:
    with computing_by(kernel=is_kernel):
        yield


def textbook(
    qkv: Tensor, cache: Cache, at: int, angles: Angles, heads: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention written out: result `(B, H * D)`, and the new key and value."""
    query, key, value = qkv.view(B, -1, D).split([H, J, J], 1)

    def turned(x: Tensor, gain: Tensor | None) -> Tensor:
        if gain is not None:
            x = x / (x.square().mean(-1, keepdim=True) + heads.eps).sqrt() * gain
        flipped = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
        return x * angles.cos[at] + flipped * angles.sin[at]

    query, key = turned(query, heads.q_norm), turned(key, heads.k_norm)
    keys = torch.cat([cache.keys[:, :, :at], key[:, :, None]], 2).repeat_interleave(H // J, 1)
    values = torch.cat([cache.values[:, :, :at], value[:, :, None]], 2).repeat_interleave(H // J, 1)
    weights = F.softmax((keys @ query[..., None])[..., 0] * heads.scaling, -1)
    return (weights[..., None] * values).sum(2).flatten(1), key, value


@pytest.mark.parametrize(("at", "has_norms"), covering([0, 5, 79], [True, False]))
def test_one_new_position(at: int, has_norms: bool) -> None:
    qkv = torch.randn(B, (H + 2 * J) * D)
    cache = Cache(torch.randn(B, J, N, D), torch.randn(B, J, N, D))
    angle = torch.rand(N, D) * 6
    angles = Angles(angle.cos(), angle.sin())
    gains = (torch.rand(D) + 0.5, torch.rand(D) + 0.5) if has_norms else (None, None)
    heads = Scoring(D**-0.5, *gains, eps=1e-6)
    eager, key, value = textbook(qkv, cache, at, angles, heads)
    doubled = Scoring(D**-0.5, *(None if gain is None else gain.double() for gain in gains), 1e-6)
    exact, _, _ = textbook(
        qkv.double(),
        Cache(*(t.double() for t in cache)),
        at,
        Angles(*(t.double() for t in angles)),
        doubled,
    )
    later = cache.keys[:, :, at + 1 :].clone()
    found = decode_attention(qkv, cache, torch.tensor([at]), angles, heads, order=16)
    assert_no_worse_than_eager(gathered(found, 16), eager, exact, slack=2e-6)
    assert torch.allclose(cache.keys[:, :, at], key, atol=1e-6)
    assert torch.equal(cache.values[:, :, at], value)
    assert torch.equal(cache.keys[:, :, at + 1 :], later)


@pytest.mark.parametrize(
    ("at", "bits", "kind", "width"),
    [
        (0, 8, torch.float32, D),
        (0, 4, torch.float16, D),
        (70, 8, torch.float16, 64),
        (70, 4, torch.float32, 64),
    ],
)
def test_a_packed_cache_is_read_as_training_computes(
    at: int, bits: int, kind: torch.dtype, width: int
) -> None:
    qkv = torch.randn(B, (H + 2 * J) * width).to(kind).float()
    angle = torch.zeros(N, width)  # no rotation and no norm: keys are then equal to the bit
    angles, heads = Angles(angle.cos(), angle.sin()), Scoring(width**-0.5)
    keys, values = torch.randn(2, B, J, N, width).to(kind)
    cache = Cache.empty((B, J, N, width), kind, qkv.device, bits)
    cache.put(keys, values, EVERY, EVERY, EVERY)
    later = cache.keys.codes[:, :, at + 1 :].clone()
    found = decode_attention(qkv, cache, torch.tensor([at]), angles, heads, order=16)
    query, key, value = qkv.view(B, -1, width).split([H, J, J], 1)
    keys[:, :, at], values[:, :, at] = key, value
    fake = [fake_quantize_heads(part[:, :, : at + 1], bits) for part in (keys, values)]
    for part, expected in zip(cache, fake, strict=True):
        assert torch.equal(dequantize_heads(part)[:, :, : at + 1], expected)
    assert torch.equal(cache.keys.codes[:, :, at + 1 :], later)
    told = {"scale": heads.scaling, "enable_gqa": True}
    eager, exact = (
        F.scaled_dot_product_attention(query[:, :, None].to(t), *(x.to(t) for x in fake), **told)
        for t in (torch.float32, torch.float64)
    )
    slack = 2e-6 if kind == torch.float32 else 2e-5  # weights are two parts of 16 bits
    assert_no_worse_than_eager(gathered(found, 16), eager.flatten(1), exact.flatten(1), slack)


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_at_the_ends_of_float16_are_kept_as_training_computes_them(bits: int) -> None:
    at, kind = 3, torch.float16
    qkv = torch.zeros(B, (H + 2 * J) * D)
    _, key, value = qkv.view(B, -1, D).split([H, J, J], 1)
    for part, lowest in ((key, -60000.0), (value, -10000.0)):
        part.uniform_(lowest, 65504.0)
        part[..., :2] = torch.tensor([lowest, 65504.0])
    qkv = qkv.to(kind).float()
    cache = Cache.empty((B, J, N, D), kind, qkv.device, bits)
    angle = torch.zeros(N, D)
    angles, heads = Angles(angle.cos(), angle.sin()), Scoring(D**-0.5)
    decode_attention(qkv, cache, torch.tensor([at]), angles, heads, order=16)
    for kept, part in zip(cache, (key, value), strict=True):
        found = dequantize_heads(kept)[:, :, at]
        assert found.isfinite().all()
        assert torch.equal(found, fake_quantize_heads(part.to(kind), bits))
