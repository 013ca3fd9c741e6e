"""Finds a model's linear layers and tables, and replaces them.

Shapes: O out_features, I in_features, C codebook entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from qat.errors import CheckpointError
from qat.nn.lut_embedding import (
    FrozenLutEmbedding,
    FrozenLutHead,
    Lookup,
    QuantEmbedding,
    QuantTable,
    TiedLutHead,
)
from qat.nn.quant_linear import FrozenLutLinear, QuantLinear
from qat.nn.quant_weight import QuantWeight
from qat.nn.sites import reads_weight
from qat.quant.spec import LutSpec, QuantPlan, by_group
from qat.quant.weight import QuantizedWeight

if TYPE_CHECKING:  # hf_quantizer needs this file while transformers is still being imported
    from transformers import PreTrainedModel

CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
"""Name in transformers of the cache that models and layers take and models return.

It is `past_key_values` up to 5.23.
"""


def layer_config(config: Any, layer: int) -> Any:
    """Return the settings of one decoder layer, for families in which they differ by layer."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def head_dim(config: Any) -> int:
    """Return the width of an attention head; older configurations do not name it."""
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def body_of(model: PreTrainedModel) -> nn.Module:
    """Return the part that maps inputs to the hidden states before the head, images included."""
    if model.base_model is not model:
        return model.base_model
    # in a few families the base model is the whole model
    return next(child for child in model.children() if hasattr(child, "base_model_prefix"))


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder blocks of the model's text part.

    Raises:
        CheckpointError: the model has no list of as many blocks as its configuration names.
    """
    config = model.config.get_text_config()
    # a block of LongCat has two attentions, each counted as a hidden layer
    num_layers = getattr(config, "num_layers", config.num_hidden_layers)
    decoder = model.get_decoder()  # a vision tower may have the same number of blocks
    if decoder is model or not hasattr(decoder, "base_model_prefix"):  # not the decoder
        decoder = body_of(model)
    for module in decoder.modules():
        part = getattr(getattr(module, "config", None), "base_config_key", "")
        if part.startswith(("vision", "audio")):
            continue
        lists = [
            (name, child)
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == num_layers
        ]
        if len(lists) > 1:
            names = ", ".join(name for name, _ in lists)
            raise CheckpointError(
                f"{type(model).__name__} keeps the parts of its {num_layers} decoder blocks apart "
                f"({names}), expected one list of blocks; choose another model"
            )
        if lists:
            return lists[0][1]
    raise CheckpointError(
        f"{type(model).__name__} has no list of {num_layers} decoder blocks; expected a causal "
        "language model made of such blocks; choose another model"
    )


def linear_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the linears in the decoder blocks, without embeddings and head.

    The gates of sparse attention are excluded too: they are few and stay in floating point.

    Raises:
        CheckpointError: the blocks hold none.
    """
    inside = {id(module) for module in decoder_layers(model).modules()}
    for module in model.modules():
        if getattr(module, "stays_float", False):
            inside -= {id(part) for part in module.modules()}
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantLinear) and id(module) in inside
    ]
    if not names:
        raise CheckpointError(
            f"the decoder blocks of {type(model).__name__} hold no linear of 16 inputs or more, so "
            "there is nothing to quantize; choose another model"
        )
    return names


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule called `name` by `module`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def ascending(quantized: QuantizedWeight) -> QuantizedWeight:
    """Return the same weight, bit for bit, with its levels sorted; codewords keep their order."""
    if quantized.codebook.dim() > 1:
        return quantized
    codebook, order = quantized.codebook.sort(stable=True)
    rank = order.argsort().to(torch.uint8)
    return quantized._replace(codebook=codebook, indices=rank[quantized.indices.int()])


# Embeddings and heads, `(V, D)`. A tied head has no table of its own: it uses the embedding's, in
# whatever form that is.

FEW_BITS = 4  # most bits of a table whose scales have 8 bits


def table_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the tables that can be quantized: the embedding, and an untied head."""
    head = model.get_output_embeddings()
    own = () if head is None or is_tied(model) else (head,)
    return [_name_of(model, module) for module in (model.get_input_embeddings(), *own)]


def with_tables(
    plan: QuantPlan, model: PreTrainedModel, bits: int | Mapping[str, LutSpec]
) -> QuantPlan:
    """Return `plan` preceded by rules that give tables `bits` each, or formats by name.

    The input of the head is quantized like the inputs of the plan's linears, if those all agree.
    """
    tables = table_names(model)
    if isinstance(bits, int):
        specs = {n: table_spec(bits, weight_shape(model.get_submodule(n))[1]) for n in tables}
    else:
        specs = dict(bits)
    rules = plan.rules_for(specs, tables)
    return plan.model_copy(update={"rules": (*rules, *plan.rules)})


def table_spec(bits: int, width: int) -> LutSpec:
    """Return the format of a table of that width: learned levels, 0.5 bits of scales per weight.

    Up to 4 bits the groups have up to 16 weights with 8-bit scales. Above, the 3 mantissa bits of
    such a scale would be the larger error, so groups have up to 32 weights with 16-bit scales.
    """
    if bits <= FEW_BITS:
        return by_group(bits, _divisor(width, 16))
    return LutSpec(bits=bits, group_size=_divisor(width, 32))


def _divisor(width: int, most: int) -> int:
    return next(size for size in range(min(most, width), 0, -1) if width % size == 0)


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """Return `(O, I)` of a linear, `(V, D)` of an embedding or a head, quantized or not."""
    if isinstance(module, QuantWeight):
        return module.out_features, module.in_features
    O, I = cast(Tensor, module.weight).shape
    return O, I


def put_quantized(
    model: PreTrainedModel, name: str, quantized: QuantizedWeight, spec: LutSpec
) -> None:
    """Replace the linear, embedding or head called `name` by a frozen one with that weight."""
    if name in table_names(model):
        put_table(model, name, quantized, spec)
        return
    old: Any = model.get_submodule(name)
    bias = None if old.bias is None else old.bias.detach()
    replace_module(model, name, FrozenLutLinear(quantized, bias, spec))


def put_table(model: PreTrainedModel, name: str, quantized: QuantizedWeight, spec: LutSpec) -> None:
    """Replace the embedding or head called `name` by a quantized one; a tied head follows.

    Raises:
        CheckpointError: the embedding does more than look up rows and scale them.
    """
    old: Any = model.get_submodule(name)
    dtype = old.dtype if isinstance(old, QuantTable) else old.weight.dtype
    if old is not model.get_input_embeddings():
        table: QuantTable = FrozenLutHead(quantized, spec, dtype, old.bias)
    else:
        lookup = Lookup(_embed_scale(name, old), cast(Any, old).padding_idx)
        table = embedding = FrozenLutEmbedding(quantized, spec, dtype, lookup)
        if is_tied(model):
            _tie_head(model, embedding)
    replace_module(model, name, table.train(old.training))


def embedding_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the embedding's result, in which the model computes without autocast."""
    embedding: Any = model.get_input_embeddings()
    return embedding.dtype if isinstance(embedding, QuantTable) else embedding.weight.dtype


def module_device(module: Any) -> torch.device:
    """Return the device of an embedding or head, quantized or not."""
    is_quantized = isinstance(module, QuantTable | TiedLutHead)
    return module.device if is_quantized else module.weight.device


def _tie_head(model: PreTrainedModel, table: QuantEmbedding) -> None:
    head = model.get_output_embeddings()
    key = _forget_tie(model)
    replaced = TiedLutHead(table, head.bias).train(head.training)
    replace_module(model, key.removesuffix(".weight"), replaced)


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether the head uses the embedding's table; works before weights are loaded."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or isinstance(head, TiedLutHead):
        return head is not None
    pair = {f"{_name_of(model, module)}.weight" for module in (embedding, head)}
    return any({target, source} == pair for target, source in model.all_tied_weights_keys.items())


def tie_head(model: PreTrainedModel, table: Tensor) -> None:
    """Make the embedding and the head, which have a float table each, share `table`.

    The reverse of `untie_head`.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding.weight = head.weight = nn.Parameter(table, requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = True
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def settle_tie(model: PreTrainedModel) -> None:
    """Untie a head whose table differs from the embedding's, even if the configuration ties them.

    transformers keeps both tables of a checkpoint that holds two, and leaves `tie_word_embeddings`
    as it is; where weights stay in their files it does not compare them.
    """
    configs = {id(c): c for c in (model.config, model.config.get_text_config())}.values()
    tying = [config for config in configs if getattr(config, "tie_word_embeddings", False)]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    first, second = (getattr(module, "weight", None) for module in (embedding, head))
    if not tying or first is None or second is None or first is second:
        return
    if first.is_meta or second.is_meta:
        return
    if torch.equal(first, second.to(first.device)):
        if is_tied(model):
            head.weight = first
        return
    for config in tying:
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def untie_head(model: PreTrainedModel) -> None:
    """Give a head that shares the embedding's float table its own copy."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    _forget_tie(model)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _forget_tie(model: PreTrainedModel) -> str:
    """Remove the tie of the head's weight from transformers' records; return its name."""
    key = f"{_name_of(model, model.get_output_embeddings())}.weight"
    for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):
        ties = getattr(model, attribute) or {}
        others = {target: source for target, source in ties.items() if key not in (target, source)}
        setattr(model, attribute, others)
    return key


def tables_read(model: PreTrainedModel) -> set[nn.Module]:
    """Return the tables whose weight the model's own code reads, as Mamba 2 does for its dtype."""
    tables = {model.get_input_embeddings(), model.get_output_embeddings()}
    return {
        child
        for module in model.modules()
        for name, child in module.named_children()
        if child in tables and reads_weight(type(module), name)
    }


def holds_quantized_tables(model: PreTrainedModel) -> bool:
    """Return whether tables can be quantized without breaking the model's own code.

    The embedding must do nothing but look up rows and scale them, and no table may be read.
    """
    embedding = model.get_input_embeddings()
    is_plain = type(embedding) is nn.Embedding or isinstance(embedding, QuantEmbedding)
    is_scaled = getattr(embedding, "scalar_embed_scale", None) is not None
    return (is_plain or is_scaled) and not tables_read(model)


def _embed_scale(name: str, embedding: nn.Module) -> float | None:
    """Return the factor by which the embedding multiplies its rows; None without one."""
    if isinstance(embedding, QuantEmbedding):
        return embedding.embed_scale
    scale = getattr(embedding, "scalar_embed_scale", None)
    if type(embedding) is nn.Embedding or scale is not None:
        return scale
    raise CheckpointError(
        f"{name} is a {type(embedding).__name__}, expected a plain or scaled embedding; leave the "
        "tables of this model in floating point"
    )


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, own in model.named_modules() if own is module)


def reads_input(model: PreTrainedModel, name: str) -> bool:
    """Return whether the module called `name` multiplies an input: all but an untied embedding."""
    is_embedding = model.get_submodule(name) is model.get_input_embeddings()
    return not is_embedding or is_tied(model)
