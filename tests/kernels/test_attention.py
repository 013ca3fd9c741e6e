"""Attention inside packed documents: the reference against a loop over documents, the kernel."""

import pytest
import torch
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.nn import functional as F

from qat.backend.cuda import CudaBackend
from qat.kernels.attention import (
    document_mask,
    has_room,
    in_whole_tiles,
    packed_attention,
    tile_bytes,
)

SHAPES = [(2, 4, 2, 64, 32), (1, 2, 2, 17, 16), (3, 6, 2, 100, 32), (2, 2, 1, 1, 16)]


def inputs(B, H, K, S, D, dtype=torch.float32) -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(B, S, n, D, dtype=dtype).transpose(1, 2) for n in (H, K, K))
    starts = torch.rand(B, S) < 0.15
    starts[:, 0] = True
    places = torch.arange(S)
    positions = places - torch.where(starts, places, 0).cummax(1).values
    return q, k, v, positions


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_causal_attention_document_by_document(shape) -> None:
    q, k, v, positions = inputs(*shape)
    group = shape[1] // shape[2]
    expected = torch.empty_like(q)
    for b, row in enumerate(positions):
        edges = [*(row == 0).nonzero()[:, 0].tolist(), len(row)]
        for start, end in zip(edges, edges[1:], strict=False):
            part = slice(start, end)
            expected[b, :, part] = F.scaled_dot_product_attention(
                q[b : b + 1, :, part],
                k[b : b + 1, :, part].repeat_interleave(group, 1),
                v[b : b + 1, :, part].repeat_interleave(group, 1),
                is_causal=True,
                scale=0.3,
            )[0]
    actual = packed_attention(q, k, v, positions, 0.3)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


@pytest.mark.parametrize("is_bool", [True, False])
def test_unread_keys_fill_a_half_empty_tile_on_a_gpu(
    is_bool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, positions = inputs(2, 2, 2, 192, 16)
    mask = document_mask(positions)
    if not is_bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    assert in_whole_tiles(k, v, mask) == (k, v, mask)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    wide = in_whole_tiles(k, v, mask)
    assert [t.shape[-2] for t in wide[:2]] == [256, 256] and wide[2].shape[-1] == 256
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, *wide), expected)
    assert in_whole_tiles(k, v, None) == (k, v, None)  # a causal kernel has no such bug
    of_all_keys = in_whole_tiles(k, v, mask[..., :1])[2]  # one column stands for every key
    assert torch.equal(of_all_keys[..., :192], mask[..., :1].expand(-1, -1, -1, 192))
    assert torch.equal(of_all_keys[..., 192:], wide[2][..., 192:])
    with torch.no_grad():  # a step of generation does not copy its whole cache
        assert in_whole_tiles(k, v, mask) == (k, v, mask)
    whole = [t[..., :128, :] for t in (k, v)]
    assert in_whole_tiles(*whole, mask[..., :128])[0].shape[2] == 128


@pytest.mark.parametrize(
    ("shared_bytes", "capability", "fits"),
    [
        (65_536, (7, 5), (False, False, False)),  # a T4, whose products take more memory
        (101_376, (8, 6), (True, True, False)),  # a GeForce card
        (166_912, (8, 0), (True, True, False)),  # an A100
        (232_448, (9, 0), (True, True, True)),  # an H200
        (232_448, (10, 0), (True, True, False)),  # a B200, whose tensor memory is short
    ],
)
def test_a_long_tile_is_too_large_for_small_cards(
    shared_bytes: int,
    capability: tuple[int, int],
    fits: tuple[bool, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(CudaBackend, "shared_memory_bytes", lambda backend: shared_bytes)
    assert (has_room(64, 64, gpu), has_room(64, 128, gpu), has_room(100, 128, gpu)) == fits
    assert tile_bytes(64, 128) == 90_112 and tile_bytes(100, 128) == tile_bytes(128, 128)


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_errs_no_more_than_eager_attention(shape) -> None:
    pytest.importorskip("triton")
    dtype = torch.float16  # the interpreter knows no bfloat16 products: see tests/gpu
    from qat.kernels.attention import attention_backward, attention_forward

    q, k, v, positions = inputs(*shape, dtype=dtype)
    grad = torch.randn(shape[0], shape[3], shape[1], shape[4], dtype=dtype)
    found = attention_forward(q, k, v, positions, 0.3)
    kernel = (found, *attention_backward(grad, q, k, v, positions, 0.3))
    eager = value_and_gradients(q, k, v, positions, grad)
    exact = value_and_gradients(*(t.double() for t in (q, k, v)), positions, grad.double())
    for one, plain, truth in zip(kernel, eager, exact, strict=True):
        assert_no_worse_than_eager(one, plain, truth, slack=2e-2 * truth.abs().max().item())


def value_and_gradients(q, k, v, positions, grad) -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = packed_attention(*leaves, positions, 0.3)
    out.backward(grad)
    return out.detach(), *(leaf.grad for leaf in leaves)
