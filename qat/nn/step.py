"""The three acts of a training step over a whole model: form, run, pull back.

`form_weights` once per optimizer step; then any number of ordinary forwards and backwards, in which
each quantized weight pulls its own gradient back; `release_weights` when training ends. Linears
with a common input may be joined: a GPU runs one larger product faster than several.

All formed weights together take two bytes each in bfloat16, too much for the largest models:
`qat.nn.by_layer` forms those of a layer when it runs.

Shapes: O out_features of all together, I in_features.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.nn.activation import read, read_alike
from qat.nn.lut_embedding import QuantTable
from qat.nn.quant_linear import QuantLinear
from qat.nn.quant_weight import QuantWeight, SharedBuffer, quant_weights, weight_buffer
from qat.nn.sharded import ShardedWeight
from qat.ranks import ALONE, Ranks


class JoinedLinears(nn.Module):
    """Forms the weights of several linears as one matrix; the linears keep their parameters.

    Calling it equals calling each linear and concatenating the results. A linear that is called
    alone uses its rows of the joined weight while that is formed. A common input is quantized once.
    """

    formed: Tensor | None
    shared_buffer: SharedBuffer | None = None  # shared memory for `formed`, as in `QuantWeight`

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
        """Write all weights for the coming forwards, or allocate, as `QuantWeight.form_` does."""
        self.formed = weight_buffer(
            self.formed,
            self.linears[0].codebook,
            (self.out_features, self.in_features),
            dtype=dtype,
            take_gradient=self._pull_back if self.learns() else None,
            shared_buffer=self.shared_buffer,
        )
        if self.shared_buffer is None:
            self._write(self.formed.detach(), again=False)

    def write_(self, *, again: bool) -> None:
        """Write all weights into the tensor from `form_`, as `QuantWeight.write_` does."""
        if self.formed is not None:
            self._write(self.formed.data, again=again)

    def _write(self, buffer: Tensor, *, again: bool) -> None:
        for linear, rows in zip(self.linears, self._rows, strict=True):
            linear.quantized_weight(buffer.dtype, out=buffer[rows], again=again)

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
        return self.product(read(self.linears[0], x), self.formed)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the result for an already quantized input and all weights, `(O, I)`."""
        biases = [linear.bias for linear in self.linears]
        bias = None
        if biases[0] is not None:
            bias = torch.cat(cast(list[Tensor], biases)).to(x.dtype)
        return F.linear(x, weight, bias)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Split the result of `forward` into one `(..., O_i)` per linear."""
        return y.split(self.sizes, dim=-1)


Unit = JoinedLinears | QuantWeight  # a module that forms a weight: joined linears, or a single one


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
    for unit in forming_units(model):
        unit.form_(dtype)


def form_moved_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Form the weights again that learn, and those not formed in `dtype` yet.

    Frozen linears that are formed already cost nothing, because they do not change between steps.
    """
    with gathering(model).async_gathers() as end:
        form_moved(forming_units(model), dtype)
    end()


def form_moved(units: Iterable[Unit], dtype: torch.dtype) -> None:
    """Form the weights of `units` that learn, and those not formed in `dtype` yet."""
    for unit in units:
        if unit.learns() or unit.formed is None or unit.formed.dtype != dtype:
            unit.form_(dtype)


def release_weights(model: nn.Module) -> None:
    """Drop the formed weights and their memory: each forward forms its own again."""
    for unit in forming_units(model):
        unit.release_()


def gathering(*modules: nn.Module) -> Ranks:
    """Return the ranks that gather weights of `modules`; this process alone if none are sharded."""
    weights = chain.from_iterable(quant_weights(module).values() for module in modules)
    return next((each.ranks for each in weights if isinstance(each, ShardedWeight)), ALONE)


def forming_units(model: nn.Module) -> list[Unit]:
    """Return what forms weights: joined linears as one, all others alone, tables only to learn."""
    joined = [module for module in model.modules() if isinstance(module, JoinedLinears)]
    members = {linear for unit in joined for linear in unit.linears}
    alone = [
        each
        for each in quant_weights(model).values()
        if each not in members and (each.learns() or not isinstance(each, QuantTable))
    ]
    return [*joined, *alone]
