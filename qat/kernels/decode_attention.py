"""Attention of one new position over a cache of fixed size, with the norms and rotary before it.

Nothing depends on the host: the position is read on the device, so that one recorded graph serves
every step.

Shapes: B sequences, H query heads, J key heads, N positions of the cache, D width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.kernels.dispatch import use_triton
from qat.kernels.lut_matvec import spread


class Cache(NamedTuple):
    """Keys and values of one layer."""

    keys: Tensor
    """`(B, J, N, D)`, rotated."""
    values: Tensor
    """`(B, J, N, D)`."""


class Angles(NamedTuple):
    """What positions rotate queries and keys by: halves of a head against each other."""

    cos: Tensor
    """`(N, D)` float32."""
    sin: Tensor
    """`(N, D)` float32."""


class Heads(NamedTuple):
    """What one layer's attention does to its heads."""

    scaling: float
    """Scores are `scaling * q @ k`."""
    q_norm: Tensor | None = None
    """`(D,)` gain of the RMS norm of every query, if there is one."""
    k_norm: Tensor | None = None
    eps: float = 0.0


def decode_attention(
    qkv: Tensor, cache: Cache, position: Tensor, angles: Angles, heads: Heads, *, order: int = 1
) -> Tensor:
    """What the heads say of positions up to `position`, `(B, H * D)` float32, spread by `order`.

    `qkv` `(B, (H + 2 J) D)` float32 holds queries, keys and values of the new `position` `(1,)`,
    which is the same for all sequences; its key and value are written into the cache.
    """
    if use_triton(qkv):
        from qat.kernels import decode_attention_triton

        return decode_attention_triton._decode_by_kernel(
            qkv, cache, position, angles, heads, order=order
        )
    (B, J, _, D), at = cache.keys.shape, int(position)
    query, key, value = qkv.view(B, -1, D).split([qkv.shape[1] // D - 2 * J, J, J], 1)
    turn = (angles.cos[at], angles.sin[at])
    query = _rotated(_normed(query, heads.q_norm, heads.eps), *turn)
    cache.keys[:, :, at] = _rotated(_normed(key, heads.k_norm, heads.eps), *turn)
    cache.values[:, :, at] = value
    seen = (cache.keys[:, :, : at + 1].float(), cache.values[:, :, : at + 1].float())
    out = F.scaled_dot_product_attention(
        query[:, :, None].float(), *seen, scale=heads.scaling, enable_gqa=True
    )
    return spread(out.flatten(1), order)


def _normed(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    return x if gain is None else F.rms_norm(x, x.shape[-1:], gain.to(x.dtype), eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
