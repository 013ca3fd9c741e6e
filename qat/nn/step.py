"""The three acts of a training step over a whole model: form, run, pull back.

`form_weights` once per optimizer step; then any number of ordinary forwards and backwards, in which
each quantized linear pulls its own gradient back; `release_weights` when training ends. Linears
with a common input may be joined: a GPU runs one larger product faster than several.

All formed weights together take two bytes each in bfloat16, too much for the largest models. After
`form_by_layer` a layer is formed when it runs and again when its backward begins, in memory that
other layers share: no parameter changes in between, so the results are the same, bit for bit.

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
from qat.nn.quant_linear import QuantLinear, Turn, quant_linears, room_for
from qat.nn.sharded import ShardedLutLinear
from qat.ranks import ALONE, Ranks, Wait


class JoinedLinears(nn.Module):
    """Forms the weights of several linears as one matrix; the linears keep their parameters.

    Calling it equals calling each linear and concatenating the results. A linear that is called
    alone uses its rows of the joined weight while that is formed. A common input is quantized once.
    """

    formed: Tensor | None
    turn: Turn | None = None
    """Shared memory for `formed`, as in `QuantLinear`."""

    def __init__(self, linears: Sequence[QuantLinear]) -> None:
        super().__init__()
        self.linears = tuple(linears)  # in a tuple: as submodules they would have a second name
        self.sizes = [linear.out_features for linear in linears]
        self.out_features, self.in_features = sum(self.sizes), linears[0].in_features
        self.register_buffer("formed", None, persistent=False)
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        self._rows = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        for linear, rows in zip(self.linears, self._rows, strict=True):
            linear.join(self, rows)

    def learns(self) -> bool:
        """Return whether any parameter of the weights gets gradients."""
        return any(linear.learns() for linear in self.linears)

    @torch.no_grad()
    def form_(self, dtype: torch.dtype) -> None:
        """Write all weights for the coming forwards, or allocate, as `QuantLinear.form_` does."""
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
        """Write all weights into the tensor from `form_`, as `QuantLinear.write_` does."""
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
        """Map `(..., I)` to `(..., O)`: the concatenated results of the linears."""
        if self.formed is None:
            return torch.cat([linear(x) for linear in self.linears], dim=-1)
        x = read(self.linears[0], x)
        biases = [linear.bias for linear in self.linears]
        bias = None
        if biases[0] is not None:
            bias = torch.cat(cast(list[Tensor], biases)).to(x.dtype)
        return F.linear(x, self.formed, bias)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Split the result of `forward` into one `(..., O_i)` per linear."""
        return y.split(self.sizes, dim=-1)


Unit = JoinedLinears | QuantLinear
"""A module that forms a weight: joined linears, or a single one."""


def join_linears(module: nn.Module, name: str, members: tuple[str, ...]) -> None:
    """Run these children of `module` as one matmul, its new child `name`.

    Does nothing unless all are quantized linears that quantize their input alike.
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

    Layers set up by `form_by_layer` only get memory here; they write their weights when they run.
    """
    for unit in _units(model):
        unit.form_(dtype)


def form_moved_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Form the weights again that learn, and those not formed in `dtype` yet.

    Frozen linears that are formed already cost nothing, because they do not change between steps.
    """
    with gathering(model).ahead() as end:
        _form_moved(_units(model), dtype)
    end()


def _form_moved(units: Iterable[Unit], dtype: torch.dtype) -> None:
    for unit in units:
        if unit.learns() or unit.formed is None or unit.formed.dtype != dtype:
            unit.form_(dtype)


class Arrivals:
    """Prefetches weights that ranks gather: each layer waits for its own weights when it begins.

    The gather thus overlaps with the computation of the layers before.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._ranks = gathering(model)
        self._units_of = {layer: _units(layer) for layer in layers}
        inside = {*chain.from_iterable(self._units_of.values())}
        self._others = [unit for unit in _units(model) if unit not in inside]
        self._waits: dict[nn.Module, Wait] = {}
        self._handles = [layer.register_forward_pre_hook(self._wait) for layer in self._units_of]

    def form(self, dtype: torch.dtype) -> None:
        """Do what `form_moved_weights` does, but only start the layers' gathers, in order."""
        self._wait_for_all()
        with self._ranks.ahead() as end:
            _form_moved(self._others, dtype)
        for layer, units in self._units_of.items():
            with self._ranks.ahead() as self._waits[layer]:
                _form_moved(units, dtype)
        end()

    def end(self) -> None:
        """Wait for all weights and remove the hooks from the layers."""
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
    """Make each of `layers` form its weights when it is called, and again before its backward.

    Equal layers write into the same memory, whose dtype is set by the next `form_weights`. Where
    ranks gather weights there are two such sets of memory, used alternately, so that the next
    layer's gather overlaps with the running layer. A linear that several layers call keeps memory
    of its own.

    Returns:
        A function that undoes it.
    """
    units_of = {layer: _units(layer) for layer in layers}
    ranks = gathering(*units_of)
    callers = Counter(unit for units in units_of.values() for unit in units)
    # two sets if ranks gather: the next layer's gather must not overwrite the running layer
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
    """Writes the weights of the layer that runs; where ranks gather, prefetches one layer.

    The prefetched layer is the next one in forward and the previous one in backward.
    """

    def __init__(self, layers: list[list[Unit]], ranks: Ranks) -> None:
        self._layers = layers
        self._ranks = ranks
        self._ahead: tuple[int, bool] | None = None
        self.end: Wait = lambda: None
        """Waits for the gathers in flight."""

    def write(self, index: int, *_: object, again: bool = False) -> None:
        """Make the weights of layer `index` available; `again` for its backward."""
        if self._ahead != (index, again):
            self._begin(index, again=again)
        self.end()
        self._ahead = None
        following = index - 1 if again else index + 1
        if self._ranks.size > 1 and 0 <= following < len(self._layers):
            self._begin(following, again=again)

    def _begin(self, index: int, *, again: bool) -> None:
        self.end()  # finish a prefetch that was not used
        with self._ranks.ahead() as self.end:
            for unit in self._layers[index]:
                unit.write_(again=again)
        self._ahead = index, again


def _write_before_backward(
    relay: _Relay, index: int, _layer: nn.Module, _given: object, out: Any
) -> None:
    """Write a layer's weights when its output receives a gradient, as its backward begins."""
    for tensor in out if isinstance(out, tuple | list) else (out,):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(partial(relay.write, index, again=True))


def gathering(*modules: nn.Module) -> Ranks:
    """Return the ranks that gather weights of `modules`; this process alone if none are sharded."""
    linears = chain.from_iterable(quant_linears(module).values() for module in modules)
    return next((each.ranks for each in linears if isinstance(each, ShardedLutLinear)), ALONE)


def _units(model: nn.Module) -> list[Unit]:
    """Return the modules that form weights: joined linears as one, every other linear alone."""
    joined = [module for module in model.modules() if isinstance(module, JoinedLinears)]
    members = {linear for unit in joined for linear in unit.linears}
    alone = [linear for linear in quant_linears(model).values() if linear not in members]
    return [*joined, *alone]
