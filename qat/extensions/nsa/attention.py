"""Native Sparse Attention and its parameters, as a replacement for transformers' own attention.

Only the families at the end of this file are known to support it.

A swapped module keeps its projections and norms under their names; only its class changes, and
`nsa` (`NSAParts`) is added.

Shapes: B rows, S positions, H query heads, K key-value heads, D head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    rotate_half,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from qat.errors import ConfigError
from qat.extensions.nsa.cache import Angles, Heads, PoolWeights, layer_of
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.router import Route, attend, choose
from qat.extensions.nsa.kernels.select import Inputs, pool
from qat.extensions.nsa.rows import (
    TokenRows,
    padding_of,
    rows_of_documents,
    rows_of_mask,
    rows_of_positions,
)
from qat.nn.swap import CACHE

NUM_BRANCHES, SELECTED = 3, 1  # of compressed, selected, window
SIGMOID_BIAS = (-6.0, 6.0, -6.0)
"""Initial gate biases in the mode `sigmoid`: selection 0.9975, the other two 0.0025."""


def activate_gates(raw: Tensor, config: NSAConfig) -> Tensor:
    """Return gates `(..., 3)` from the linear's raw output; see `NSAParts.gates_of`."""
    if config.mode == "sigmoid":
        return raw.sigmoid()
    # made on the device: a graph that is being captured must not copy from the host
    is_selected = torch.arange(NUM_BRANCHES, device=raw.device) == SELECTED
    return raw.tanh() + is_selected.to(raw.dtype)


class NSAParts(nn.Module):
    """The parameters of one layer, initialized to dense attention as far as the mode allows.

    `gates` is a linear from the layer's input to three gates per head, in the order compressed,
    selected, window; None in the mode `merged`. `pool_key` and `pool_value` `(K, compress_block)`
    are None if pooling is the mean.
    """

    stays_float = True
    """True: no quantizer takes its linears, which are few and learn a selection."""

    def __init__(
        self, config: NSAConfig, *, hidden_size: int, num_heads: int, num_key_heads: int
    ) -> None:
        super().__init__()
        self.config = config
        self.gates = self.pool_key = self.pool_value = None
        if config.mode == "merged":
            return
        self.gates = nn.Linear(hidden_size, NUM_BRANCHES * num_heads)
        start = SIGMOID_BIAS if config.mode == "sigmoid" else (0.0,) * NUM_BRANCHES
        with torch.no_grad():
            self.gates.weight.zero_()
            self.gates.bias.copy_(torch.tensor(start).repeat(num_heads))
        if config.pooling == "weighted":
            mean = torch.full((num_key_heads, config.compress_block), 1 / config.compress_block)
            self.pool_key, self.pool_value = nn.Parameter(mean.clone()), nn.Parameter(mean)

    def gates_of(self, hidden: Tensor) -> Tensor | None:
        """Return float32 gates `(B, S, H, 3)` for the input `(B, S, hidden_size)`; None if merged.

        `residual`: `(tanh b, 1 + tanh a, tanh c)`; `sigmoid`: the sigmoid of each.
        """
        if self.gates is None:
            return None
        raw = self.gates(hidden).unflatten(-1, (-1, NUM_BRANCHES))
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        return activate_gates(raw, self.config)

    @property
    def pool_weights(self) -> PoolWeights:
        """The learned weights of keys and of values; None: the mean."""
        return None if self.pool_key is None else (self.pool_key, self.pool_value)

    def pooled(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pool keys and values `(B, K, S, D)` to `(B, K, C, D)`; values are None if merged."""
        pooled_key = pool(key, self.config, self.pool_key)
        if self.config.mode == "merged":
            return pooled_key, None
        return pooled_key, pool(value, self.config, self.pool_value)


class Call(NamedTuple):
    """One call of a layer's attention over whole rows."""

    hidden: Tensor
    """`(B, S, hidden_size)`, the layer's input."""
    heads: Heads
    gates: Tensor | None
    """`(B, S, H, 3)`; None: merged."""
    angles: Angles
    rows: TokenRows


class NSAAttention(nn.Module):
    """Attention by `NSAConfig` from a family's own projections."""

    nsa: NSAParts
    reads_qkv = True
    """True: joined projections, if `qat.models.regions` makes them, are `qkv`."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Compute attention with the arguments and results of the family's own layer.

        Raises:
            ConfigError: more positions than the rotary embedding supports.
        """
        cache = kwargs.pop(CACHE, None)
        past = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        length, limit = past + hidden_states.shape[1], self.config.max_position_embeddings
        if length > limit:
            raise ConfigError(
                f"a sequence has {length} positions, but the model's rotary embedding is made for "
                f"{limit}; shorten the sequences or choose a model of a longer range"
            )
        heads = self._heads(hidden_states, position_embeddings)
        gates = self.nsa.gates_of(hidden_states)
        rows = TokenRows() if cache is not None else _rows(attention_mask, **kwargs)
        call = Call(hidden_states, heads, gates, position_embeddings, rows)
        if cache is None:
            out = rows.back(self.attend(call), 1)
        else:
            out = self._attend_cached(call, cache, padding_of(attention_mask))
        return self.o_proj(out.flatten(2)), None

    def attend(self, call: Call) -> Tensor:
        """Return attention of whole rows, `(B, S, H, D)`, with tokens in the order of `inputs`."""
        inputs = self.inputs(call)
        return attend(inputs, self.nsa.config, self.route(inputs.length, inputs.query.device))

    def _attend_cached(self, call: Call, cache: Cache, padding: Tensor | None) -> Tensor:
        """Return attention to the new and the cached positions, `(B, S, H, D)`; the cache grows.

        On an empty cache all positions are computed at once, later ones one by one; both are the
        same function by definition. `padding` is `(B, N)`, true at tokens; on a filled cache all
        new positions are tokens.
        """
        layer, weights = layer_of(cache, self.layer_idx, self.nsa.config), self.nsa.pool_weights
        _, heads, gates, angles, rows = call
        if layer.get_seq_length():
            return layer.extend(heads, gates, angles, weights=weights, scale=self.scaling)
        if padding is not None:
            rows = rows_of_mask(padding)
        inputs = self.inputs(call._replace(rows=rows))
        # `attend` selects by itself: with a selection passed in, it would be compiled for every
        # length
        route = self.route(inputs.length, inputs.query.device)
        out = attend(inputs, self.nsa.config, route)
        lengths = [inputs.length] * len(out) if padding is None else padding.sum(1).tolist()
        layer.begin(inputs, rows, lengths, (heads.unrotated_key, angles))
        return rows.back(out, 1)

    def route(self, length: int, device: torch.device) -> Route:
        """Return the backend for rows of `length` positions.

        Raises:
            ConfigError: the requested backend does not support them.
        """
        return choose(
            self.nsa.config,
            length=length,
            group=self.num_key_value_groups,
            head_dim=self.head_dim,
            device=device,
        )

    def inputs(self, call: Call) -> Inputs:
        """Return the inputs of a backend, with tokens before padding."""
        _, heads, gates, angles, rows = call
        heads = Heads(*(rows.to_front(tensor, 2) for tensor in heads))
        angles = tuple(rows.to_front(tensor, 1) for tensor in angles)
        pooled_key, pooled_value = self.pooled(heads, angles)
        return Inputs(
            query=heads.query,
            key=heads.key,
            value=heads.value,
            pooled_key=pooled_key,
            pooled_value=pooled_value,
            gates=None if gates is None else rows.to_front(gates, 1),
            first=rows.first,
            scale=self.scaling,
        )

    def pooled(self, heads: Heads, angles: Angles) -> tuple[Tensor, Tensor | None]:
        """Return pooled keys (rotated) and values, `(B, K, C, D)`; `angles` belong to `heads`."""
        config = self.nsa.config
        if config.cmp_rope == "post":
            return self.nsa.pooled(heads.key, heads.value)
        pooled_key, pooled_value = self.nsa.pooled(heads.unrotated_key, heads.value)
        count, stride = pooled_key.shape[2], config.compress_stride
        cos, sin = (angle[:, : count * stride : stride][:, None] for angle in angles)
        rotated = pooled_key * cos + rotate_half(pooled_key) * sin
        return rotated.to(pooled_key.dtype), pooled_value

    def _heads(self, hidden: Tensor, position_embeddings: Angles) -> Heads:
        if hasattr(self, "qkv"):  # joined projections are one matmul
            parts = self.qkv.split(self.qkv(hidden))
        else:
            parts = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        rotated_query, rotated_key = apply_rotary_pos_emb(query, key, *position_embeddings)
        dtype = value.dtype
        return Heads(rotated_query.to(dtype), rotated_key.to(dtype), value, key.to(dtype))


def _rows(
    attention_mask: Tensor | None,
    *,
    document_positions: Tensor | None = None,
    is_packed: bool = True,
    position_ids: Tensor | None = None,
    **_: object,
) -> TokenRows:
    """Return the rows of a call without cache; without a mask, positions separate documents."""
    if document_positions is not None:
        return rows_of_documents(document_positions) if is_packed else TokenRows()
    if attention_mask is not None:
        return rows_of_mask(attention_mask)
    return TokenRows() if position_ids is None else rows_of_positions(position_ids)


class LlamaNSAAttention(NSAAttention, LlamaAttention):
    """Native Sparse Attention for Llama."""


class Qwen2NSAAttention(NSAAttention, Qwen2Attention):
    """Native Sparse Attention for Qwen2."""


class Qwen3NSAAttention(NSAAttention, Qwen3Attention):
    """Native Sparse Attention for Qwen3."""


SWAPPED: dict[type[nn.Module], type[NSAAttention]] = {
    LlamaAttention: LlamaNSAAttention,
    Qwen2Attention: Qwen2NSAAttention,
    Qwen3Attention: Qwen3NSAAttention,
}
"""The sparse class that replaces each supported class."""
