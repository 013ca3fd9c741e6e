"""Attention of several consecutive new tokens of one sequence, over a cache of fixed size.

It is for the few tokens that a draft proposes. Their keys and values are placed first; then the
kernels of `decode_attention` take each token as a sequence of its own over the same cache. Packed
caches, and devices without Triton, use PyTorch's products over the whole cache, whose part behind
a token is masked. Nothing depends on the host.

Shapes: T new tokens, H query heads, J key heads, N positions of the cache, D width of a head.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.decode.kernels.cache import EVERY, Angles, Cache, Scoring
from qat.extensions.decode.kernels.decode_attention import split_attention
from qat.extensions.decode.kernels.lut_rows import spread
from qat.extensions.decode.kernels.slot_attention import place_heads
from qat.kernels.dispatch import use_triton
from qat.quant.kv import PackedHeads


def row_attention(
    qkv: Tensor, cache: Cache, position: Tensor, angles: Angles, scoring: Scoring, *, order: int = 1
) -> Tensor:
    """Return causal attention of new tokens, `(T, H D)` in the dtype of `qkv`, spread by `order`.

    `qkv` `(T, (H + 2 J) D)` holds queries, keys and values; `position` `(1,)` is that of the first
    token. The cache has one sequence; new keys and values are written into it.
    """
    T, (_, J, N, _) = len(qkv), cache.shape
    places = torch.arange(N, device=qkv.device)
    positions = position + places[:T]
    query = place_heads(qkv, cache, torch.zeros_like(positions), positions, angles, scoring)
    if use_triton(qkv, __name__) and not isinstance(cache.keys, PackedHeads):
        facts = position, angles, scoring
        return split_attention(qkv, cache, *facts, order=order, is_row=True)
    keys, values = (part.to(query.dtype) for part in cache.at(EVERY, EVERY, EVERY))
    # the query heads of a key head are rows beside each other: (T, H, D) to (J, H / J, T, D)
    rows = query.unflatten(1, (J, -1)).permute(1, 2, 0, 3)
    seen = (places <= positions[:, None]).repeat(rows.shape[1], 1)
    out = F.scaled_dot_product_attention(
        rows.flatten(1, 2)[None], keys, values, attn_mask=seen, scale=scoring.scaling
    )
    out = out[0].unflatten(1, (-1, T)).permute(2, 0, 1, 3).flatten(1)
    return out if order == 1 else spread(out, order)
