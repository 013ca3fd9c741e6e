"""The three acts of a training step over a whole model: form, run, pull back.

`form_weights` once per optimizer step; then any number of ordinary forwards and backwards, in which
each quantized linear pulls its own gradient back; `release_weights` when training ends.
"""

import torch
from torch import nn

from qat.nn.joined_linears import JoinedLinears
from qat.nn.quant_linear import QuantLinear


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
    """What is formed by itself: joined linears together, every other one alone."""
    joined = [module for module in model.modules() if isinstance(module, JoinedLinears)]
    members = {linear for unit in joined for linear in unit.linears}
    alone = [linear for linear in quant_linears(model).values() if linear not in members]
    return [*joined, *alone]
