"""Linear layer for inference alone: its weight stays packed, scales and all.

Shapes: O out_features, I in_features, T tokens.
"""

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.kernels.lut_matvec import MOST_VECTORS, LutRows, matvec, order_of, spread
from qat.kernels.lut_weight import form
from qat.nn.quant_linear import QuantLinear
from qat.quant.pack import Packed
from qat.quant.weight import Scales, from_stored


class Scratch:
    """Memory for one formed weight at a time, shared by all layers of a model."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where to write a weight of that kind, until the next call."""
        memory, size = self._memory, prod(shape)
        is_fit = memory is not None and (memory.dtype, memory.device) == (dtype, device)
        if not is_fit or memory.numel() < size:
            self._memory = torch.empty(size, dtype=dtype, device=device)
        return self._memory[:size].view(shape)


class PackedLinear(nn.Module):
    """`y = x @ W.T + bias` with `W = codebook[indices] * S` of a frozen linear, read packed.

    Up to 8 tokens are multiplied straight from the packed indices; for more, the weight is formed
    into memory that all layers share. Nothing learns here, and nothing is saved.
    """

    def __init__(self, linear: QuantLinear, rows: LutRows, scratch: Scratch) -> None:
        super().__init__()
        self.out_features, self.in_features = rows.shape
        self.rows, self.spec = rows, linear.spec
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._scratch = scratch

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """`W`, `(O, I)` in `dtype`, until another layer of the model forms its own."""
        rows, bits = self.rows, self.spec.scale_bits
        scales = Scales(from_stored("scales", rows.scales, bits), bits=bits)
        source = Packed(rows.octets, rows.bits, self.in_features)
        codebook = rows.codebooks[0, : self.spec.num_levels]
        out = self._scratch.room(rows.shape, dtype, rows.octets.device)
        return form(source, codebook, scales, dtype, out=out)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., I)` to `(..., O)`."""
        if x.numel() > MOST_VECTORS * self.in_features:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self.weight_in(x.dtype), bias)
        flat = spread(x.reshape(-1, self.in_features), order_of(self.rows))
        y = matvec(flat, self.rows, bias=self.bias)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)
