"""Layers in training: joined projections, compiled and recomputed regions.

The decoder is divided into regions: each layer is compiled, recomputed in backward, or both. All
equal layers share one compiled graph, in which projections of the same input are one matmul. A
recomputed layer keeps only its input, and backward processes it in slices of the batch, so that the
layer's inner memory does not grow with the batch. If all formed weights would not fit, each layer's
are formed before it runs (`qat.nn.by_layer.form_by_layer`).
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, apply_rotary_pos_emb
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

from qat.backend.device import on
from qat.kernels.attention import MAX_TILE, fits_tile, has_room
from qat.kernels.glu import silu_mul
from qat.kernels.joined_attention import joined_fits_tile, joined_tile_attention
from qat.models.attention import is_all_sparse, kv_spec
from qat.models.document_attention import attend, use_packed_attention
from qat.models.language_model import LanguageModel
from qat.nn.by_layer import GatherPrefetch, form_by_layer
from qat.nn.step import (
    form_moved_weights,
    gathering,
    join_linears,
    part_linears,
)
from qat.nn.swap import CACHE, decoder_layers, head_dim, layer_config

logger = logging.getLogger(__name__)


# Projections that read the same input run as one matmul, in the families known to allow it.
#
# Queries, keys and values are one product, gate and up another, and the following operations use
# the joined result, so that its gradient is joined too. The modules keep their names and
# parameters; only their forward changes, and only for calls without a cache.


ATTENTIONS = (LlamaAttention, Qwen2Attention, Qwen3Attention)
"""Attention modules whose projections can be joined."""
MLPS = (LlamaMLP, Qwen2MLP, Qwen3MLP)
"""MLP modules whose projections can be joined."""
QKV = ("q_proj", "k_proj", "v_proj")
SILUS = (nn.SiLU, type(ACT2FN["silu"]))


def join_projections(model: PreTrainedModel) -> None:
    """Join quantized linears of `model` that read the same input."""
    for module in [*model.modules()]:
        if getattr(module, "reads_qkv", False):
            join_linears(module, "qkv", QKV)
        elif type(module) in ATTENTIONS:
            join_linears(module, "qkv", QKV)
            module.forward = MethodType(_attention, module)
        elif type(module) in MLPS:
            join_linears(module, "gate_up", ("gate_proj", "up_proj"))
            module.forward = MethodType(_mlp, module)


def part_projections(model: PreTrainedModel) -> None:
    """Separate the projections of `model` again."""
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
    """Run the family's own attention, joined if `document_positions` rules out a cache.

    Separate heads are joined only where blocks take them, which saves more than the copy costs.
    """
    positions, width = kwargs.get("document_positions"), module.head_dim
    is_whole = position_embeddings[0].shape[-1] == width  # the whole head is rotated
    fits = kwargs.get("tile_fits") and is_whole and kv_spec(module.config) is None
    is_joined, is_long = hasattr(module, "qkv"), hidden_states.shape[1] > MAX_TILE
    joins = is_joined or (fits and is_long and joined_fits_tile(hidden_states, width))
    if positions is None or not joins:
        return type(module).forward(
            module,
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **kwargs,
        )
    kwargs.pop(CACHE, None)
    if is_joined:
        qkv = module.qkv(hidden_states)
    else:
        qkv = torch.cat([getattr(module, name)(hidden_states) for name in QKV], dim=-1)
    if fits and joined_fits_tile(qkv, width):
        out = _fused(module, qkv, position_embeddings, positions)
    else:
        out = _unfused(module, qkv, position_embeddings, attention_mask, **kwargs)
    return module.o_proj(out.flatten(2)), None


def attention_kernel(
    model: LanguageModel, length: int, dtype: torch.dtype, *, is_compiled: bool
) -> str:
    """Return how packed rows of `length` attend in `dtype`.

    `nsa` if every layer is sparse; else `tile` or `blocks`, our kernels, or `sdpa`.
    """
    config = model.model.config
    if is_all_sparse(config):
        return "nsa"
    width = head_dim(layer_config(model.config, 0))
    heads = torch.empty(1, 1, length, width, dtype=dtype, device=model.device)
    if not (use_packed_attention(model.model) and has_room(length, width, model.device)):
        return "sdpa"
    if fits_tile(heads, heads):
        return "tile"
    is_joined = is_compiled and any(type(module) in ATTENTIONS for module in model.model.modules())
    is_fused = is_joined and kv_spec(config) is None and joined_fits_tile(heads[0], width)
    return "blocks" if is_fused else "sdpa"


def _fused(
    module: nn.Module, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor], positions: Tensor
) -> Tensor:
    """Return `(B, S, H, D)`; all three families repeat the angles of the first half of a head."""
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
    """Run the layer in the steps of its family's own code, without our kernels."""
    query, key, value = (
        part.unflatten(-1, (-1, module.head_dim)) for part in module.qkv.split(qkv)
    )
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    heads = (query.transpose(1, 2), key.transpose(1, 2))
    rotated = apply_rotary_pos_emb(*heads, *position_embeddings)
    how = {"scaling": module.scaling, "kv": kv_spec(module.config), **kwargs}
    out, _ = attend(module, *rotated, value.transpose(1, 2), attention_mask, **how)
    return out


def _mlp(module: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(module, "gate_up"):
        return type(module).forward(module, x)
    gate_up = module.gate_up(x)
    if isinstance(module.act_fn, SILUS):
        return module.down_proj(silu_mul(gate_up))
    gate, up = module.gate_up.split(gate_up)
    return module.down_proj(module.act_fn(gate) * up)


SLICE_TOKENS = 2**15
"""Tokens that a recomputed layer processes at a time."""

MOST_GRAPHS = 32
"""Graphs that the compiler may make of one layer before it gives up."""


def refusals() -> tuple[type[Exception], ...]:
    """Return the errors of a failed compilation; this imports the compiler."""
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit


def warn_uncompiled(error: Exception) -> str:
    """Warn that layers run uncompiled, and return the first line of the compiler's error."""
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    logger.warning("the layers cannot be compiled (%s): they run uncompiled, more slowly", reason)
    return reason


@cache
def _say_where_kept() -> None:
    """Log once where the compiler keeps what later runs need not compile again."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # only where layers are compiled

    logger.info("compiled layers are kept for later runs in %s", cache_dir())


@dataclass(frozen=True)
class CompileFacts:
    """Statistics of the compiler in this process."""

    graphs: int
    recompiles: int
    breaks: int
    """Graph breaks, where the interpreter continued."""
    kept: int
    """Graphs that an earlier process had compiled and kept."""


class Regions:
    """Sets how a model's layers run: `install` patches their forwards, `remove` restores them."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        is_compiled: bool,
        recompute_every: int | None,
        forms_by_layer: bool = False,
    ) -> None:
        self._model = model
        self.is_compiled = is_compiled
        self._recompute_every = recompute_every
        self._forms_by_layer = forms_by_layer
        self._form: Callable[[torch.dtype], None] = partial(form_moved_weights, model)
        self._end_forming: Callable[[], None] = lambda: None
        self._is_refused = False

    def install(self) -> None:
        """Patch the forward of every layer, and of the norm after the last one."""
        if self.is_compiled:
            # training, evaluation, the first layer and a few batch shapes each compile a graph
            torch._dynamo.config.recompile_limit = MOST_GRAPHS
            _say_where_kept()
            join_projections(self._model)
        if self._forms_by_layer:
            self._end_forming = form_by_layer(decoder_layers(self._model))
        elif gathering(self._model).size > 1:
            prefetch = GatherPrefetch(self._model, decoder_layers(self._model))
            self._form, self._end_forming = prefetch.form, prefetch.end
        for index, layer in enumerate(decoder_layers(self._model)):
            every = self._recompute_every
            if every is None or index % every:
                layer.forward = self._compiled(layer.forward)
                continue
            recomputing = self._recomputing(layer)
            layer.forward = _InSlices(recomputing, self._compiled(layer.forward))
        for norm in _last_norm(self._model):
            norm.forward = self._compiled(norm.forward)

    def _recomputing(self, layer: nn.Module) -> Callable:
        """Return the layer's forward with only its input kept for backward."""
        own = on(next(layer.parameters()).device).tracing.checkpoint_fn()
        if own is not None:
            return partial(own, layer.forward)
        # compiled together with its recomputation, so that the compiler can drop unused values
        return self._compiled(MethodType(_checkpointed, layer))

    def _compiled(self, forward: Callable) -> Callable:
        if not self.is_compiled:
            return forward
        compiled = torch.compile(forward, fullgraph=True)

        def run(*args: object, **kwargs: object) -> Tensor:
            if torch.is_grad_enabled():  # the caller retries the whole step if compilation fails
                return compiled(*args, **kwargs)
            if not self._is_refused:
                try:
                    return compiled(*args, **kwargs)
                except refusals() as error:
                    self._is_refused = True
                    warn_uncompiled(error)
            return forward(*args, **kwargs)

        return run

    def form(self, dtype: torch.dtype) -> None:
        """Form the weights that moved since the last step (`qat.nn.step.form_moved_weights`)."""
        self._form(dtype)

    def remove(self) -> None:
        """Restore the forward of the layers' own classes."""
        for module in (*decoder_layers(self._model), *_last_norm(self._model)):
            vars(module).pop("forward", None)
        self._end_forming()
        part_projections(self._model)


def _last_norm(model: PreTrainedModel) -> list[nn.Module]:
    norm = getattr(model.base_model, "norm", None)
    return [] if norm is None else [norm]


@contextmanager
def as_written(model: PreTrainedModel) -> Iterator[None]:
    """Run a block with uncompiled forwards: generation's shapes would compile at each token."""
    regions = (*decoder_layers(model), *_last_norm(model))
    modules = [module for module in regions if "forward" in vars(module)]
    kept = [vars(module).pop("forward") for module in modules]
    try:
        yield
    finally:
        for module, forward in zip(modules, kept, strict=True):
            module.forward = forward


def _checkpointed(layer: nn.Module, hidden: Tensor, **kwargs: object) -> Tensor:
    """Run the layer's forward with only its input kept for backward."""
    forward = type(layer).forward
    # there is no dropout, so no generator state to restore
    return checkpoint(
        forward, layer, hidden, use_reentrant=False, preserve_rng_state=False, **kwargs
    )


class _InSlices:
    """Runs a recomputed layer in slices of the batch; without gradients the plain one."""

    calls = 0
    """Calls of all instances with gradients."""

    def __init__(self, recomputing: Callable, plain: Callable) -> None:
        self._recomputing = recomputing
        self._plain = plain

    def __call__(self, hidden: Tensor, **kwargs: object) -> Tensor:
        if not torch.is_grad_enabled():
            return self._plain(hidden, **kwargs)
        _InSlices.calls += 1
        B, S = hidden.shape[:2]
        rows = max(1, SLICE_TOKENS // S)
        if rows >= B:
            return self._recomputing(hidden, **kwargs)
        outputs = []
        for start in range(0, B, rows):
            # pad the last slice, so that every batch runs the same compiled shape
            part = BatchSlice(slice(start, start + rows), batch=B, count=rows)
            outputs.append(self._recomputing(part.of(hidden), **part.of(kwargs)))
        return torch.cat(outputs)[:B]


class BatchSlice(NamedTuple):
    """A slice of a batch, padded with zeros to `count` rows."""

    rows: slice
    batch: int
    count: int

    def of(self, value: object) -> object:
        """Return `value` with the slice of every inner tensor that has one row per sequence."""
        if isinstance(value, dict):
            return {name: self.of(item) for name, item in value.items()}
        if isinstance(value, tuple):
            return tuple(self.of(item) for item in value)
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[0] != self.batch:
            return value
        part = value[self.rows]
        missing = self.count - part.shape[0]
        if missing == 0:
            return part
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])])


def compile_facts() -> CompileFacts:
    """Return the graphs, recompilations and graph breaks of this process."""
    if "torch._dynamo" not in sys.modules:
        return CompileFacts(graphs=0, recompiles=0, breaks=0, kept=0)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    metrics = torch._dynamo.utils.get_compilation_metrics()
    recompiles = sum((metric.cache_size or 0) > 0 for metric in metrics)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    kept = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    return CompileFacts(graphs=graphs, recompiles=recompiles, breaks=breaks, kept=kept)


def recomputed_layers() -> int:
    """Return the calls of layers in this process that are recomputed in backward."""
    return _InSlices.calls
