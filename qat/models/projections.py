"""Projections that read the same input run as one matmul, in the families known to allow it.

Queries, keys and values are one product then, gates and ups another, and what follows works on the
joined result, so that its gradient is joined too. The modules keep their names and parameters; only
their forward changes, and only while nothing is generated with a cache.
"""

from types import MethodType

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, apply_rotary_pos_emb
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

from qat.kernels.glu import silu_mul
from qat.kernels.joined_attention import joined_fits_tile, joined_tile_attention
from qat.models.attention import attend
from qat.nn.step import join_linears, part_linears
from qat.nsa.attention import NSAAttention

ATTENTIONS = (LlamaAttention, Qwen2Attention, Qwen3Attention)
MLPS = (LlamaMLP, Qwen2MLP, Qwen3MLP)
QKV = ("q_proj", "k_proj", "v_proj")
SILUS = (nn.SiLU, type(ACT2FN["silu"]))


def join_projections(model: PreTrainedModel) -> None:
    """Join what reads the same input in `model`, as far as it is quantized."""
    for module in [*model.modules()]:
        if isinstance(module, NSAAttention):
            join_linears(module, "qkv", QKV)
        elif type(module) in ATTENTIONS:
            join_linears(module, "qkv", QKV)
            module.forward = MethodType(_attention, module)
        elif type(module) in MLPS:
            join_linears(module, "gate_up", ("gate_proj", "up_proj"))
            module.forward = MethodType(_mlp, module)


def part_projections(model: PreTrainedModel) -> None:
    """Undo `join_projections`."""
    for module in model.modules():
        if type(module) in (*ATTENTIONS, *MLPS):
            vars(module).pop("forward", None)
    part_linears(model)


def _attention(
    module: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The family's own attention; `document_positions` says that there is no cache."""
    if kwargs.get("document_positions") is None or not hasattr(module, "qkv"):
        return type(module).forward(
            module,
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **kwargs,
        )
    kwargs.pop("past_key_values", None)
    qkv = module.qkv(hidden_states)
    is_whole = position_embeddings[0].shape[-1] == module.head_dim  # all of a head is rotated
    if kwargs.get("tile_fits") and is_whole and joined_fits_tile(qkv, module.head_dim):
        out = _fused(module, qkv, position_embeddings, kwargs["document_positions"])
    else:
        out = _unfused(module, qkv, position_embeddings, attention_mask, **kwargs)
    return module.o_proj(out.flatten(2)), None


def _fused(
    module: nn.Module, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor], positions: Tensor
) -> Tensor:
    """`(B, S, H, D)`; all three families repeat the angles of the first half of a head."""
    has_norms = hasattr(module, "q_norm")
    return joined_tile_attention(
        qkv,
        *position_embeddings,
        module.q_norm.weight if has_norms else None,
        module.k_norm.weight if has_norms else None,
        positions,
        module.scaling,
        module.q_norm.variance_epsilon if has_norms else 0.0,
        module.config.num_attention_heads,
    )


def _unfused(
    module: nn.Module,
    qkv: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **kwargs: object,
) -> Tensor:
    """As `_fused`, in the family's own steps."""
    query, key, value = (
        part.unflatten(-1, (-1, module.head_dim)) for part in module.qkv.split(qkv)
    )
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    heads = (query.transpose(1, 2), key.transpose(1, 2))
    rotated = apply_rotary_pos_emb(*heads, *position_embeddings)
    out, _ = attend(
        module, *rotated, value.transpose(1, 2), attention_mask, scaling=module.scaling, **kwargs
    )
    return out


def _mlp(module: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(module, "gate_up"):
        return type(module).forward(module, x)
    gate_up = module.gate_up(x)
    if isinstance(module.act_fn, SILUS):
        return module.down_proj(silu_mul(gate_up))
    gate, up = module.gate_up.split(gate_up)
    return module.down_proj(module.act_fn(gate) * up)
