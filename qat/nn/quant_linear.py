"""Linears with a quantized weight (`qat.nn.quant_weight`).

Shapes: O out_features, I in_features.
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.nn.activation import read
from qat.nn.quant_weight import LatentWeight, PackedWeight, QuantWeight
from qat.quant.spec import LutSpec
from qat.quant.weight import QuantizedWeight


class QuantLinear(QuantWeight):
    """`y = x @ W.T + bias` with a quantized weight, `(..., I)` to `(..., O)`.

    With an `activation` the input is quantized first: `y = read(x) @ W.T + bias`.
    """

    def __init__(self, quantized: QuantizedWeight, bias: Tensor | None, spec: LutSpec) -> None:
        super().__init__(quantized, spec)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self._joined: tuple[Any, slice] = (None, slice(0))

    def own(self) -> tuple[Tensor | None, LutSpec]:
        """Return bias and format."""
        return self.bias, self.spec

    def join(self, joined: nn.Module | None, rows: slice) -> None:
        """Use `rows` of the weight that `joined` forms; None undoes this."""
        self.release_()
        self._joined = (joined, rows)  # in a tuple, so that it does not become a submodule

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., I)` to `(..., O)`."""
        return self.product(read(self, x))

    def product(self, x: Tensor) -> Tensor:
        """Return `x @ W.T + bias` of an already quantized input: `(..., I)` to `(..., O)`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight_in(x.dtype), bias)

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """See `QuantWeight`; a joined linear reads its rows of the common weight."""
        joined, rows = self._joined
        if joined is not None and joined.formed is not None:
            return cast(Tensor, joined.formed[rows])
        return super().weight_in(dtype)

    def extra_repr(self) -> str:
        """Return shape and format, for `print(model)`."""
        adapter = f", lora_rank={self.lora_rank}" if self.lora_rank else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"{self.spec.described()}, bias={self.bias is not None}{adapter}"
        )


class Reader(Protocol):
    """Multiplies by the packed indices of a linear (`qat.models.decoding`)."""

    def reads(self, linear: "FrozenLutLinear", x: Tensor) -> bool:
        """Return whether it can multiply this input."""

    def product(self, linear: "FrozenLutLinear", x: Tensor) -> Tensor:
        """Return what `QuantLinear.product` returns."""

    def forget(self) -> None:
        """Drop what is cached of the linear's parameters."""


class FrozenLutLinear(PackedWeight, QuantLinear):
    """A linear as stored in a checkpoint.

    With a `reader`, inputs may be multiplied straight from the packed indices without gradients.
    """

    reader: Reader | None = None

    def form_(self, dtype: torch.dtype) -> None:
        """See `QuantWeight`; the reader forgets what it holds."""
        super().form_(dtype)
        if self.reader is not None:
            self.reader.forget()  # a replayed graph changes parameters, but not their version

    def release_(self) -> None:
        """See `QuantWeight`; the reader forgets what it holds."""
        super().release_()
        if self.reader is not None:
            self.reader.forget()

    def product(self, x: Tensor) -> Tensor:
        """See `QuantLinear`; without gradients it may read the packed indices directly."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.reader is None:
            return super().product(x)
        is_formed = self.formed is not None or self._joined[0] is not None
        if is_formed or not self.reader.reads(self, x):
            return super().product(x)
        return self.reader.product(self, x)


class LutLinear(LatentWeight, QuantLinear):
    """A linear that learns through a latent weight."""


def quant_linears(model: nn.Module) -> dict[str, QuantLinear]:
    """Return the model's quantized linears by name, in order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
