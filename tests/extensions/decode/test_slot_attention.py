"""Tokens at positions of their own against textbook attention in float64, and the kernels."""

import pytest
import torch
from covering import covering
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.nn import functional as F

from qat.backend.cuda import CudaBackend
from qat.extensions.decode.kernels import slot_attention as module
from qat.extensions.decode.kernels.cache import EVERY, Angles, Cache, Scoring
from qat.extensions.decode.kernels.slot_attention import place_heads, slot_attention
from qat.kernels.dispatch import computing_by
from qat.quant.kv import dequantize_heads, fake_quantize_heads

B, N = 3, 150
HEADS = [(4, 2, 16), (6, 2, 8), (3, 1, 32), (2, 2, 64)]
"""Query heads, key heads, width."""


def turned(x: Tensor, gain: Tensor | None, angles: Angles, positions: Tensor) -> Tensor:
    """Norm and rotary written out: heads `(T, H, D)`."""
    D = x.shape[-1]
    if gain is not None:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
    flipped = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * angles.cos[positions, None] + flipped * angles.sin[positions, None]


@pytest.mark.parametrize(
    ("kib", "width", "size", "positions"),
    [(227, 256, 2, 64), (163, 256, 4, 32), (99, 128, 2, 64), (99, 256, 2, 32), (64, 256, 4, 16)],
)
def test_a_tile_of_wide_heads_fits_in_shared_memory(
    kib: int, width: int, size: int, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaBackend, "shared_memory_bytes", lambda backend: kib * 1024)
    assert module._tile(16, width, size, torch.device("cuda")) == positions
    assert module._tile(16, width, size, torch.device("cpu")) == 128 // size


@pytest.mark.parametrize(("heads", "has_norms"), covering(HEADS, [True, False]))
def test_heads_find_their_places(
    heads: tuple[int, int, int], has_norms: bool, is_kernel: bool
) -> None:
    H, J, D = heads
    T = 5
    qkv = torch.randn(T, (H + 2 * J) * D)
    slots, positions = torch.tensor([2, 0, 2, 1, 0]), torch.tensor([149, 0, 7, 30, 1])
    angle = torch.rand(N, D) * 6
    angles = Angles(angle.cos(), angle.sin())
    gains = (torch.rand(D) + 0.5, torch.rand(D) + 0.5) if has_norms else (None, None)
    cache = Cache(torch.randn(B, J, N, D), torch.randn(B, J, N, D))
    before = Cache(*(part.clone() for part in cache))
    facts = slots, positions, angles, Scoring(1.0, *gains, eps=1e-6)
    with computing_by(kernel=is_kernel):
        query = place_heads(qkv, cache, *facts)
        placed = place_heads(qkv, cache, *facts, has_keys=True)
    assert torch.equal(placed, torch.cat([query, cache.keys[slots, :, positions]], 1))

    def split(x: Tensor) -> tuple[Tensor, ...]:
        return x.view(T, -1, D).split([H, J, J], 1)

    for found, place in ((query, 0), (cache.keys[slots, :, positions], 1)):
        eager = turned(split(qkv)[place], gains[place], angles, positions)
        gain = None if gains[place] is None else gains[place].double()
        wide = Angles(*(each.double() for each in angles))
        exact = turned(split(qkv.double())[place], gain, wide, positions)
        assert_no_worse_than_eager(found, eager, exact, slack=1e-6)
    assert torch.equal(cache.values[slots, :, positions], split(qkv)[2])
    for new, old in zip(cache, before, strict=True):  # and nothing else was written
        new[slots, :, positions] = old[slots, :, positions]
        assert torch.equal(new, old)


@pytest.mark.parametrize(("heads", "dtype"), covering(HEADS, [torch.float32, torch.float16]))
def test_each_slot_attends_to_what_it_holds(
    heads: tuple[int, int, int], dtype: torch.dtype, is_kernel: bool
) -> None:
    H, J, D = heads
    query = torch.randn(B, H, D).to(dtype)
    cache = Cache(*(torch.randn(B, J, N, D).to(dtype) for _ in range(2)))
    positions = torch.tensor([0, 64, 149])
    for part in cache:  # what is not in use is never read
        part[0, :, 1:], part[1, :, 65:] = torch.nan, torch.nan

    def textbook(kind: torch.dtype) -> Tensor:
        rows = []
        for b, end in enumerate(positions + 1):
            keys, values = (
                part[b, :, :end].to(kind).repeat_interleave(H // J, 0) for part in cache
            )
            scores = (keys @ query[b].to(kind)[..., None])[..., 0] * D**-0.5
            rows.append((F.softmax(scores, -1)[..., None] * values).sum(1).flatten())
        return torch.stack(rows)

    if not is_kernel:  # which multiplies what it masks
        for part in cache:
            part.nan_to_num_()
    with computing_by(kernel=is_kernel):
        found = slot_attention(query, cache, positions, D**-0.5)
    assert found.dtype == dtype and found.shape == (B, H * D)
    slack = 2e-6 if dtype == torch.float32 else 5e-4
    assert_no_worse_than_eager(found, textbook(dtype), textbook(torch.float64), slack=slack)


@pytest.mark.parametrize(
    ("heads", "bits", "dtype"),
    [
        (HEADS[1], 8, torch.float32),
        (HEADS[1], 4, torch.float16),
        (HEADS[3], 8, torch.float16),
        (HEADS[3], 4, torch.float32),
    ],
)
def test_packed_slots_hold_and_say_what_training_computes(
    heads: tuple[int, int, int], bits: int, dtype: torch.dtype, is_kernel: bool
) -> None:
    H, J, D = heads
    cache = Cache.empty((B, J, N, D), dtype, torch.device("cpu"), bits)
    angle = torch.zeros(N, D)  # no rotation and no norm: keys are then equal to the bit
    angles, scoring = Angles(angle.cos(), angle.sin()), Scoring(D**-0.5)
    written = torch.randn(2, B, J, N, D).to(dtype)
    cache.put(*written, EVERY, EVERY, EVERY)
    slots, places = torch.tensor([2, 0, 2, 1, 0]), torch.tensor([149, 0, 7, 30, 1])
    qkv = torch.randn(5, (H + 2 * J) * D).to(dtype)
    with computing_by(kernel=is_kernel):
        place_heads(qkv, cache, slots, places, angles, scoring)
    for part, new in zip(written, qkv.view(5, -1, D).split([H, J, J], 1)[1:], strict=True):
        part[slots, :, places] = new
    fake = [fake_quantize_heads(part, bits) for part in written]
    for part, expected in zip(cache, fake, strict=True):
        assert torch.equal(dequantize_heads(part), expected)
    slots = torch.tensor([1, 0])
    for part, expected in zip(cache.at(slots, EVERY, slice(3)), fake, strict=True):
        assert torch.equal(part, expected[slots, :, :3])
    query, positions = torch.randn(B, H, D).to(dtype), torch.tensor([0, 64, 149])
    with computing_by(kernel=is_kernel):
        found = slot_attention(query, cache, positions, scoring.scaling)
    seen = (torch.arange(N) <= positions[:, None])[:, None, None]
    told = {"attn_mask": seen, "scale": scoring.scaling, "enable_gqa": True}
    eager, exact = (
        F.scaled_dot_product_attention(query[:, :, None].to(t), *(x.to(t) for x in fake), **told)
        for t in (dtype, torch.float64)
    )
    slack = 2e-6 if dtype == torch.float32 else 1e-3
    assert_no_worse_than_eager(found, eager.flatten(1), exact.flatten(1), slack)
