"""The decoder, region by region: each layer compiled, recomputed in backward, or both.

All equal layers share one compiled graph, in which projections of the same input are one matmul. A
recomputed layer keeps its input alone, and backward goes through it a slice of the batch at a time,
so that what a layer holds inside does not grow with the batch.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from qat.backend.device import on
from qat.models.projections import join_projections, part_projections
from qat.nn.swap import decoder_layers

SLICE_TOKENS = 2**15
"""Tokens that one recomputed layer works on at a time."""

MOST_GRAPHS = 32
"""Graphs that the compiler may make of one layer before it gives up."""


@dataclass(frozen=True)
class CompileFacts:
    """What the compiler did so far in this process."""

    graphs: int
    recompiles: int
    breaks: int
    """Places where it gave up and the interpreter went on."""


class Regions:
    """The way a model's layers run; `install` puts it in place, `remove` takes it away."""

    def __init__(
        self, model: PreTrainedModel, *, is_compiled: bool, recompute_every: int | None
    ) -> None:
        self._model = model
        self.is_compiled = is_compiled
        self._recompute_every = recompute_every

    def install(self) -> None:
        """Let every layer, and the norm behind the last, run this way."""
        if self.is_compiled:
            # training, judging, the first layer and a few batch shapes: each is a graph of its own
            torch._dynamo.config.recompile_limit = MOST_GRAPHS
            join_projections(self._model)
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
        """The layer's forward, of which backward finds nothing but the input."""
        own = on(next(layer.parameters()).device).checkpoint_fn()
        if own is not None:
            return partial(own, layer.forward)
        # compiled together with its recomputation, which then leaves out what nobody reads
        return self._compiled(MethodType(_checkpointed, layer))

    def _compiled(self, forward: Callable) -> Callable:
        if not self.is_compiled:
            return forward
        return torch.compile(forward, fullgraph=True)

    def remove(self) -> None:
        """Let the layers run as their class says."""
        for module in (*decoder_layers(self._model), *_last_norm(self._model)):
            vars(module).pop("forward", None)
        part_projections(self._model)


def _last_norm(model: PreTrainedModel) -> list[nn.Module]:
    """The norm behind the last layer, if the model keeps it where most do."""
    norm = getattr(model.base_model, "norm", None)
    return [] if norm is None else [norm]


@contextmanager
def as_written(model: PreTrainedModel) -> Iterator[None]:
    """Run a block with every region plain: generation's shapes would compile at each token."""
    regions = (*decoder_layers(model), *_last_norm(model))
    modules = [module for module in regions if "forward" in vars(module)]
    kept = [vars(module).pop("forward") for module in modules]
    try:
        yield
    finally:
        for module, forward in zip(modules, kept, strict=True):
            module.forward = forward


def _checkpointed(layer: nn.Module, hidden: Tensor, **kwargs: object) -> Tensor:
    """The layer's forward, of which backward finds nothing but the input."""
    forward = type(layer).forward
    # no dropout: there is no generator state to repeat
    return checkpoint(
        forward, layer, hidden, use_reentrant=False, preserve_rng_state=False, **kwargs
    )


class _InSlices:
    """A recomputed layer, a slice of the batch at a time; the plain one where nothing learns."""

    calls = 0
    """Of all of them, where something learned."""

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
            # the last slice is filled up, so that every batch runs the same compiled shape
            part = Rows(slice(start, start + rows), batch=B, count=rows)
            outputs.append(self._recomputing(part.of(hidden), **part.of(kwargs)))
        return torch.cat(outputs)[:B]


class Rows(NamedTuple):
    """A slice of a batch, filled up with zeros to `count` rows."""

    rows: slice
    batch: int
    count: int

    def of(self, value: object) -> object:
        """`value` with the slice of every tensor inside that has one row per sequence."""
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
    """Graphs that the compiler made in this process, and those of code that it had compiled."""
    if "torch._dynamo" not in sys.modules:
        return CompileFacts(graphs=0, recompiles=0, breaks=0)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    metrics = torch._dynamo.utils.get_compilation_metrics()
    recompiles = sum((metric.cache_size or 0) > 0 for metric in metrics)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return CompileFacts(graphs=graphs, recompiles=recompiles, breaks=breaks)


def recomputed_layers() -> int:
    """Calls of layers in this process that left their inside to be recomputed in backward."""
    return _InSlices.calls
