"""How transformers' attention modules reach our kernel for short, packed sequences.

Registered under the name `qat`, it stands in for `sdpa` in every model that a `LanguageModel`
holds. A forward that hands `document_positions` on has packed documents and no padding, so they
say all of the mask; any other call (generation with its cache and padding) is transformers' own.
Where every layer is sparse no mask over pairs of positions is ever made.
"""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qat.kernels.attention import fits_tile, tile_attention
from qat.nsa.swap import is_all_sparse

NAME = "qat"


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Let `model` attend through this file; false where it needs more than a causal mask."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or {"full_attention"})
    is_plain = kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None
    if is_plain and config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
    return config._attn_implementation == NAME


def no_mask(device: torch.device) -> Tensor:
    """`(1, 1, 1, 1)`, for layers that read none: transformers makes another where it gets None."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def make_mask(*args: object, **kwargs: object) -> Tensor | None:
    """As `sdpa_mask` of transformers; the mask of tokens `(B, N)` itself if all layers are sparse.

    None says that all of them are tokens.
    """
    config, mask = kwargs.get("config"), kwargs.get("attention_mask")
    if config is None or not is_all_sparse(config):
        return sdpa_mask(*args, **kwargs)
    return None if mask is None or mask.all() else mask


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    document_positions: Tensor | None = None,
    is_packed: bool = True,
    tile_fits: bool = False,
    **rest: object,
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward` of transformers: heads `(B, H, S, D)` to `(B, S, H, D)`."""
    if document_positions is not None:
        query, key = query.to(value.dtype), key.to(value.dtype)
        if tile_fits and fits_tile(query, value):
            return tile_attention(query, key, value, document_positions, scaling), None
        if not is_packed:
            attention_mask = None  # the causal kernels read no mask
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **rest
    )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
