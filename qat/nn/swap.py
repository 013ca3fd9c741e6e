"""Finds a model's linear layers and puts others in their place.

Shapes: O out_features, I in_features, C codebook entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from qat.backend.device import on
from qat.errors import CheckpointError, ConfigError
from qat.nn.hosted import HostedLutLinear
from qat.nn.lut_embedding import FrozenLutEmbedding, FrozenLutHead, FrozenLutTable, TiedLutHead
from qat.nn.quant_linear import FrozenLutLinear, LutLinear, QuantLinear
from qat.nn.sharded import ShardedLutLinear
from qat.nn.sites import reads_weight
from qat.nn.step import quant_linears
from qat.quant.spec import LutSpec, QuantPlan, by_group
from qat.quant.weight import QuantizedWeight, dequantize
from qat.ranks import ALONE, Ranks

if TYPE_CHECKING:  # hf_quantizer needs this file while transformers is still being imported
    from transformers import PreTrainedModel

CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
"""What transformers calls the cache that models and layers take and models give back.

`past_key_values` up to 5.23.
"""


def layer_config(config: Any, layer: int) -> Any:
    """The settings of one decoder layer, where a family gives its layers settings of their own."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def body_of(model: PreTrainedModel) -> nn.Module:
    """What turns token ids into the hidden states before the head, of text and images as well."""
    if model.base_model is not model:
        return model.base_model
    # a few families call the whole model their base
    return next(child for child in model.children() if hasattr(child, "base_model_prefix"))


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks of the model's text part.

    Raises:
        CheckpointError: the model has no list of as many blocks as its configuration names.
    """
    config = model.config.get_text_config()
    # a block of LongCat has two attentions, each of which it calls a hidden layer
    num_layers = getattr(config, "num_layers", config.num_hidden_layers)
    decoder = model.get_decoder()  # a vision tower may have as many blocks
    if decoder is model or not hasattr(decoder, "base_model_prefix"):  # found by a wrong name
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
    """Names of the linear layers in the decoder blocks: never embeddings nor the head.

    Nor the gates of sparse attention, which are few and stay in floating point.

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
    """Put `module` where `name` is."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def ascending(quantized: QuantizedWeight) -> QuantizedWeight:
    """The same weight, bit for bit, with its levels in ascending order; codewords as they lie."""
    if quantized.codebook.dim() > 1:
        return quantized
    codebook, order = quantized.codebook.sort(stable=True)
    rank = order.argsort().to(torch.uint8)
    return quantized._replace(codebook=codebook, indices=rank[quantized.indices.int()])


def to_frozen(model: nn.Module) -> None:
    """Replace every `LutLinear` by the `FrozenLutLinear` of the same weight, bit for bit."""
    for name, module in quant_linears(model).items():
        if isinstance(module, LutLinear):
            frozen = FrozenLutLinear(ascending(module.quantized()), module.bias, module.spec)
            frozen.set_lora(module.lora())
            frozen.activation = module.activation
            replace_module(model, name, frozen.train(module.training))


def to_latent(
    model: nn.Module,
    names: list[str],
    ranks: Ranks = ALONE,
    *,
    dtype: torch.dtype = torch.float32,
    is_spread: bool = False,
    is_hosted: bool = False,
) -> None:
    """Replace the `FrozenLutLinear` called `names` by `LutLinear` without changing the function.

    Each latent weight starts at the quantized value itself: in the middle of its cell, where noise
    flips no index (starting from the float weight was measured to be worse, speedrun/LOG.md).
    It is kept in `dtype`, and with `is_hosted` on the host (`HostedLutLinear`).
    Each of several `ranks` keeps some of its rows (`ShardedLutLinear`); they exchange nothing here.
    With `is_spread` so does each device, where the process has several.

    Raises:
        CheckpointError: two levels of a codebook are too close to choose between.
    """
    rooms: list[Tensor] = []
    if is_hosted:
        shapes = [torch.Size(weight_shape(model.get_submodule(name))) for name in names]
        device = cast(QuantLinear, model.get_submodule(names[0])).codebook.device
        rooms = on(device).pinned_zeros(shapes, dtype)
    for name in names:
        frozen = cast(QuantLinear, model.get_submodule(name))
        quantized = ascending(frozen.quantized())
        made_of = dequantize(quantized), quantized, frozen.bias, frozen.spec
        latent = LutLinear(*made_of)
        latent.set_lora(frozen.lora())
        weights = latent.quantized_weight(), frozen.quantized_weight()
        if not on(latent.codebook.device).equal(*weights):
            raise CheckpointError(
                f"{name}: two levels of its codebook are too close for a latent weight to choose "
                "between them; convert it anew or train it without weights"
            )
        if is_hosted:
            latent = HostedLutLinear(*made_of, room=rooms.pop(0))
        elif ranks.size > 1:
            latent = ShardedLutLinear(*made_of, ranks=ranks)
        # one by one: in float32 all of them have room in no device that they fill in bfloat16
        latent.weight.data = latent.weight.data.to(dtype)
        latent.set_lora(frozen.lora())
        latent.activation = frozen.activation
        if is_spread:
            on(latent.codebook.device).spread([latent.weight])
        replace_module(model, name, latent.train(frozen.training))


# Embeddings and heads, `(V, D)`. A tied head has no table of its own: it computes with the
# embedding's, whatever form that has.

FEW_BITS = 4


def table_names(model: PreTrainedModel) -> list[str]:
    """Names of the tables that can be quantized: the embedding, and the head if it is not tied."""
    head = model.get_output_embeddings()
    own = () if head is None or is_tied(model) else (head,)
    return [_name_of(model, module) for module in (model.get_input_embeddings(), *own)]


def with_tables(
    plan: QuantPlan, model: PreTrainedModel, bits: int | Mapping[str, LutSpec]
) -> QuantPlan:
    """`plan` with rules in front that give the model's tables `bits` each, or formats by name.

    What the head reads is quantized as all that the plan quantizes reads, if that is one way.
    """
    tables = table_names(model)
    if isinstance(bits, int):
        specs = {n: table_spec(bits, weight_shape(model.get_submodule(n))[1]) for n in tables}
    else:
        specs = dict(bits)
    rules = plan.rules_for(specs, tables)
    return plan.model_copy(update={"rules": (*rules, *plan.rules)})


def table_spec(bits: int, width: int) -> LutSpec:
    """The format of a table of that width: half a bit a weight of scales around a learned codebook.

    Up to 4 bits in groups of up to 16 with 8-bit scales; above, where a scale of 3 mantissa bits
    would be the larger error, in groups of up to 32 with 16-bit ones.
    """
    if bits <= FEW_BITS:
        return by_group(bits, _divisor(width, 16))
    return LutSpec(bits=bits, group_size=_divisor(width, 32))


def _divisor(width: int, most: int) -> int:
    return next(size for size in range(min(most, width), 0, -1) if width % size == 0)


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """`(O, I)` of a linear, `(V, D)` of an embedding or a head, quantized or not."""
    if isinstance(module, QuantLinear | FrozenLutTable):
        return module.out_features, module.in_features
    O, I = cast(Tensor, module.weight).shape
    return O, I


def put_quantized(
    model: PreTrainedModel, name: str, quantized: QuantizedWeight, spec: LutSpec
) -> None:
    """Replace the linear, embedding or head called `name` by a frozen one of that weight."""
    if name in table_names(model):
        put_table(model, name, quantized, spec)
        return
    old: Any = model.get_submodule(name)
    bias = None if old.bias is None else old.bias.detach()
    replace_module(model, name, FrozenLutLinear(quantized, bias, spec))


def put_table(model: PreTrainedModel, name: str, quantized: QuantizedWeight, spec: LutSpec) -> None:
    """Replace the embedding or head called `name` by a quantized one; a tied head follows.

    Raises:
        CheckpointError: the embedding does more than look rows up and scale them.
    """
    old: Any = model.get_submodule(name)
    dtype = old.dtype if isinstance(old, FrozenLutTable) else old.weight.dtype
    if old is not model.get_input_embeddings():
        table: FrozenLutTable = FrozenLutHead(quantized, spec, dtype, old.bias)
    else:
        table = embedding = FrozenLutEmbedding(quantized, spec, dtype, _embed_scale(name, old))
        if is_tied(model):
            _tie_head(model, embedding)
    replace_module(model, name, table.train(old.training))


def embedding_dtype(model: PreTrainedModel) -> torch.dtype:
    """What the embedding gives: the dtype that the model computes in without autocast."""
    embedding: Any = model.get_input_embeddings()
    return embedding.dtype if isinstance(embedding, FrozenLutTable) else embedding.weight.dtype


def module_device(module: Any) -> torch.device:
    """Where an embedding or head lies, quantized or not."""
    is_quantized = isinstance(module, FrozenLutTable | TiedLutHead)
    return module.device if is_quantized else module.weight.device


def _tie_head(model: PreTrainedModel, table: FrozenLutEmbedding) -> None:
    """Let the head compute with `table`, and transformers forget that it tied two weights."""
    head = model.get_output_embeddings()
    key = _forget_tie(model)
    replaced = TiedLutHead(table, head.bias).train(head.training)
    replace_module(model, key.removesuffix(".weight"), replaced)


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the head computes with the embedding's table (weights may not be there yet)."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or isinstance(head, TiedLutHead):
        return head is not None
    pair = {f"{_name_of(model, module)}.weight" for module in (embedding, head)}
    return any({target, source} == pair for target, source in model.all_tied_weights_keys.items())


def tie_head(model: PreTrainedModel, table: Tensor) -> None:
    """Let the embedding and the head, which have a float table each, compute with `table`.

    The reverse of `untie_head`.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding.weight = head.weight = nn.Parameter(table, requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = True
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def untie_head(model: PreTrainedModel) -> None:
    """Give a head that computes with the embedding's float table a copy of its own."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    _forget_tie(model)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _forget_tie(model: PreTrainedModel) -> str:
    """Let transformers forget that the head's weight, whose name it gives, is tied to another."""
    key = f"{_name_of(model, model.get_output_embeddings())}.weight"
    for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):
        ties = getattr(model, attribute) or {}
        others = {target: source for target, source in ties.items() if key not in (target, source)}
        setattr(model, attribute, others)
    return key


def holds_quantized_tables(model: PreTrainedModel) -> bool:
    """Return whether tables can be quantized without breaking the model's own code.

    The embedding must do nothing but look rows up and scale them, and no module may read the weight
    of a table by itself, as Mamba 2 does for its dtype.
    """
    embedding = model.get_input_embeddings()
    tables = {embedding, model.get_output_embeddings()}
    for module in model.modules():
        for name, child in module.named_children():
            if child in tables and reads_weight(type(module), name):
                return False
    is_plain = type(embedding) is nn.Embedding or isinstance(embedding, FrozenLutEmbedding)
    return is_plain or getattr(embedding, "scalar_embed_scale", None) is not None


def _embed_scale(name: str, embedding: nn.Module) -> float | None:
    """What the embedding multiplies its rows by."""
    if isinstance(embedding, FrozenLutEmbedding):
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
    """Whether the module called `name` multiplies an input: not an embedding without the head."""
    is_embedding = model.get_submodule(name) is model.get_input_embeddings()
    return not is_embedding or is_tied(model)


def add_adapters(model: nn.Module, names: list[str], rank: int, seed: int) -> None:
    """Give each quantized linear of `names` an adapter that does not change the function yet.

    A linear that has one of that rank keeps it.

    Raises:
        ConfigError: `rank` is above a layer's smaller side, or an adapter has another rank; then no
            layer was changed.
    """
    linears = {name: cast(QuantLinear, model.get_submodule(name)) for name in names}
    for name, linear in linears.items():
        most = min(linear.out_features, linear.in_features)
        if rank > most:
            raise ConfigError(
                f"lora_rank={rank} is more than {name} has, whose sides are "
                f"{linear.out_features} and {linear.in_features}; use --lora-rank {most} or less, "
                "or leave it out with --mlp-only or --attention-only"
            )
        if linear.lora_rank not in (0, rank):
            raise ConfigError(
                f"lora_rank={rank}, but the adapter of {name} has rank {linear.lora_rank}, "
                f"expected the same; go on with --lora-rank {linear.lora_rank}, or start from a "
                "student without adapters"
            )
    generator = torch.Generator().manual_seed(seed)
    for linear in linears.values():
        if not linear.lora_rank:
            linear.add_lora(rank, generator)
