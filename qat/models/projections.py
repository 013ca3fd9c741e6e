"""Projections that read the same input run as one matmul, in the families known to allow it.

Queries, keys and values are one product then, gates and ups another. The modules keep their names
and parameters; only their forward changes, and only while nothing is generated with a cache.
"""

from types import MethodType

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, apply_rotary_pos_emb
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

from qat.models.attention import attend
from qat.nn.step import join_linears, part_linears

ATTENTIONS = (LlamaAttention, Qwen2Attention, Qwen3Attention)
MLPS = (LlamaMLP, Qwen2MLP, Qwen3MLP)


def join_projections(model: PreTrainedModel) -> None:
    """Join what reads the same input in `model`, as far as it is quantized."""
    for module in [*model.modules()]:
        if type(module) in ATTENTIONS:
            join_linears(module, "qkv", ("q_proj", "k_proj", "v_proj"))
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
    query, key, value = (
        projected.unflatten(-1, (-1, module.head_dim)) for projected in module.qkv(hidden_states)
    )
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    heads = (query.transpose(1, 2), key.transpose(1, 2))
    rotated = apply_rotary_pos_emb(*heads, *position_embeddings)
    out, _ = attend(
        module, *rotated, value.transpose(1, 2), attention_mask, scaling=module.scaling, **kwargs
    )
    return module.o_proj(out.flatten(2)), None


def _mlp(module: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(module, "gate_up"):
        return type(module).forward(module, x)
    gate, up = module.gate_up(x)
    return module.down_proj(module.act_fn(gate) * up)
