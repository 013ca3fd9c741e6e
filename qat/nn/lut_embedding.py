"""Embeddings and heads whose table is stored as packed indices and does not learn.

Shapes: V words, D model width, B sequences, S positions.
"""

from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.kernels.lut_weight import form
from qat.nn.activation import ActivationQuantizer, keeping_dtype, read
from qat.quant.spec import LutSpec
from qat.quant.weight import SCALE_NAMES, PackedIndices, QuantizedWeight, Scales, pack

PIECE = 2**24  # number of weights of a table to form at a time


class FrozenLutTable(nn.Module):
    """A `(V, D)` table `codebook[indices] * S` as a checkpoint holds it.

    All its tensors are buffers. `dtype` is that of the float table it replaces; casting the model
    changes `dtype` and leaves the stored tensors as they are. The `activation` belongs to the head
    that uses the table, if there is one.
    """

    activation: ActivationQuantizer | None
    packed: Tensor
    codebook: Tensor
    formed: Tensor | None

    def __init__(self, quantized: QuantizedWeight, spec: LutSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.out_features, self.in_features = quantized.shape
        self.register_buffer("packed", pack(quantized.indices, spec.bits))
        self.register_buffer("codebook", quantized.codebook.float().clone())
        for name, tensor in quantized.scales.present().items():
            self.register_buffer(name, tensor.float().clone())
        self.register_buffer("formed", None, persistent=False)
        self.register_module("activation", None)

    @property
    def device(self) -> torch.device:
        """The device of the table."""
        return self.packed.device

    def _scales(self) -> Scales:
        parts = {name: self._buffers.get(name) for name in SCALE_NAMES}
        return Scales(**parts, bits=self.spec.scale_bits)

    def weight_tensors(self) -> dict[str, Tensor]:
        """Return the table's tensors except its indices, by name."""
        return {"codebook": self.codebook, **self._scales().present()}

    def indices(self) -> Tensor:
        """Return the stored index of each weight or vector, `(V, D / d)`."""
        return self.source().indices()

    def quantized(self) -> QuantizedWeight:
        """Return the table as a checkpoint stores it."""
        return QuantizedWeight(self.indices(), self.codebook, self._scales())

    @torch.no_grad()
    def rows(self, which: slice | Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return the rows `which`, a slice or ids `(N,)`, as `(N, D)`; unpacks only these."""
        scales = self._scales()
        by_row = {n: t[which] for n, t in scales.present().items() if n in ("scales", "scale_out")}
        scales = scales.replaced(by_row)
        return form(self.source(which), self.codebook, scales, dtype, out=out)

    @torch.no_grad()
    def quantized_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the whole table, `(V, D)` in `dtype`."""
        V, D = self.out_features, self.in_features
        table = torch.empty(V, D, dtype=dtype, device=self.device)
        size = max(1, PIECE // D)
        for piece in (slice(start, start + size) for start in range(0, V, size)):
            self.rows(piece, dtype, out=table[piece])
        return table

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the whole table in `dtype`, formed once and cached: a table does not learn."""
        formed = self.formed
        if formed is None or (formed.dtype, formed.device) != (dtype, self.device):
            self.formed = formed = self.quantized_weight(dtype)
        return formed

    def source(self, which: slice | Tensor = slice(None)) -> PackedIndices:
        """Return the packed indices of the rows `which`."""
        spec = self.spec
        return PackedIndices(self.packed[which], spec.bits, self.in_features, spec.vector_size)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(partial(keeping_dtype, fn), recurse)

    def extra_repr(self) -> str:
        """Return shape and format, for `print(model)`."""
        return (
            f"{self.out_features}, {self.in_features}, {self.spec.described()}, dtype={self.dtype}"
        )


class FrozenLutEmbedding(FrozenLutTable):
    """`embedding.weight[ids]` in `dtype`; unpacks only the rows of these ids."""

    def __init__(
        self,
        quantized: QuantizedWeight,
        spec: LutSpec,
        dtype: torch.dtype,
        embed_scale: float | None = None,
    ) -> None:
        super().__init__(quantized, spec, dtype)
        self.embed_scale = embed_scale  # factor of the rows in some models, else None

    def forward(self, ids: Tensor) -> Tensor:
        """Map `(B, S)` ids to `(B, S, D)`."""
        flat = ids.flatten().to(self.device)
        if self.formed is not None and self.formed.dtype == self.dtype:
            rows = F.embedding(flat, self.formed)  # formed already for a tied head
        else:
            rows = self.rows(flat, self.dtype)
        rows = rows.view(*ids.shape, self.in_features)
        if self.embed_scale is None:
            return rows
        return rows * torch.tensor(self.embed_scale, dtype=self.dtype).item()


class LutHead(nn.Module):
    """`hidden @ table.T + bias` with a packed table."""

    bias: nn.Parameter | None

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `(..., D)` to `(..., V)`."""
        return self.product(read(self, hidden))

    def product(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states that are already quantized."""
        device = hidden.device.type
        is_cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_cast else hidden.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(hidden.to(dtype), self.weight_in(dtype), bias)

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the whole table in `dtype`, formed once and cached."""
        raise NotImplementedError


class FrozenLutHead(FrozenLutTable, LutHead):
    """A head with a table of its own."""

    def __init__(
        self, quantized: QuantizedWeight, spec: LutSpec, dtype: torch.dtype, bias: Tensor | None
    ) -> None:
        super().__init__(quantized, spec, dtype)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())


class TiedLutHead(LutHead):
    """A head with the table of the embedding, which owns it."""

    def __init__(self, embedding: FrozenLutEmbedding, bias: Tensor | None) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple: a submodule would have a second name
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @property
    def table(self) -> FrozenLutEmbedding:
        """The embedding that owns the table."""
        return self._embedding[0]

    @property
    def activation(self) -> ActivationQuantizer | None:
        """The quantizer of the hidden states; None without one."""
        return self.table.activation

    @property
    def device(self) -> torch.device:
        """The device of the table."""
        return self.table.device

    @property
    def out_features(self) -> int:
        """Number of words."""
        return self.table.out_features

    @property
    def in_features(self) -> int:
        """Width of the model."""
        return self.table.in_features

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """See `LutHead`."""
        return self.table.weight_in(dtype)


def lut_tables(model: nn.Module) -> dict[str, FrozenLutTable]:
    """Return the model's quantized tables by name, in order; a tied head has none."""
    return {name: m for name, m in model.named_modules() if isinstance(m, FrozenLutTable)}
