"""Form weights layer by layer: all at once they take two bytes each in bfloat16.

After `form_by_layer` a layer is formed when it runs and again when its backward begins, in memory
that other layers share: no parameter changes in between, so the results are the same, bit for bit.
Where ranks gather weights, the next layer's gather overlaps with the layer that runs.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from qat.nn.quant_weight import SharedBuffer
from qat.nn.step import Unit, form_moved, forming_units, gathering
from qat.ranks import Ranks, Wait


class GatherPrefetch:
    """Prefetches weights that ranks gather: each layer waits for its own weights when it begins.

    The gather thus overlaps with the computation of the layers before.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._ranks = gathering(model)
        self._units_of = {layer: forming_units(layer) for layer in layers}
        inside = {*chain.from_iterable(self._units_of.values())}
        self._others = [unit for unit in forming_units(model) if unit not in inside]
        self._waits: dict[nn.Module, Wait] = {}
        self._handles = [layer.register_forward_pre_hook(self._wait) for layer in self._units_of]

    def form(self, dtype: torch.dtype) -> None:
        """Do what `form_moved_weights` does, but only start the layers' gathers, in order."""
        self._wait_for_all()
        with self._ranks.async_gathers() as end:
            form_moved(self._others, dtype)
        for layer, units in self._units_of.items():
            with self._ranks.async_gathers() as self._waits[layer]:
                form_moved(units, dtype)
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


def form_by_layer(layers: Iterable[nn.Module]) -> Callable[[], None]:
    """Make each of `layers` form its weights when it is called, and again before its backward.

    Equal layers write into the same memory, whose dtype is set by the next `form_weights`. Where
    ranks gather weights there are two such sets of memory, used alternately, so that the next
    layer's gather overlaps with the running layer. A linear that several layers call keeps memory
    of its own.

    Returns:
        A function that undoes it.
    """
    units_of = {layer: forming_units(layer) for layer in layers}
    ranks = gathering(*units_of)
    callers = Counter(unit for units in units_of.values() for unit in units)
    # two sets if ranks gather: the next layer's gather must not overwrite the running layer
    buffers: list[dict[tuple[object, ...], Tensor]] = [{} for _ in range(min(2, ranks.size))]
    for index, (layer, units) in enumerate(units_of.items()):
        units_of[layer] = mine = [unit for unit in units if callers[unit] == 1]
        shapes: Counter[tuple[int, int]] = Counter()
        for unit in mine:
            unit.release_()
            shape = unit.out_features, unit.in_features
            unit.shared_buffer = SharedBuffer(buffers[index % len(buffers)], shapes[shape])
            shapes[shape] += 1
    writer = _LayerWriter([*units_of.values()], ranks)
    handles = []
    for index, layer in enumerate(units_of):
        handles.append(layer.register_forward_pre_hook(partial(writer.write, index)))
        handles.append(layer.register_forward_hook(partial(_write_before_backward, writer, index)))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        writer.end()
        for unit in chain.from_iterable(units_of.values()):
            unit.shared_buffer = None
            unit.release_()

    return undo


class _LayerWriter:
    """Writes the weights of the layer that runs; where ranks gather, prefetches one layer.

    The prefetched layer is the next one in forward and the previous one in backward.
    """

    def __init__(self, layers: list[list[Unit]], ranks: Ranks) -> None:
        self._layers = layers
        self._ranks = ranks
        self._prefetched: tuple[int, bool] | None = None
        self.end: Wait = lambda: None  # waits for the gathers in flight

    def write(self, index: int, *_: object, again: bool = False) -> None:
        """Make the weights of layer `index` available; `again` for its backward."""
        if self._prefetched != (index, again):
            self._begin(index, again=again)
        self.end()
        self._prefetched = None
        following = index - 1 if again else index + 1
        if self._ranks.size > 1 and 0 <= following < len(self._layers):
            self._begin(following, again=again)

    def _begin(self, index: int, *, again: bool) -> None:
        self.end()  # finish a prefetch that was not used
        with self._ranks.async_gathers() as self.end:
            for unit in self._layers[index]:
                unit.write_(again=again)
        self._prefetched = index, again


def _write_before_backward(
    writer: _LayerWriter, index: int, _layer: nn.Module, _given: object, out: Any
) -> None:
    """Write a layer's weights when its output receives a gradient, as its backward begins."""
    for tensor in out if isinstance(out, tuple | list) else (out,):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(partial(writer.write, index, again=True))
