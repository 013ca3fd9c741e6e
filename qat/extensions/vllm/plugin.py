"""Packed checkpoints in vLLM: `vllm serve DIR` opens the output of `qat train` without conversion.

vLLM loads `register` as a plug-in in each of its processes, and calls
`QatQuantization.get_quant_method` for each layer that it builds. A layer holds the checkpoint's own
tensors: indices, codebook and scales of each of its parts. Weights are formed when they are
multiplied, and inputs are rounded there if the student quantizes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.utils import set_weight_attrs

from qat.errors import CheckpointError, QatError
from qat.extensions.vllm.packed import (
    BY_ROW,
    Experts,
    Part,
    Stored,
    check_cut,
    in_one_line,
    lut_embedding,
    lut_experts,
    lut_linear,
    num_processes,
    read_config,
    refused_path,
    rounded_heads,
)
from qat.models.directory import WEIGHTS, check_checksums
from qat.models.hf_quantizer import QUANT_METHOD, read_headers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.models.utils import WeightsMapper

    from qat.quant.spec import KvSpec

SHARDS = {"q": 0, "k": 1, "v": 2}
"""vLLM's names for the parts of a joined query-key-value linear; other joined parts are
numbered."""
TRANSPOSED = ("gpt2",)
"""Families whose float linears vLLM expects transposed; in a packed checkpoint they are not."""
REORDERED = ("bloom", "llama4", "llama4_text", "k2_horizon")
"""Families whose rows vLLM permutes in a way that only works for float weights."""
WITH_EXPERTS = ("olmoe", "qwen2_moe", "qwen3_moe")
"""Families whose experts vLLM finds under the names of a packed checkpoint."""
STACKS = ("gate_up_proj", "down_proj")
"""Names of the stacked matrices of all experts of a layer."""
JOINED = {"gate_up_proj": ["gate_proj", "up_proj"]}
"""Parts that vLLM joins in shared experts, where the model's class does not declare it."""
TABLES = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
"""Names of the embedding table in various families; some of vLLM's models build it without a
name."""


def register() -> None:
    """Register `quant_method: qat` with vLLM, which calls this at least once in each process.

    `vllm serve` then exits with a one-line message if a checkpoint or path cannot be served.
    """
    register_quantization_config(QUANT_METHOD)(QatQuantization)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_refusal


def _print_refusal(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    refusal = error if isinstance(error, QatError) else None
    if refusal is None:
        # vLLM's parsed command line is a local `args` in some frame of the traceback
        parsed = [frame.f_locals.get("args") for frame, _ in walk_tb(trace)]
        sources = [args.model_tag for args in parsed if getattr(args, "model_tag", None)]
        refusal = refused_path(sources[0], error) if sources else None
    if refusal is None:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write(in_one_line(refusal))


class QatQuantization(QuantizationConfig):
    """vLLM's quantization config: which layers of a model are quantized, and how."""

    def __init__(self, modules: dict[str, Stored], kv: KvSpec | None) -> None:
        super().__init__()
        self.modules, self.kv = modules, kv
        self.is_tied = self.is_transposed = False
        self.family = ""

    def get_name(self) -> str:
        """Return the `quant_method` of config.json."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which activations may be computed."""
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the oldest compute capability that Triton supports."""
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no files: everything is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read the `quantization_config` of config.json.

        Raises:
            CheckpointError: see `read_config`.
        """
        return cls(*read_config(config))

    def maybe_update_config(
        self,
        model_name: str,
        hf_config: PreTrainedConfig | None = None,
        revision: str | None = None,
    ) -> None:
        """Check the directory and the model before anything is loaded.

        Raises:
            CheckpointError: a file is truncated or changed, the family is not supported, or the
                number of processes splits a group.
        """
        if Path(model_name).is_dir():
            check_checksums(Path(model_name), weights=True)
            headers = read_headers(sorted(Path(model_name).glob(f"*{WEIGHTS}")))
            check_cut(headers, self.modules, num_processes(sys.argv))
        if hf_config is not None:
            if hf_config.model_type in REORDERED:
                raise CheckpointError(
                    f"{model_name} is a {hf_config.model_type}, whose rows vLLM orders anew, which "
                    "it cannot where they are packed; export the model with 'qat export --to dense'"
                )
            self.family = hf_config.model_type
            for name in self.modules:
                if ".experts." in name:
                    self._check_experts(name)
            self.is_tied = hf_config.get_text_config().tie_word_embeddings
            self.is_transposed = hf_config.model_type in TRANSPOSED

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Rename the modules to the names in vLLM's model."""
        self.modules = hf_to_vllm_mapper.apply_dict(self.modules)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method for the layer `prefix`; None selects vLLM's own.

        Raises:
            CheckpointError: the layer stayed in floating point, and vLLM would read it transposed.
        """
        if isinstance(layer, VocabParallelEmbedding):
            return self._table_method(layer, prefix)
        if isinstance(layer, RoutedExperts):
            self._check_experts(prefix)
            names = [f"{prefix}.{stack}" for stack in STACKS]
            members = [self.modules.get(name, Stored(name, None)) for name in names]
            return QatExpertsMethod(layer.moe_config, members)
        if isinstance(layer, Attention) and self.kv is not None:
            return QatCacheMethod(self, self.kv)
        if not isinstance(layer, LinearBase):
            return None
        # the matrices that vLLM joins to the linear called `prefix`
        parent, dot, name = prefix.rpartition(".")
        joined = self.packed_modules_mapping.get(name) or JOINED.get(name, [name])
        joined = [name] if prefix in self.modules else joined
        names = [f"{parent}{dot}{part}" for part in joined]
        members = [self.modules.get(name, Stored(name, None)) for name in names]
        is_quantized = any(member.spec is not None for member in members)
        if self.is_transposed and not is_quantized:
            raise CheckpointError(
                f"{prefix} stayed in floating point, which vLLM reads transposed in this family; "
                "quantize every linear, or export the model with 'qat export --to dense'"
            )
        if self.kv is not None:  # the layers of the model, complete once the model is built
            context = get_current_vllm_config().compilation_config.static_forward_context
            return QatLinearMethod(members, context)
        return QatLinearMethod(members) if is_quantized else UnquantizedLinearMethod()

    def _check_experts(self, name: str) -> None:
        if self.family not in WITH_EXPERTS:
            raise CheckpointError(
                f"{name} holds experts of a {self.family}, expected one of "
                f"{', '.join(WITH_EXPERTS)}, whose experts vLLM looks for where a packed "
                "checkpoint has them; export the model with 'qat export --to dense'"
            )

    def _table_method(
        self, layer: VocabParallelEmbedding, prefix: str
    ) -> QatTableMethod | QatTiedMethod | None:
        embedding = next((n for n in self.modules if n.rpartition(".")[2] in TABLES), None)
        is_head = isinstance(layer, ParallelLMHead)
        name = prefix if prefix or is_head else embedding
        if name in self.modules:
            return QatTableMethod(self.modules[name])
        return QatTiedMethod() if is_head and self.is_tied and embedding else None


class PackedMethod(QuantizeMethodBase):
    """Common base of linears and tables, for a layer whose parameters `_allocate` has made."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Refuse an incompletely loaded layer."""
        _check_loaded(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply: `(..., I)` to `(..., O)`."""
        weights, formats = _operands(layer)
        ends = None
        if any(part.needs_token_range for part in layer.qat_parts):
            # a scale belongs to the whole token: gather the extremes of its slices from all
            # processes
            ends = tensor_model_parallel_all_gather(torch.stack(x.aminmax(dim=-1), -1))
        return lut_linear(x, weights, formats, bias, ends)


class QatLinearMethod(PackedMethod, LinearMethodBase):
    """A linear whose weight is one or several packed matrices, stacked by rows.

    `context` holds the model's layers by name, if keys and values are rounded: every attention
    layer among them must round its cache.
    """

    def __init__(self, members: list[Stored], context: dict[str, nn.Module] | None = None) -> None:
        self.members = members
        # `or {}` would replace vLLM's dictionary, which is still empty
        self.context = {} if context is None else context

    def create_weights(  # noqa: PLR0917 - the signature is vLLM's
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Allocate parameters for this process's slice of each part.

        Raises:
            CheckpointError: the number of processes splits a group, or splits parts that the
                checkpoint stores as one matrix.
        """
        rank, size = layer.tp_rank, layer.tp_size
        sizes = output_partition_sizes
        if len(self.members) == 1 < len(sizes):
            if size > 1:
                raise CheckpointError(
                    f"{self.members[0].name} joins {len(sizes)} matrices in one, which tensor "
                    f"parallelism over {size} processes would split apart; serve it with one"
                )
            sizes = [sum(sizes)]
        parts = [
            Part.of(member, rows, input_size, columns=input_size_per_partition, rank=rank)
            for member, rows in zip(self.members, sizes, strict=True)
        ]
        rows_of = [partial(part.rows, rank=rank, size=size) for part in parts]
        _allocate(layer, parts, rows_of, params_dtype)
        _name_as_stored(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Refuse an incompletely loaded layer, and attention layers whose cache is not rounded."""
        super().process_weights_after_loading(layer)
        for name, other in self.context.items():
            is_rounded = isinstance(getattr(other, "quant_method", None), QatCacheMethod)
            if isinstance(other, AttentionLayerBase) and not is_rounded:
                raise CheckpointError(
                    f"the checkpoint rounds keys and values, but {name} of vLLM is a "
                    f"{type(other).__name__} that is told of no quantization, expected one that "
                    "is; run it with 'qat generate', or convert the model without --kv"
                )


class QatCacheMethod(BaseKVCacheMethod):
    """Attention to keys and values that were rounded to few bits.

    The engine's cache keeps them in its own dtype, which holds the rounded values exactly.
    """

    def __init__(self, config: QatQuantization, kv: KvSpec) -> None:
        super().__init__(config)
        self.kv = kv

    def create_weights(self, layer: nn.Module) -> None:
        """Wrap the layer's forward, so that it receives and caches rounded keys and values.

        Raises:
            CheckpointError: --kv-cache-dtype would round them again.
        """
        if layer.kv_cache_torch_dtype != layer.dtype:
            raise CheckpointError(
                f"--kv-cache-dtype {layer.kv_cache_dtype} would round keys and values that the "
                f"checkpoint keeps in {self.kv.bits} bits, expected auto; leave it out, or convert "
                "the model without --kv"
            )
        layer.forward = partial(_attend, layer.forward, layer, self.kv.bits)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing: no scales of keys or values are stored."""


def _attend(  # noqa: PLR0917
    forward: Callable[..., Tensor],
    layer: nn.Module,
    bits: int,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *rest: Any,
    **more: Any,
) -> Tensor:
    """Round keys and values, if given, and call the layer's `forward`.

    They are None where another layer caches them.
    """
    if key is not None:
        key = rounded_heads(key.reshape(-1, layer.num_kv_heads, layer.head_size), bits)
    if value is not None:
        value = rounded_heads(value.reshape(-1, layer.num_kv_heads, layer.head_size_v), bits)
    return forward(query, key, value, *rest, **more)


class QatExpertsMethod(FusedMoEMethodBase):
    """The experts of a layer as two stacks: gates and ups `(E * 2F, D)`, and downs `(E * D, F)`.

    vLLM routes tokens to experts as for floating-point weights.
    """

    def __init__(self, moe: FusedMoEConfig, members: list[Stored]) -> None:
        super().__init__(moe)
        self.members = members

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Return None: no fused kernel of vLLM computes with these weights."""

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any
    ) -> tuple[int, int]:
        """Return the sizes unchanged."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(  # noqa: PLR0917 - the signature is vLLM's
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Allocate parameters for the experts, or the slice of each, that this process holds.

        Raises:
            CheckpointError: the number of processes splits a group.
        """
        moe, width = self.moe, intermediate_size_per_partition
        held = range(num_experts)
        if layer.expert_map is not None:
            # experts of other processes are -1
            held = layer.expert_map.argsort()[-num_experts:].tolist()
        whole = Experts(moe.num_experts, held)
        piece = whole._replace(rank=moe.tp_rank, size=moe.tp_size)
        rows = [num_experts * 2 * width, num_experts * hidden_size]
        parts = [
            Part.of(self.members[0], rows[0], hidden_size, columns=hidden_size, rank=0),
            Part.of(
                self.members[1], rows[1], moe.intermediate_size, columns=width, rank=moe.tp_rank
            ),
        ]
        names = [part.stored.name for part in parts]
        rows_of = [
            partial(piece.rows, name=names[0], matrices=2, width=moe.intermediate_size),
            partial(whole.rows, name=names[1], matrices=1, width=hidden_size),
        ]
        _allocate(layer, parts, rows_of, params_dtype)
        # vLLM's own loader expects three-dimensional stacks or one tensor per expert
        layer.load_weights = partial(_load_stacks, layer)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Refuse incompletely loaded experts."""
        _check_loaded(layer)

    def apply(  # noqa: PLR0917 - the signature is vLLM's
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        **_: Any,
    ) -> Tensor:
        """Sum each token's experts `topk_ids` `(T, K)`, weighted by `topk_weights`.

        `x` is `(T, D)`, and so is the result. vLLM runs and adds shared experts, if there are any.
        """
        experts = topk_ids.long()
        if layer.expert_map is not None:
            experts = layer.expert_map[experts].long()
            topk_weights = topk_weights * (experts >= 0)
            experts = experts.clamp(min=0)
        E, (T, K) = layer.local_num_experts, experts.shape
        chosen, rows = experts.flatten(), x.repeat_interleave(K, 0)
        up = lut_experts(rows, chosen, *_operands(layer, 0), E)
        hidden = up.new_empty(T * K, up.shape[1] // 2)
        apply_moe_activation(layer.activation, hidden, up)
        y = lut_experts(hidden, chosen, *_operands(layer, 1), E).view(T, K, -1)
        return (y * topk_weights[:, :, None]).sum(1).to(x.dtype)


class QatTableMethod(PackedMethod):
    """An embedding or a head with a packed table."""

    def __init__(self, member: Stored) -> None:
        self.member = member

    def create_weights(  # noqa: PLR0917 - the signature is vLLM's
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Allocate parameters for the vocabulary rows that this process holds."""
        (rows,) = output_partition_sizes
        part = Part.of(self.member, rows, input_size, columns=input_size, rank=0)
        held = layer.shard_indices
        words = slice(held.org_vocab_start_index, held.org_vocab_end_index)
        _allocate(layer, [part], [lambda total: words], params_dtype)
        _name_as_stored(layer)
        layer.qat_dtype = params_dtype

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """Return the embeddings of the ids."""
        weights, formats = _operands(layer)
        (part,) = layer.qat_parts
        return lut_embedding(input_, weights, formats, part.in_features, layer.qat_dtype)


class QatTiedMethod(PackedMethod):
    """A head that shares the packed table of the embedding."""

    def create_weights(self, layer: nn.Module, *_: Any, **__: Any) -> None:
        """Create nothing: the weights are those of the embedding."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check nothing: the embedding is checked."""

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Register the embedding's parameters in the head."""
        for name, parameter in embed_tokens.named_parameters(recurse=False):
            layer.register_parameter(name, parameter)
        layer.qat_parts = embed_tokens.qat_parts
        return layer


def _allocate(
    layer: nn.Module,
    parts: list[Part],
    rows_of: list[Callable[[int], slice | Tensor]],
    dtype: torch.dtype,
) -> None:
    """Register parameters for each part's tensors, and mark them as not loaded yet."""
    layer.qat_parts, layer.qat_rows_of, layer.qat_missing = parts, rows_of, set()
    for index, part in enumerate(parts):
        for key, tensor in part.tensors(dtype).items():
            name = _name(key, index, len(parts))
            layer.register_parameter(name, _parameter(tensor.shape, tensor.dtype))
            layer.qat_missing.add(name)


def _name_as_stored(layer: nn.Module) -> None:
    """Make the parameters of `layer` available to vLLM under the checkpoint's names.

    vLLM loads all parts of a joined linear under one name, with the part's id as an argument. That
    name is an empty parameter; the parts have parameters of their own. Some models permute rows
    before loading and look for `output_dim` to find the dimension.
    """
    for key in dict.fromkeys(key for part in layer.qat_parts for key in part.stored.format.names()):
        owner, _, own = key.rpartition(".")
        if owner:
            layer.add_module(owner, nn.Module())
        holder = layer.get_submodule(owner)
        if not hasattr(holder, own):
            holder.register_parameter(own, _parameter((0,), torch.float32))
        attributes = {"output_dim": 0} if key in BY_ROW else {}
        attributes["weight_loader"] = partial(_load, layer, key)
        set_weight_attrs(getattr(holder, own), attributes)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _name(key: str, index: int, num_parts: int) -> str:
    own = key.replace(".", "_")  # parameter names cannot contain a dot
    return own if num_parts == 1 else f"{own}_{index}"


def _load(  # noqa: PLR0917 - the last three are vLLM's
    layer: nn.Module,
    key: str,
    _: nn.Parameter,
    loaded: Tensor,
    shard: str | int | None = None,
) -> None:
    """Load one tensor of the checkpoint; `shard` names the joined part."""
    _put(layer, key, loaded, 0 if shard is None else SHARDS.get(shard, shard))


def _put(layer: nn.Module, key: str, loaded: Tensor, index: int) -> None:
    part = layer.qat_parts[index]
    name = _name(key, index, len(layer.qat_parts))
    held = part.cut(key, loaded, layer.qat_rows_of[index])
    getattr(layer, name).data.copy_(held)
    layer.qat_missing.discard(name)


def _load_stacks(layer: RoutedExperts, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Load the tensors of a layer's experts and yield the names of the parameters they filled."""
    for name, loaded in weights:
        stack, _, key = name.partition(".")
        index = STACKS.index(stack)
        _put(layer, key, loaded, index)
        yield _name(key, index, len(STACKS))


def _check_loaded(layer: nn.Module) -> None:
    if layer.qat_missing:
        raise CheckpointError(
            f"the checkpoint misses {', '.join(sorted(layer.qat_missing))} of "
            f"{layer.qat_parts[0].stored.name}; expected exactly the tensors that its config.json "
            "describes: copy it anew or convert the model anew"
        )


def _operands(layer: nn.Module, only: int | None = None) -> tuple[list[Tensor], list[int]]:
    """Return the tensors and formats of all parts, or of one."""
    weights, formats = [], []
    for index, part in enumerate(layer.qat_parts):
        if only not in (None, index):
            continue
        format = part.stored.format
        names = [_name(key, index, len(layer.qat_parts)) for key in format.names()]
        weights += [getattr(layer, name) for name in names]
        formats += format
    return weights, formats
