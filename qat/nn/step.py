"""The three acts of a training step over a whole model: form, run, pull back.

`form_weights` once per optimizer step; then any number of ordinary forwards and backwards, in which
each quantized linear pulls its own gradient back; `release_weights` when training ends.
"""

import torch
from torch import nn

from qat.nn.quant_linear import QuantLinear


def quant_linears(model: nn.Module) -> dict[str, QuantLinear]:
    """The model's quantized linears by name, in order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def form_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Write the weight of every quantized linear, in `dtype`, for the coming forwards."""
    for linear in quant_linears(model).values():
        linear.form_(dtype)


def form_moved_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """As `form_weights`, but what is formed already and does not learn is left as it is.

    Between two optimizer steps nothing else has moved, so frozen linears cost nothing.
    """
    for linear in quant_linears(model).values():
        if linear.learns() or linear.formed is None or linear.formed.dtype != dtype:
            linear.form_(dtype)


def release_weights(model: nn.Module) -> None:
    """Drop the formed weights and their memory: each forward forms its own again."""
    for linear in quant_linears(model).values():
        linear.release_()
