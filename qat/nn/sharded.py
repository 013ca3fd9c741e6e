"""Weights whose latent rows are divided over ranks; each rank computes with the whole."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from qat.nn.lut_embedding import QuantEmbedding, QuantHead
from qat.nn.quant_linear import QuantLinear
from qat.nn.quant_weight import LatentWeight
from qat.quant.weight import BY_ROW, QuantizedWeight, Scales, rms
from qat.ranks import Ranks


class ShardedWeight(LatentWeight):
    """A weight that holds this rank's rows of the latent `weight` and computes with the whole.

    Every rank forms its rows and gathers the others: `W` is communicated in the dtype that it is
    formed in, with the same bits as in one process. `dW` is reduced to the rank that holds its rows
    and pulled back there a little later. The gradients of codebook and scales, which every rank
    holds whole, are partial and must still be summed over ranks. All ranks must call the methods
    that form, pull back or return codes together.
    """

    takes_rows = False  # a rank's gradient of a few rows would have to be summed over ranks

    def __init__(
        self,
        whole: Tensor,
        quantized: QuantizedWeight,
        *own: Any,  # noqa: ANN401
        ranks: Ranks,
    ) -> None:
        self.rows = ranks.rows(len(whole))
        super().__init__(whole[self.rows], quantized, *own)
        self.ranks = ranks
        self._latent_size = rms(whole)

    def weight_count(self) -> int:
        """Return the number of weights over all ranks."""
        return self.out_features * self.in_features

    def whole(self, rows: Tensor) -> Tensor:
        """Gather all O rows from the `rows` of each rank."""
        return self.ranks.gather_rows(rows, self.out_features)

    def indices(self) -> Tensor:
        """Return the index nearest to each latent weight or vector of all ranks, `(O, I / d)`."""
        return self.whole(super().indices())

    def pulled_back(self, dW: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
        """Return this rank's part: rows of the latent weight, addends of what else is `wanted`."""
        return self._from_rows(self.ranks.sum_rows(dW)(), wanted)

    @torch.no_grad()
    def pull_back_(self, dW: Tensor) -> None:
        """See `QuantWeight`, but backward continues while `dW` is summed.

        The gradients are complete after `Ranks.finish_deferred`.
        """
        summed = self.ranks.sum_rows(dW)
        self.ranks.defer(lambda: self._add_(self._from_rows(summed(), self._learning())))

    def _from_rows(self, dW: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
        gradients = super().pulled_back(dW, wanted)
        for name in gradients.keys() & set(BY_ROW):
            addend = torch.zeros_like(self.get_parameter(name))
            addend[self.rows] = gradients[name]
            gradients[name] = addend
        return gradients

    def _source_scales(self) -> Scales:
        return super()._source_scales().of_rows(self.rows)

    def _form(
        self, dtype: torch.dtype, out: Tensor | None = None, *, again: bool = False
    ) -> Tensor:
        shape = self.out_features, self.in_features
        out = torch.empty(shape, dtype=dtype, device=self.codebook.device) if out is None else out
        mine = super()._form(dtype, out.detach()[self.rows], again=again)
        return self.ranks.gather_rows(mine, self.out_features, out)


class ShardedLutLinear(ShardedWeight, QuantLinear):
    """A linear with some rows of its latent weight."""


class ShardedLutEmbedding(ShardedWeight, QuantEmbedding):
    """An embedding with some rows of its latent table."""


class ShardedLutHead(ShardedWeight, QuantHead):
    """A head with some rows of its latent table."""
