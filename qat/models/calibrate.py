"""Runs a model block by block, so that each linear is quantized against the inputs it will see.

Every block gets the output of the blocks already quantized (GPTQ's sequential order,
arXiv:2210.17323); inside a block, linears that share an input are one stage, in the order of use.

Shapes: B sequences, S positions, I in_features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat.models.language_model import LanguageModel
from qat.models.swap import decoder_layers

QuantizeStage = Callable[[list[str], Tensor], None]
"""Replaces the named linears, given `mean(x x^T)` of their common input `(I, I)`."""


class TokenBatch(NamedTuple):
    """Tokens to run a model on, `(B, S)` each."""

    input_ids: Tensor
    position_ids: Tensor


class BlockInputs(NamedTuple):
    """What one decoder layer is called with for one batch."""

    hidden: Tensor
    """`(B, S, D)`."""
    kwargs: list[dict[str, Any]]
    """Per layer, everything but the hidden state: masks, rotary tables."""


@torch.no_grad()
def quantize_in_order(
    student: LanguageModel,
    batches: Sequence[TokenBatch],
    names: list[str],
    quantize_stage: QuantizeStage,
) -> None:
    """Walk the decoder layers; `quantize_stage` replaces the `names` of each stage in turn."""
    layers = decoder_layers(student.model)
    module_names = {module: name for name, module in student.model.named_modules()}
    inputs = [record_block_inputs(student, layers, batch) for batch in batches]
    states = [item.hidden for item in inputs]
    for index, layer in enumerate(layers):
        calls = [item.kwargs[index] for item in inputs]
        prefix = module_names[layer] + "."
        mine = {name for name in names if name.startswith(prefix)}
        for stage in _stages(layer, prefix, mine, hidden=states[0], call=calls[0]):
            quantize_stage(
                stage, _second_moment(layer, stage[0].removeprefix(prefix), states, calls)
            )
        states = [_run(layer, hidden, call) for hidden, call in zip(states, calls, strict=True)]


def record_block_inputs(
    student: LanguageModel, layers: nn.ModuleList, batch: TokenBatch
) -> BlockInputs:
    """One forward of the whole body, noting what every decoder layer is called with."""
    first: list[Tensor] = []
    kwargs: list[dict[str, Any]] = []

    def note(_layer: nn.Module, args: tuple, call: dict[str, Any]) -> None:
        call = dict(call)
        hidden = args[0] if args else call.pop("hidden_states")
        call.pop("past_key_values", None)
        first.append(hidden if not first else first[0])
        kwargs.append(call)

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        student.hidden(*(ids.to(student.device) for ids in batch))
    finally:
        for handle in handles:
            handle.remove()
    return BlockInputs(first[0], kwargs)


def _run(layer: nn.Module, hidden: Tensor, call: dict[str, Any]) -> Tensor:
    output = layer(hidden, **call)
    return output[0] if isinstance(output, tuple) else output


def _stages(
    layer: nn.Module, prefix: str, names: set[str], *, hidden: Tensor, call: dict[str, Any]
) -> list[list[str]]:
    """The layer's linears in order of use, those that read the same tensor together."""
    read: dict[int, list[str]] = {}
    alive = []  # keeps every input, so that no address is used twice

    def note(name: str) -> Callable[[nn.Module, tuple], None]:
        def hook(_module: nn.Module, args: tuple) -> None:
            alive.append(args[0])
            read.setdefault(id(args[0]), []).append(name)

        return hook

    with _hooked(layer, {n.removeprefix(prefix): note(n) for n in names}):
        _run(layer, hidden, call)
    return list(read.values())


def _second_moment(
    layer: nn.Module, name: str, states: Sequence[Tensor], calls: Sequence[dict[str, Any]]
) -> Tensor:
    """`mean(x x^T)` of the inputs of the linear called `name`, `(I, I)` float32."""
    total, count = None, 0

    def add(_module: nn.Module, args: tuple) -> None:
        nonlocal total, count
        x = args[0].flatten(0, -2).float()
        total = x.T @ x if total is None else total.addmm_(x.T, x)
        count += x.shape[0]

    with _hooked(layer, {name: add}):
        for hidden, call in zip(states, calls, strict=True):
            _run(layer, hidden, call)
    return total / count


@contextmanager
def _hooked(
    layer: nn.Module, hooks: dict[str, Callable[[nn.Module, tuple], None]]
) -> Iterator[None]:
    handles = [layer.get_submodule(n).register_forward_pre_hook(h) for n, h in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
