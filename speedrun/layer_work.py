"""The Triton kernels inside a decoder layer, on one layer's activations of a whole batch.

Shapes: B sequences, S positions, T = B*S, H query heads, G key-value heads, F width of gates.
"""

from collections.abc import Callable, Iterator

import torch
from kernel_work import Place, Work, num_bytes
from torch import Tensor

from qat.kernels.attention import fits_tile, packed_attention, tile_attention
from qat.kernels.dispatch import use_triton
from qat.kernels.glu import silu_mul
from qat.kernels.joined_attention import joined_attention, joined_fits_tile, joined_tile_attention


def layer_work(place: Place) -> Iterator[Work]:
    """Every kernel in turn."""
    yield from attention_work(place)
    yield from joined_attention_work(place)
    yield from gated_unit_work(place)


def attention_work(place: Place) -> Iterator[Work]:
    """Attention alone, heads apart."""
    H, G, width = heads_of(place)
    B, S = place.sequences, place.setting.data.seq_len
    q, k, v = (place.random(B, S, heads, width).transpose(1, 2) for heads in (H, G, G))
    grad, positions, scale = place.random(B, S, H, width), positions_of(place), width**-0.5
    fits = fits_tile(q, v)
    attend = tile_attention if fits else packed_attention
    yield Work(
        "attention, forward",
        lambda: attend(q, k, v, positions, scale),
        calls=1,
        num_bytes=num_bytes(q, k, v, grad, positions),  # the output is as large as its gradient
        flops=2 * product_flops(place),
    )
    by_autograd = gradient_of(lambda *qkv: packed_attention(*qkv, positions, scale), grad, q, k, v)
    yield Work(
        "attention, backward",
        (lambda: torch.ops.qat.tile_attention_backward(grad, q, k, v, positions, scale))
        if fits
        else by_autograd,
        calls=1,
        num_bytes=num_bytes(q, k, v, grad, positions) + num_bytes(q, k, v),
        flops=5 * product_flops(place),
    )


def joined_attention_work(place: Place) -> Iterator[Work]:
    """Norms, rotary embedding and attention of heads that lie side by side."""
    H, G, width = heads_of(place)
    B, S = place.sequences, place.setting.data.seq_len
    qkv, grad = place.random(B, S, (H + 2 * G) * width), place.random(B, S, H, width)
    cos, sin = place.random(B, S, width), place.random(B, S, width)
    norms = [torch.ones(width, device=qkv.device) for _ in range(2)]
    positions = positions_of(place)
    inputs = (cos, sin, *norms, positions, width**-0.5, 1e-6)
    fits = joined_fits_tile(qkv, width)
    attend = joined_tile_attention if fits else joined_attention
    shared = num_bytes(cos, sin, *norms, positions)
    turned = qkv[..., : (H + G) * width].contiguous()
    yield Work(
        "joined attention, forward",
        lambda: attend(qkv, *inputs, H),
        calls=1,
        num_bytes=num_bytes(qkv, grad) + shared,
        flops=2 * product_flops(place),
    )
    by_autograd = gradient_of(lambda joined: joined_attention(joined, *inputs, H), grad, qkv)
    yield Work(
        "joined attention, backward",
        (lambda: torch.ops.qat.joined_tile_attention_backward(grad, turned, qkv, *inputs, False))
        if fits
        else by_autograd,
        calls=1,
        num_bytes=num_bytes(qkv, qkv, grad) + shared,
        flops=5 * product_flops(place),
    )


def gated_unit_work(place: Place) -> Iterator[Work]:
    """`silu(gate) * up` and its gradient."""
    T = place.sequences * place.setting.data.seq_len
    F = place.student.config.intermediate_size
    joined, grad = place.random(T, 2 * F), place.random(T, F)
    yield Work("gated unit, forward", lambda: silu_mul(joined), 1, num_bytes(joined, grad))
    by_kernel = use_triton(joined)
    by_autograd = gradient_of(silu_mul, grad, joined)
    yield Work(
        "gated unit, backward",
        (lambda: torch.ops.qat.silu_mul_backward(grad, joined)) if by_kernel else by_autograd,
        calls=1,
        num_bytes=num_bytes(joined, joined, grad),
    )


def gradient_of(
    function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor
) -> Callable[[], None]:
    """Forward and backward by autograd: what stands in for a kernel where there is none."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]

    def run() -> None:
        with torch.enable_grad():
            torch.autograd.grad(function(*leaves), leaves, grad)

    return run


def heads_of(place: Place) -> tuple[int, int, int]:
    """Query heads, key-value heads and their width."""
    config = place.student.config
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim


def positions_of(place: Place) -> Tensor:
    """Of one document a row, `(B, S)`."""
    B, S = place.sequences, place.setting.data.seq_len
    return torch.arange(S, device=place.setting.backend.device).expand(B, S).contiguous()


def product_flops(place: Place) -> float:
    """Of one matmul of all heads over the keys that a causal query sees."""
    H, _, width = heads_of(place)
    B, S = place.sequences, place.setting.data.seq_len
    return 2 * B * H * width * S * (S + 1) / 2
