"""The three acts of a training step over a whole model: form, run, pull back.

`form_weights` once per optimizer step; then any number of ordinary forwards and backwards, in which
each quantized linear pulls its own gradient back; `release_weights` when training ends. Linears
that read the same input may be joined: one larger product serves a GPU better than several.

Shapes: O out_features of all together, I in_features.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.nn.quant_linear import QuantLinear, room_for


class JoinedLinears(nn.Module):
    """Forms the weights of several linears into one matrix; they stay the owners of what learns.

    Calling it equals calling each of them, side by side. One called alone uses the joined weight
    while it is formed.
    """

    formed: Tensor | None

    def __init__(self, linears: Sequence[QuantLinear]) -> None:
        super().__init__()
        self.linears = tuple(linears)  # a tuple: as submodules they would have a second name
        self.sizes = [linear.out_features for linear in linears]
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
        """Write all weights for the coming forwards."""
        first = self.linears[0]
        self.formed = room_for(
            self.formed,
            first.codebook,
            (sum(self.sizes), first.in_features),
            dtype=dtype,
            take_gradient=self._pull_back if self.learns() else None,
        )
        for linear, rows in zip(self.linears, self._rows, strict=True):
            linear.quantized_weight(dtype, out=self.formed.detach()[rows])

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
        biases = [linear.bias for linear in self.linears]
        bias = None
        if biases[0] is not None:
            bias = torch.cat(cast(list[Tensor], biases)).to(x.dtype)
        return F.linear(x, self.formed, bias)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """`forward`'s result as one `(..., O_i)` for each linear."""
        return y.split(self.sizes, dim=-1)


def quant_linears(model: nn.Module) -> dict[str, QuantLinear]:
    """The model's quantized linears by name, in order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def join_linears(module: nn.Module, name: str, members: tuple[str, ...]) -> None:
    """Let those children of `module` run as one matmul, its new child `name`.

    Nothing happens unless all of them are quantized linears.
    """
    linears = [getattr(module, member) for member in members]
    if all(isinstance(linear, QuantLinear) for linear in linears):
        module.add_module(name, JoinedLinears(linears))


def part_linears(model: nn.Module) -> None:
    """Undo `join_linears`."""
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, JoinedLinears):
                child.part()
                delattr(module, name)


def form_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Write the weight of every quantized linear, in `dtype`, for the coming forwards."""
    for unit in _units(model):
        unit.form_(dtype)


def form_moved_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """As `form_weights`, but what is formed already and does not learn is left as it is.

    Between two optimizer steps nothing else has moved, so frozen linears cost nothing.
    """
    for unit in _units(model):
        if unit.learns() or unit.formed is None or unit.formed.dtype != dtype:
            unit.form_(dtype)


def release_weights(model: nn.Module) -> None:
    """Drop the formed weights and their memory: each forward forms its own again."""
    for unit in _units(model):
        unit.release_()


def _units(model: nn.Module) -> list[JoinedLinears | QuantLinear]:
    """The modules that form weights: joined linears as one, every other linear alone."""
    joined = [module for module in model.modules() if isinstance(module, JoinedLinears)]
    members = {linear for unit in joined for linear in unit.linears}
    alone = [linear for linear in quant_linears(model).values() if linear not in members]
    return [*joined, *alone]
