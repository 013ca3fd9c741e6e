"""Embeddings and heads with a quantized weight, their table (`qat.nn.quant_weight`).

A tied pair has one table, which the embedding owns. In a training step the gradient of a table
arrives from the words of a batch, whose rows are pulled back at once, and from the head, whose
float32 sums become the gradient of the latent table: a second tensor of that size would be the
largest of a small model. There is one until they are pulled back if the latent table has a gradient
already, from the micro-batch before, or is in bfloat16.

Shapes: V words, D model width, B sequences, S positions, T = B * S.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat.backend.device import on
from qat.kernels.head import named_words
from qat.kernels.lut_weight import form, pull_back
from qat.nn.activation import ActivationQuantizer, read
from qat.nn.quant_weight import PIECE, LatentWeight, PackedWeight, QuantWeight
from qat.quant.spec import LutSpec
from qat.quant.weight import BY_ROW, PackedIndices, QuantizedWeight, Scales

if TYPE_CHECKING:  # converting exchanges nothing
    from qat.ranks import Ranks


class QuantTable(QuantWeight):
    """A `(V, D)` table `codebook[indices] * S` of an embedding or a head.

    `dtype` is that of the float table it replaces; casting the model changes `dtype` and leaves the
    stored tensors as they are. The `activation` belongs to the head that uses the table, if there
    is one. Nothing learns until an optimizer says so.
    """

    takes_rows = True
    """True if the gradient of some rows can be pulled back without that of all others."""

    def __init__(self, quantized: QuantizedWeight, spec: LutSpec, dtype: torch.dtype) -> None:
        super().__init__(quantized, spec)
        self.dtype = dtype
        self.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """The device of the table."""
        return self.codebook.device

    @torch.no_grad()
    def form_rows(
        self, which: slice | Tensor, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Return the rows `which`, a slice or ids `(N,)`, as `(N, D)`; forms only these."""
        return form(*self._made_of_rows(which), dtype, out=out)

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """See `QuantWeight`; a table that does not learn is formed once and cached."""
        formed = self.formed
        if self.learns():
            if formed is not None and not formed.requires_grad:
                self.release_()  # formed when nothing learned
            return super().weight_in(dtype)
        if formed is None or (formed.dtype, formed.device) != (dtype, self.device):
            self.formed = formed = self.quantized_weight(dtype)
        return formed

    @property
    def is_in_step(self) -> bool:
        """True inside a training step, if the table learns and has been formed."""
        return self.formed is not None and self.formed.requires_grad

    @property
    def learns_by_rows(self) -> bool:
        """True inside a training step that pulls the gradient of the table back by rows.

        A device that compiles a step as a whole takes that of the whole table: PyTorch/XLA cannot
        lower the sums by row.
        """
        return self.takes_rows and self.is_in_step and not on(self.device).is_traced

    @torch.no_grad()
    def take_gradient_(self, dW: Tensor) -> None:
        """Pull back the float32 gradient `dW`, `(V, D)`, of the whole table, and take it over.

        Equal to `pull_back_`. `dW` becomes the gradient of a float32 latent table that has none,
        and what is computed on the way is as large as some of its rows.
        """
        learning = self._learning()
        latent = learning.get("weight")
        if latent is not None and latent.grad is None and latent.dtype == dW.dtype:
            latent.grad = dW
            del learning["weight"]
        for rows in self._pieces():
            self._pull_back_rows_(rows, dW[rows], learning)

    @torch.no_grad()
    def pull_back_rows_(self, which: Tensor, dW: Tensor) -> None:
        """Add the gradients that follow from `dW`, that of the rows `which`, to what learns.

        Equal to `pull_back_` of a gradient that is zero in all other rows. Ids `(N,)` may repeat:
        their rows of `dW`, `(N, D)` float32, add up.
        """
        self._pull_back_rows_(which, dW, self._learning())

    def _pull_back_rows_(
        self, which: slice | Tensor, dW: Tensor, learning: dict[str, nn.Parameter]
    ) -> None:
        gradients = pull_back(dW, *self._made_of_rows(which), wanted=learning)
        if "weight" in learning:
            gradients["weight"] = dW
        for name, gradient in gradients.items():
            parameter = learning[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            if name not in (*BY_ROW, "weight"):
                parameter.grad += gradient
            elif isinstance(which, slice):
                parameter.grad[which] += gradient
            else:
                parameter.grad.index_add_(0, which, gradient.to(parameter.dtype))

    def _made_of_rows(self, which: slice | Tensor) -> tuple[PackedIndices | Tensor, Tensor, Scales]:
        source, levels = self._made_of()
        if isinstance(source, PackedIndices):
            source = source._replace(octets=source.octets[which])
        else:
            source = source[which]
        return source, levels, self._source_scales().of_rows(which)

    def _form(
        self, dtype: torch.dtype, out: Tensor | None = None, *, again: bool = False
    ) -> Tensor:
        V, D = self.out_features, self.in_features
        table = torch.empty(V, D, dtype=dtype, device=self.device) if out is None else out.detach()
        for piece in self._pieces():
            self.form_rows(piece, dtype, out=table[piece])
        return table

    def _pieces(self) -> Iterator[slice]:
        """Return the rows of each piece of the table."""
        size = max(1, PIECE // self.in_features)
        return (slice(start, start + size) for start in range(0, self.out_features, size))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """Return shape and format, for `print(model)`."""
        return (
            f"{self.out_features}, {self.in_features}, {self.spec.described()}, dtype={self.dtype}"
        )


class Lookup(NamedTuple):
    """The factor of an embedding's rows, and its row for padding."""

    embed_scale: float | None = None
    """Factor of the rows in some models, else None."""
    padding_idx: int | None = None
    """A row that never learns, as in torch; some models set it to zero whenever they are opened."""


class QuantEmbedding(QuantTable):
    """`embedding.weight[ids]` in `dtype`; forms only the rows of these ids."""

    def __init__(
        self,
        quantized: QuantizedWeight,
        spec: LutSpec,
        dtype: torch.dtype,
        lookup: Lookup = Lookup(),  # noqa: B008 - immutable
    ) -> None:
        super().__init__(quantized, spec, dtype)
        self.embed_scale, self.padding_idx = lookup

    def own(self) -> tuple[LutSpec, torch.dtype, Lookup]:
        """Return format, dtype and how rows are read."""
        return self.spec, self.dtype, Lookup(self.embed_scale, self.padding_idx)

    @torch.no_grad()
    def take_gradient_(self, dW: Tensor) -> None:
        """See `QuantTable`; the row of the padding gets no gradient."""
        super().take_gradient_(self._without_padding(dW))

    @torch.no_grad()
    def pull_back_rows_(self, which: Tensor, dW: Tensor) -> None:
        """See `QuantTable`; the row of the padding gets no gradient."""
        if self.padding_idx is not None:
            dW = dW.masked_fill(which.eq(self.padding_idx)[:, None], 0.0)
        super().pull_back_rows_(which, dW)

    @torch.no_grad()
    def pull_back_(self, dW: Tensor) -> None:
        """See `QuantWeight`; the row of the padding gets no gradient."""
        super().pull_back_(self._without_padding(dW))

    def _without_padding(self, dW: Tensor) -> Tensor:
        if self.padding_idx is not None:
            dW[self.padding_idx].zero_()
        return dW

    def forward(self, ids: Tensor) -> Tensor:
        """Map `(B, S)` ids to `(B, S, D)`."""
        flat = ids.flatten().to(self.device)
        rows = self._looked_up(flat).view(*ids.shape, self.in_features)
        if self.embed_scale is None:
            return rows
        return rows * torch.tensor(self.embed_scale, dtype=self.dtype).item()

    def _looked_up(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids` `(T,)` in `dtype`, `(T, D)`."""
        formed = self.formed
        if self.learns() and torch.is_grad_enabled():
            if formed is not None and self.learns_by_rows:
                return _Lookup.apply(self, ids, formed)
            return F.embedding(ids, self.weight_in(self.dtype)).to(self.dtype)
        if formed is not None and formed.dtype == self.dtype:
            return F.embedding(ids, formed)  # formed already for a tied head
        if not self.takes_rows:
            return F.embedding(ids, self.weight_in(self.dtype)).to(self.dtype)
        return self.form_rows(ids, self.dtype)


class FrozenLutEmbedding(PackedWeight, QuantEmbedding):
    """An embedding as stored in a checkpoint."""


class LutEmbedding(LatentWeight, QuantEmbedding):
    """An embedding that learns through a latent table."""


class TableHead(nn.Module):
    """`hidden @ table.T + bias` with a quantized table, its own or the embedding's."""

    bias: nn.Parameter | None
    named: Tensor | None = None
    """Words `(V,)` bool whose rows of a table that learns get a gradient; None if all do."""

    def name_(self, ids: Tensor, ranks: "Ranks") -> None:
        """Let the words `ids` of all ranks be `named`, those below 0 being none, in place."""
        count = named_words(ids, self.table.out_features)
        ranks.sum_([count])
        if self.named is None:
            self.named = count > 0
        self.named.copy_(count)  # a recorded step reads it where it is

    @property
    def table(self) -> QuantTable:
        """The table that the head multiplies by."""
        raise NotImplementedError

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `(..., D)` to `(..., V)`."""
        return self.product(read(self, hidden))

    def product(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states that are already quantized."""
        device = hidden.device.type
        is_cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_cast else hidden.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(hidden.to(dtype), self.table.weight_in(dtype), bias)


class QuantHead(QuantTable, TableHead):
    """A head with a table of its own."""

    def __init__(
        self, quantized: QuantizedWeight, spec: LutSpec, dtype: torch.dtype, bias: Tensor | None
    ) -> None:
        super().__init__(quantized, spec, dtype)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @property
    def table(self) -> QuantTable:
        """Its own table: the head itself."""
        return self

    def own(self) -> tuple[LutSpec, torch.dtype, Tensor | None]:
        """Return format, dtype and bias."""
        return self.spec, self.dtype, self.bias


class FrozenLutHead(PackedWeight, QuantHead):
    """A head as stored in a checkpoint."""


class LutHead(LatentWeight, QuantHead):
    """A head that learns through a latent table."""


class TiedLutHead(TableHead):
    """A head with the table of the embedding, which owns it."""

    def __init__(self, embedding: QuantEmbedding, bias: Tensor | None) -> None:
        super().__init__()
        self.tie(embedding)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def tie(self, embedding: QuantEmbedding) -> None:
        """Read the table of `embedding` from now on."""
        self._embedding = (embedding,)  # in a tuple: a submodule would have a second name

    @property
    def table(self) -> QuantEmbedding:
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


class _Lookup(torch.autograd.Function):
    """Rows of a table, whose gradient is pulled back without that of the whole table."""

    @staticmethod
    def forward(ctx: Any, table: QuantTable, ids: Tensor, _formed: Tensor) -> Tensor:
        ctx.table = table
        ctx.save_for_backward(ids)
        return table.form_rows(ids, table.dtype)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[None, ...]:
        ctx.table.pull_back_rows_(*summed_by_word(ctx.saved_tensors[0], d_rows))
        return None, None, None


def summed_by_word(ids: Tensor, d_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the gradients `(T, D)` of equal `ids` `(T,)` in float32.

    Returns T ids and rows: the sum of each word once; all others are zeros, for word 0. So the
    shapes do not depend on the ids, and the result not on the order in which threads add.
    """
    words, order = ids.sort(stable=True)
    place = F.pad((words[1:] != words[:-1]).cumsum(0), (1, 0))
    sums = torch.zeros_like(d_rows, dtype=torch.float32)
    sums.index_put_((place,), d_rows[order].float(), accumulate=True)
    return torch.zeros_like(ids).scatter_(0, place, words), sums


def quant_tables(model: nn.Module) -> dict[str, QuantTable]:
    """Return the model's quantized tables by name, in order; a tied head has none."""
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantTable)}
