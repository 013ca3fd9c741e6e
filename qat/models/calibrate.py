"""Runs a model block by block, so that each linear is quantized against the inputs it will see.

Every block gets the output of the blocks already quantized (GPTQ's sequential order,
arXiv:2210.17323); inside a block, linears that share an input are one stage, in the order of use.
A block runs once for each stage, only as far as the stage's input; whatever ran before saw nothing
but finished linears and gives again what it gave then. So each linear multiplies its inputs once.

Shapes: B sequences, S positions, I in_features.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat.models.language_model import LanguageModel
from qat.models.swap import decoder_layers
from qat.nn.quant_linear import QuantLinear

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
    orders: dict[tuple, list[list[str]]] = {}
    for index, layer in enumerate(layers):
        prefix = module_names[layer] + "."
        mine = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
        block = _Block(layer, states, [item.kwargs[index] for item in inputs])
        kind = (type(layer), mine)
        if kind not in orders:
            orders[kind] = block.stages(mine)
        for stage in orders[kind]:
            quantize_stage([prefix + name for name in stage], block.second_moment(stage[0]))
        states = block.outputs()


def record_block_inputs(
    student: LanguageModel, layers: nn.ModuleList, batch: TokenBatch
) -> BlockInputs:
    """What every decoder layer is called with. Only the first one runs: its output stands in."""
    first: list[Tensor] = []
    stand_in: list[Tensor | tuple] = []
    kwargs: list[dict[str, Any]] = []

    def note(forward: Callable) -> Callable:
        def call(*args: Tensor, **named: object) -> Tensor | tuple:
            if not stand_in:
                first.append(args[0] if args else named["hidden_states"])
                stand_in.append(forward(*args, **named))
            left_out = ("hidden_states", "past_key_values")
            kwargs.append({key: value for key, value in named.items() if key not in left_out})
            return stand_in[0]

        return call

    with patched_forwards({layer: note(layer.forward) for layer in layers}):
        student.hidden(*(ids.to(student.device) for ids in batch))
    return BlockInputs(first[0], kwargs)


Call = tuple[str, int]
"""A module's name and how often it had been called in the same run."""


class _Reached(Exception):
    """The module that was waited for has been called."""


class _Block:
    """One decoder layer with its inputs of all batches, and what its linears made of them."""

    def __init__(
        self, layer: nn.Module, states: Sequence[Tensor], calls: Sequence[dict[str, Any]]
    ) -> None:
        self._layer = layer
        self._runs = list(zip(states, calls, strict=True))
        self._made: list[dict[Call, object]] = [{} for _ in self._runs]
        """Per batch, what each call of a linear or a direct child of the layer gave."""
        self._formed: dict[str, Tensor] = {}
        """The weight of each quantized linear that ran, by name."""

    def stages(self, names: Sequence[str]) -> list[list[str]]:
        """The linears called `names` in order of use, those that read the same tensor together."""
        read: dict[int, list[str]] = {}
        alive = []  # keeps every input, so that no address is used twice

        def note(name: str) -> Callable[[nn.Module, tuple], None]:
            def hook(_module: nn.Module, args: tuple) -> None:
                alive.append(args[0])
                read.setdefault(id(args[0]), []).append(name)

            return hook

        hidden, call = self._runs[0]
        with _hooked({self._layer.get_submodule(name): note(name) for name in names}):
            _output(self._layer(hidden, **call))
        return list(read.values())

    def second_moment(self, name: str) -> Tensor:
        """`mean(x x^T)` of the inputs of the linear called `name`, `(I, I)` float32."""
        total, count = None, 0

        def add(_module: nn.Module, args: tuple) -> None:
            nonlocal total, count
            x = args[0].flatten(0, -2).float()
            total = x.T @ x if total is None else total.addmm_(x.T, x)
            count += x.shape[0]
            raise _Reached

        with _hooked({self._layer.get_submodule(name): add}):
            for batch in range(len(self._runs)):
                try:
                    self._run(batch)
                except _Reached:
                    continue
        return total / count

    def outputs(self) -> list[Tensor]:
        """The layer's output for each batch."""
        return [self._run(batch) for batch in range(len(self._runs))]

    def _run(self, batch: int) -> Tensor:
        hidden, call = self._runs[batch]
        made, counts = self._made[batch], Counter()

        def once(name: str, module: nn.Module) -> Callable:
            compute = module.forward
            if isinstance(module, nn.Linear | QuantLinear):
                compute = partial(self._multiply, name, module)

            def forward(*args: object, **named: object) -> object:
                key = name, counts[name]
                counts[name] += 1
                if key not in made:
                    made[key] = compute(*args, **named)
                    for inner in [k for k in made if k[0].startswith(name + ".")]:
                        del made[inner]
                return made[key]

            return forward

        kept = {
            module: once(name, module)
            for name, module in self._layer.named_modules()
            if (name and "." not in name) or isinstance(module, nn.Linear | QuantLinear)
        }
        with patched_forwards(kept):
            return _output(self._layer(hidden, **call))

    def _multiply(self, name: str, linear: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._weight(name, linear), linear.bias)

    def _weight(self, name: str, linear: nn.Module) -> Tensor:
        if not isinstance(linear, QuantLinear):
            return linear.weight
        if name not in self._formed:
            self._formed[name] = linear.quantized_weight()
        return self._formed[name]


def _output(output: Tensor | tuple) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def _hooked(hooks: dict[nn.Module, Callable[[nn.Module, tuple], None]]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def patched_forwards(forwards: dict[nn.Module, Callable]) -> Iterator[None]:
    """Let each module call another function in place of its `forward`."""
    own = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in own.items():
            del module.forward
            if forward is not None:
                module.forward = forward
