"""Attention over packed documents: transformers' attention modules call our kernel.

The implementation `qat` replaces `sdpa` in every model that a `LanguageModel` holds. A forward
with `document_positions` has packed documents and no padding, so these positions define the whole
mask; all other calls (generation with its cache and padding) go to transformers' own function.
If every layer is sparse, no mask over pairs of positions is ever made.

Each bit width of keys and values has an implementation name of its own, with which attention
rounds them first, after the rotary embedding and any cache: in training, evaluation and
generation.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qat.errors import CheckpointError, ConfigError
from qat.kernels.attention import fits_tile, in_whole_tiles, tile_attention
from qat.models.attention import KV, NAME, attends_sparsely, is_all_sparse
from qat.nn.swap import decoder_layers
from qat.quant.kv import fake_quantize_heads
from qat.quant.spec import KvSpec

RECORDING = f"{NAME}-recording"
"""Attention implementation that records what layers pass to it."""


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Let `model` attend through this module; return False if it needs more than a causal mask."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or {"full_attention"})
    is_plain = kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None
    if is_plain and config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
    return is_plain and config._attn_implementation in (NAME, *KV)


def set_kv(model: PreTrainedModel, spec: KvSpec | None) -> None:
    """Let `model` quantize keys and values by `spec`; None leaves them unquantized.

    Raises:
        CheckpointError: its attention is not `sdpa`, which computes the rest.
    """
    config, names = model.config.get_text_config(), {known: name for name, known in KV.items()}
    if config._attn_implementation not in ("sdpa", NAME, *KV):
        raise CheckpointError(
            f"{type(model).__name__} attends by {config._attn_implementation!r}, expected 'sdpa' "
            "where keys and values are quantized; leave attn_implementation out, or convert the "
            "model without --kv"
        )
    config._attn_implementation = "sdpa" if spec is None else names[spec]


def quantize_kv(model: PreTrainedModel, spec: KvSpec, device: torch.device | None = None) -> None:
    """Do what `set_kv` does, and check by a run that every layer keeps keys and values of heads.

    Raises:
        ConfigError: it attends sparsely, keeps something else than heads (latent vectors, states of
            a recurrence), or has heads that do not fit.
        CheckpointError: as `set_kv`.
    """
    name, asked = type(model).__name__, f"kv=int{spec.bits}"
    rest = "; leave --kv out, or choose another model"
    if attends_sparsely(model):
        raise ConfigError(
            f"{asked} is given for {name} with sparse attention, which summarizes keys and values, "
            "expected dense attention; leave --kv out, or add --attention dense"
        )
    if getattr(model.config.get_text_config(), "kv_lora_rank", None):
        raise ConfigError(
            f"{asked}, but {name} keeps latent vectors that its keys and values are made of, "
            f"expected keys and values of heads{rest}"
        )
    set_kv(model, spec)
    heads, layers = cached_heads(model, device), len(decoder_layers(model))
    if len(heads) != layers:
        raise ConfigError(
            f"{asked}, but {len(heads)} of the {layers} layers of {name} keep keys and values of "
            f"heads, expected all{rest}"
        )
    for each in heads:
        spec.check_width(each.key_width)
        spec.check_width(each.value_width)


class CachedHeads(NamedTuple):
    """Heads of keys and values that one layer caches per token."""

    count: int
    key_width: int
    value_width: int

    def num_bytes(self, spec: KvSpec) -> int:
        """Return the bytes per token in the format `spec`."""
        return self.count * (spec.head_bytes(self.key_width) + spec.head_bytes(self.value_width))

    def half_bytes(self) -> int:
        """Return the bytes per token in 16 bits."""
        return self.count * 2 * (self.key_width + self.value_width)


@torch.no_grad()
def cached_heads(model: PreTrainedModel, device: torch.device | None = None) -> list[CachedHeads]:
    """Run `model`, prepared by `set_kv`, once on `device`; return the heads that layers cache."""
    found: list[CachedHeads] = []

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: object, **more: object
    ) -> tuple[Tensor, None]:
        found.append(CachedHeads(key.shape[1], key.shape[-1], value.shape[-1]))
        return sdpa_attention_forward(module, query, key, value, *rest, **more)

    AttentionInterface.register(RECORDING, record)
    config = model.config.get_text_config()
    kept, config._attn_implementation = config._attn_implementation, RECORDING
    try:
        ids = torch.zeros(1, 4, dtype=torch.long, device=device or model.device)
        model(input_ids=ids, use_cache=False)
    finally:
        config._attn_implementation = kept
    return found


def make_mask(*args: object, **kwargs: object) -> Tensor | None:
    """Return transformers' `sdpa_mask`; the token mask `(B, N)` or None if all are sparse."""
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
    kv: KvSpec | None = None,
    **rest: object,
) -> tuple[Tensor, None]:
    """Do what transformers' `sdpa_attention_forward` does: `(B, H, S, D)` to `(B, S, H, D)`."""
    if kv is not None:
        key, value = (fake_quantize_heads(heads, kv.bits) for heads in (key, value))
    if document_positions is not None:
        query, key = query.to(value.dtype), key.to(value.dtype)
        if tile_fits and fits_tile(query, value):
            return tile_attention(query, key, value, document_positions, scaling), None
        if not is_packed:
            attention_mask = None  # the causal kernels read no mask
    key, value, attention_mask = in_whole_tiles(key, value, attention_mask)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **rest
    )


for _name in (NAME, *KV):
    AttentionInterface.register(_name, partial(attend, kv=KV.get(_name)))
for _name in (NAME, *KV, RECORDING):
    AttentionMaskInterface.register(_name, make_mask)
