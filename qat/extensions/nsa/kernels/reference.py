"""Native Sparse Attention by dense masks, in plain PyTorch: the oracle of all other backends.

It supports any group, length and device, and gradients by autograd; time and memory are those of
dense attention without a kernel. Shapes as in `qat.extensions.nsa.kernels.select`.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, masked_softmax, sees_compressed
from qat.kernels.attention import in_whole_tiles


def attend(inputs: Inputs, selection: Tensor, config: NSAConfig) -> Tensor:
    """Return `(B, S, H, D)`: the gated sum of three branches, or one softmax if they are merged.

    `selection` is `(B, K, T, N)` bool, from `qat.extensions.nsa.kernels.select.select`.
    """
    selected = _branch(inputs, inputs.key, inputs.value, selected_mask(inputs, selection, config))
    if config.mode == "merged":
        return selected
    window = _branch(inputs, inputs.key, inputs.value, window_mask(inputs, config)[:, None])
    seen = compressed_mask(inputs, config)[:, None]
    compressed = _branch(inputs, inputs.pooled_key, inputs.pooled_value, seen)
    return combine(inputs.gates, compressed, selected, window)


def combine(gates: Tensor, compressed: Tensor, selected: Tensor, window: Tensor) -> Tensor:
    """Return the sum of the branches times their gates, `(B, S, H, D)`."""
    of_compressed, of_selected, of_window = gates.to(selected.dtype)[..., None].unbind(-2)
    return of_compressed * compressed + of_selected * selected + of_window * window


def causal_mask(inputs: Inputs) -> Tensor:
    """Return `(B, S, S)` bool: keys in the query's past and document."""
    places = torch.arange(inputs.length, device=inputs.query.device)
    return (places <= places[:, None]) & (places >= inputs.document_starts()[..., None])


def selected_mask(inputs: Inputs, selection: Tensor, config: NSAConfig) -> Tensor:
    """Return `(B, K, S, S)` bool: keys of the blocks that each query's tile selected."""
    S = inputs.length
    mask = selection.repeat_interleave(config.select_tile, 2)[:, :, :S]
    mask = mask.repeat_interleave(config.select_block, 3)[..., :S]
    return mask & causal_mask(inputs)[:, None]


def window_mask(inputs: Inputs, config: NSAConfig) -> Tensor:
    """Return `(B, S, S)` bool: the last `window` keys, including the query's own."""
    places = torch.arange(inputs.length, device=inputs.query.device)
    return causal_mask(inputs) & (places > places[:, None] - config.window)


def compressed_mask(inputs: Inputs, config: NSAConfig) -> Tensor:
    """Return `(B, S, C)` bool: pooled keys whose block is complete."""
    places = torch.arange(inputs.length, device=inputs.query.device)
    return sees_compressed(places, inputs.document_starts(), inputs.pooled_key.shape[2], config)


def _branch(inputs: Inputs, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return attention `(B, S, H, D)` under a mask that broadcasts to `(B, K, S, keys)`."""
    query = inputs.query.unflatten(1, (-1, inputs.group))
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = (inputs.scale * query @ key[:, :, None].mT).to(wide)
    shares = masked_softmax(logits, mask[:, :, None]).to(value.dtype)
    return (shares @ value[:, :, None]).flatten(1, 2).transpose(1, 2)


# Dense causal attention over the same inputs, which Native Sparse Attention equals on short rows.


def attend_densely(inputs: Inputs) -> Tensor:
    """Return `(B, S, H, D)`: one softmax over the query's past and document, without gates."""
    mask = None if inputs.first is None else causal_mask(inputs)[:, None]
    key, value, mask = in_whole_tiles(inputs.key, inputs.value, mask)
    out = scaled_dot_product_attention(
        inputs.query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=inputs.scale,
        enable_gqa=inputs.group > 1,
    )
    return out.transpose(1, 2)
