"""A bf16 decoding step in plain PyTorch: what a compiler makes of the textbook, as a baseline.

Static cache, projections of the same input joined, every layer the same compiled graph. Reads the
dense weights of a `DecodeStep`, so that both compute with the same memory.

Shapes: B sequences, H query heads, J key heads, N positions of the cache, D width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.decode.kernels.cache import Angles, Cache
from qat.extensions.decode.step import DecodeLayer, DecodeStep


class PlainStep:
    """`DecodeStep.logits` of a dense Qwen3, Qwen2 or Llama without biases, by `torch.compile`."""

    def __init__(self, step: DecodeStep, *, is_compiled: bool) -> None:
        self._step = step
        self._gains = [gains(block, step.dtype) for block in step.blocks]
        self._last_gain = step.last_gain.to(step.dtype)
        compiled = torch.compile if is_compiled else lambda function, **_: function
        self._layer = compiled(layer, fullgraph=True, dynamic=False)
        self._ends = compiled(logits, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def logits(
        self, ids: Tensor, position: Tensor, caches: Sequence[Cache], angles: Angles
    ) -> Tensor:
        """Return the logits as `DecodeStep.logits` does."""
        step = self._step
        x = step.embedding(ids[:, None])[:, 0]
        cos, sin = angles.cos.index_select(0, position), angles.sin.index_select(0, position)
        mask = torch.arange(angles.cos.shape[0], device=ids.device) <= position
        place = (position, cos, sin, mask)
        for block, own, cache in zip(step.blocks, self._gains, caches, strict=True):
            x = self._layer(x, weights(block), own, tuple(cache), place=place, eps=step.eps)
        return self._ends(x, self._last_gain, step.head.rows[0], step.eps)


def gains(block: DecodeLayer, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Return the gains of a layer's norms, None for a norm that it does not have."""
    found = (block.before, block.between, block.heads.q_norm, block.heads.k_norm)
    return tuple(None if gain is None else gain.to(dtype) for gain in found)


def weights(block: DecodeLayer) -> tuple[Tensor, ...]:
    """The four dense matrices of a layer."""
    return tuple(g.rows[0] for g in (block.qkv, block.out, block.gate_up, block.down))


def layer(
    x: Tensor,
    matrices: tuple[Tensor, ...],
    gains: tuple[Tensor | None, ...],
    cache: tuple[Tensor, Tensor],
    *,
    place: tuple[Tensor, ...],
    eps: float,
) -> Tensor:
    """One decoder layer for `x` `(B, width)`; writes into the cache."""
    qkv, out, gate_up, down = matrices
    before, between, q_norm, k_norm = gains
    (position, cos, sin, mask), (keys, values) = place, cache
    B, J, N, D = keys.shape
    joined = F.linear(F.rms_norm(x, x.shape[-1:], before, eps), qkv).view(B, -1, D)
    query, key, value = joined.split([joined.shape[1] - 2 * J, J, J], 1)
    query = rotated(normed(query, q_norm, eps), cos, sin)
    keys.index_copy_(2, position, rotated(normed(key, k_norm, eps), cos, sin)[:, :, None])
    values.index_copy_(2, position, value[:, :, None])
    query = query.view(B, J, -1, D)
    scores = (query @ keys.transpose(2, 3)).float() * D**-0.5
    scores = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(x.dtype)
    x = x + F.linear((scores @ values).reshape(B, -1), out)
    gate, up = F.linear(F.rms_norm(x, x.shape[-1:], between, eps), gate_up).chunk(2, 1)
    return x + F.linear(F.silu(gate) * up, down)


def logits(x: Tensor, gain: Tensor, head: Tensor, eps: float) -> Tensor:
    """`(B, V)` float32."""
    return F.linear(F.rms_norm(x, x.shape[-1:], gain, eps), head).float()


def normed(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """The RMS norm of each head, if there is one."""
    return x if gain is None else F.rms_norm(x, x.shape[-1:], gain, eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `(B, H, D)` rotated by the angles `(1, D)` of their position."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
