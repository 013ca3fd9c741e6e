"""The module that quantizes the input of a quantized linear or head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, cast

import torch
from torch import Tensor, nn

from qat.quant.activation import quantize_static, quantize_tokens, static_scale
from qat.quant.spec import ActivationSpec


def keeping_dtype(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply `fn` but keep the dtype: `model.to(bfloat16)` must not round a weight's parameters."""
    applied = fn(tensor)
    return applied if applied.dtype == tensor.dtype else tensor.to(applied.device)


class ActivationQuantizer(nn.Module):
    """Quantizes the input of a product by its spec, with the same bits on every device.

    Linears that read the same tensor share a quantizer with a stored scale: the input is quantized
    once and there is one scale to learn. Under autocast the input is first cast, as the product
    would cast it.
    """

    scale: nn.Parameter | None

    def __init__(self, spec: ActivationSpec, scale: Tensor | None = None) -> None:
        super().__init__()
        self.spec = spec
        if spec.is_static != (scale is not None):
            raise ValueError(f"activation kind={spec.kind} does not go with scale={scale}")
        self.scale = None if scale is None else nn.Parameter(scale.detach().float().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., I)` to `(..., I)`, in the dtype that the product computes in."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        if self.scale is not None:
            return quantize_static(x, self.scale, self.spec.scale_bits)
        return quantize_tokens(x, self.spec.kind)

    def stored_scale(self) -> Tensor:
        """Return the static scale that `forward` computes with, one float32 number, no gradient."""
        assert self.scale is not None
        return static_scale(self.scale, self.spec.scale_bits)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(partial(keeping_dtype, fn), recurse)

    def extra_repr(self) -> str:
        """Return the kind, for `print(model)`."""
        return self.spec.kind


def activation_of(module: object) -> ActivationQuantizer | None:
    """Return the quantizer of the input of a linear or head; None without one."""
    found: ActivationQuantizer | None = getattr(module, "activation", None)
    return found


def read(module: object, x: Tensor) -> Tensor:
    """Return `x` as quantized by a linear or head for its product."""
    quantizer = activation_of(module)
    return x if quantizer is None else cast(Tensor, quantizer(x))


def read_alike(modules: Sequence[object]) -> bool:
    """Return whether one quantized input serves all of `modules`, also after they have learned."""
    first, *others = map(activation_of, modules)
    if first is None or first.spec.is_static:  # static scales that are not shared learn apart
        return all(other is first for other in others)
    return all(other is not None and other.spec == first.spec for other in others)
