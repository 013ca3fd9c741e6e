"""The three acts of a training step over a whole model: form, run, pull back.

`form_weights` once per optimizer step; then any number of ordinary forwards and backwards, in which
each quantized linear pulls its own gradient back; `release_weights` when training ends. Linears
that read the same input may be joined: one larger product serves a GPU better than several.

All formed weights together take two bytes each in bfloat16, which the largest models have no room
for. After `form_by_layer` a layer is formed when it runs and again when its backward begins, where
the layer before was: nothing moves in between, so the numbers are the same, bit for bit.

Shapes: O out_features of all together, I in_features.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.nn.activation import read, read_alike
from qat.nn.quant_linear import QuantLinear, Turn, room_for
from qat.nn.sharded import ShardedLutLinear
from qat.ranks import ALONE, Ranks, Wait


class JoinedLinears(nn.Module):
    """Forms the weights of several linears into one matrix; they stay the owners of what learns.

    Calling it equals calling each of them, side by side. One called alone uses the joined weight
    while it is formed. Their common input is quantized once, if it is.
    """

    formed: Tensor | None
    turn: Turn | None = None
    """As of a linear alone."""

    def __init__(self, linears: Sequence[QuantLinear]) -> None:
        super().__init__()
        self.linears = tuple(linears)  # a tuple: as submodules they would have a second name
        self.sizes = [linear.out_features for linear in linears]
        self.out_features, self.in_features = sum(self.sizes), linears[0].in_features
        self.register_buffer("formed", None, persistent=False)
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        self._rows = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        for linear, rows in zip(self.linears, self._rows, strict=True):
            linear.join(self, rows)

    def learns(self) -> bool:
        """Whether anything that the weights are made of gets gradients."""
        return any(linear.learns() for linear in self.linears)

    @torch.no_grad()
    def form_(self, dtype: torch.dtype) -> None:
        """Write all weights for the coming forwards, or make room, as a linear alone does."""
        self.formed = room_for(
            self.formed,
            self.linears[0].codebook,
            (self.out_features, self.in_features),
            dtype=dtype,
            take_gradient=self._pull_back if self.learns() else None,
            turn=self.turn,
        )
        if self.turn is None:
            self._write(self.formed.detach(), again=False)

    def write_(self, *, again: bool) -> None:
        """Write all weights where `form_` made room, as a linear alone does."""
        if self.formed is not None:
            self._write(self.formed.data, again=again)

    def _write(self, room: Tensor, *, again: bool) -> None:
        for linear, rows in zip(self.linears, self._rows, strict=True):
            linear.quantized_weight(room.dtype, out=room[rows], again=again)

    def release_(self) -> None:
        """Drop the formed weights."""
        self.formed = None
        for linear in self.linears:
            linear.release_()

    def part(self) -> None:
        """Undo the join: each linear multiplies by its own weight again."""
        self.release_()
        for linear in self.linears:
            linear.join(None, slice(0))

    def _pull_back(self, dW: Tensor) -> None:
        for linear, rows in zip(self.linears, self._rows, strict=True):
            linear.pull_back_(dW[rows])

    def forward(self, x: Tensor) -> Tensor:
        """`(..., I)` to `(..., O)`: what each linear gives, side by side."""
        if self.formed is None:
            return torch.cat([linear(x) for linear in self.linears], dim=-1)
        x = read(self.linears[0], x)
        biases = [linear.bias for linear in self.linears]
        bias = None
        if biases[0] is not None:
            bias = torch.cat(cast(list[Tensor], biases)).to(x.dtype)
        return F.linear(x, self.formed, bias)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """`forward`'s result as one `(..., O_i)` for each linear."""
        return y.split(self.sizes, dim=-1)


Unit = JoinedLinears | QuantLinear
"""What forms a weight of its own."""


def quant_linears(model: nn.Module) -> dict[str, QuantLinear]:
    """The model's quantized linears by name, in order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def join_linears(module: nn.Module, name: str, members: tuple[str, ...]) -> None:
    """Let those children of `module` run as one matmul, its new child `name`.

    Nothing happens unless all of them are quantized linears that quantize their input alike.
    """
    linears = [getattr(module, member) for member in members]
    if all(isinstance(linear, QuantLinear) for linear in linears) and read_alike(linears):
        module.add_module(name, JoinedLinears(linears))


def part_linears(model: nn.Module) -> None:
    """Undo `join_linears`."""
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, JoinedLinears):
                child.part()
                delattr(module, name)


def form_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Write the weight of every quantized linear, in `dtype`, for the coming forwards.

    Those of layers that are formed alone get room, and are written when their layer runs.
    """
    for unit in _units(model):
        unit.form_(dtype)


def form_moved_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """As `form_weights`, but what is formed already and does not learn is left as it is.

    Between two optimizer steps nothing else has moved, so frozen linears cost nothing.
    """
    with gathering(model).ahead() as end:
        _form_moved(_units(model), dtype)
    end()


def _form_moved(units: Iterable[Unit], dtype: torch.dtype) -> None:
    for unit in units:
        if unit.learns() or unit.formed is None or unit.formed.dtype != dtype:
            unit.form_(dtype)


class Arrivals:
    """Forms the weights that ranks gather before a step; each layer waits for its own as it begins.

    So they travel while the layers before it run.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._ranks = gathering(model)
        self._units_of = {layer: _units(layer) for layer in layers}
        inside = {*chain.from_iterable(self._units_of.values())}
        self._others = [unit for unit in _units(model) if unit not in inside]
        self._waits: dict[nn.Module, Wait] = {}
        self._handles = [layer.register_forward_pre_hook(self._wait) for layer in self._units_of]

    def form(self, dtype: torch.dtype) -> None:
        """As `form_moved_weights`, but the layers' weights are only begun, in the layers' order."""
        self._wait_for_all()
        with self._ranks.ahead() as end:
            _form_moved(self._others, dtype)
        for layer, units in self._units_of.items():
            with self._ranks.ahead() as self._waits[layer]:
                _form_moved(units, dtype)
        end()

    def end(self) -> None:
        """Wait for all weights, and let layers begin as they did before."""
        self._wait_for_all()
        for handle in self._handles:
            handle.remove()

    def _wait(self, layer: nn.Module, _given: object) -> None:
        self._waits.pop(layer, lambda: None)()

    def _wait_for_all(self) -> None:
        for layer in [*self._waits]:
            self._wait(layer, ())


def release_weights(model: nn.Module) -> None:
    """Drop the formed weights and their memory: each forward forms its own again."""
    for unit in _units(model):
        unit.release_()


def form_by_layer(layers: Iterable[nn.Module]) -> Callable[[], None]:
    """Let each of `layers` form its weights when it is called, and again before its backward.

    Equal layers write them into the same memory, whose dtype the next `form_weights` says; where
    ranks gather them, every other layer does, so that the next layer's travel while one runs. A
    linear that several layers call keeps memory of its own. What this gives back ends it.
    """
    units_of = {layer: _units(layer) for layer in layers}
    ranks = gathering(*units_of)
    callers = Counter(unit for units in units_of.values() for unit in units)
    rooms: list[dict[tuple[object, ...], Tensor]] = [{} for _ in range(min(2, ranks.size))]
    for index, (layer, units) in enumerate(units_of.items()):
        units_of[layer] = mine = [unit for unit in units if callers[unit] == 1]
        shapes: Counter[tuple[int, int]] = Counter()
        for unit in mine:
            unit.release_()
            shape = unit.out_features, unit.in_features
            unit.turn = Turn(rooms[index % len(rooms)], shapes[shape])
            shapes[shape] += 1
    relay = _Relay([*units_of.values()], ranks)
    handles = []
    for index, layer in enumerate(units_of):
        handles.append(layer.register_forward_pre_hook(partial(relay.write, index)))
        handles.append(layer.register_forward_hook(partial(_write_before_backward, relay, index)))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        relay.end()
        for unit in chain.from_iterable(units_of.values()):
            unit.turn = None
            unit.release_()

    return undo


class _Relay:
    """Writes the weights of the layer that runs; those that ranks gather are begun a layer ahead.

    Ahead is the layer behind in forward, the layer before in backward.
    """

    def __init__(self, layers: list[list[Unit]], ranks: Ranks) -> None:
        self._layers = layers
        self._ranks = ranks
        self._ahead: tuple[int, bool] | None = None
        self.end: Wait = lambda: None
        """Waits for what was begun."""

    def write(self, index: int, *_: object, again: bool = False) -> None:
        """Have the weights of layer `index` in their place; `again` as the layer's backward."""
        if self._ahead != (index, again):
            self._begin(index, again=again)
        self.end()
        self._ahead = None
        following = index - 1 if again else index + 1
        if self._ranks.size > 1 and 0 <= following < len(self._layers):
            self._begin(following, again=again)

    def _begin(self, index: int, *, again: bool) -> None:
        self.end()  # of what nobody came for
        with self._ranks.ahead() as self.end:
            for unit in self._layers[index]:
                unit.write_(again=again)
        self._ahead = index, again


def _write_before_backward(
    relay: _Relay, index: int, _layer: nn.Module, _given: object, out: Any
) -> None:
    """Backward of a layer begins with the gradient of what it returned."""
    for tensor in out if isinstance(out, tuple | list) else (out,):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(partial(relay.write, index, again=True))


def gathering(*modules: nn.Module) -> Ranks:
    """Who gather weights of `modules` together; this process alone if they lie whole."""
    linears = chain.from_iterable(quant_linears(module).values() for module in modules)
    return next((each.ranks for each in linears if isinstance(each, ShardedLutLinear)), ALONE)


def _units(model: nn.Module) -> list[Unit]:
    """The modules that form weights: joined linears as one, every other linear alone."""
    joined = [module for module in model.modules() if isinstance(module, JoinedLinears)]
    members = {linear for unit in joined for linear in unit.linears}
    alone = [linear for linear in quant_linears(model).values() if linear not in members]
    return [*joined, *alone]
