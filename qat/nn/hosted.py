"""Weights with their latent weight in host memory and their packed codes on the device."""

from typing import Any

import torch
from torch import Tensor, nn

from qat.nn.lut_embedding import QuantEmbedding, QuantHead
from qat.nn.quant_linear import QuantLinear
from qat.nn.quant_weight import LatentWeight
from qat.quant.weight import PackedIndices, QuantizedWeight, pack


class HostedWeight(LatentWeight):
    """A weight whose `latent` weight is in pinned host memory, and its packed codes on the device.

    Forming and pulling back need only the codes: the gradient of the latent weight equals that of
    the formed weight (`LatentWeight`), whatever its value. The latent weight is therefore needed on
    the device only for its update. After changing it, the codebook or the scales, call `follow_` to
    update the codes.

    The latent weight is written into `room`, host memory of its shape, and kept in that dtype. The
    parameter `weight` has the same shape and takes the gradient, but stores a single number for all
    elements: zero, or NaN if a latent weight was not finite at the last `follow_`.
    """

    packed: Tensor

    def __init__(
        self,
        weight: Tensor,
        quantized: QuantizedWeight,
        *own: Any,  # noqa: ANN401
        room: Tensor,
    ) -> None:
        super().__init__(weight, quantized, *own)
        here = weight.detach().to(room.dtype)
        self.latent = room.copy_(here)
        self._followed: Tensor | None = None
        self._nan_flag = here.new_zeros(())
        # one number, expanded: takes no memory of the weight's size
        self.weight = nn.Parameter(self._nan_flag.expand(here.shape))
        self.register_buffer("packed", pack(quantized.indices, self.spec.bits), persistent=False)
        self.follow_(here)

    def source(self) -> PackedIndices | Tensor:
        """Return the codes; inside `follow_`, the latent weight that they follow."""
        if self._followed is not None:
            return self._followed
        spec = self.spec
        return PackedIndices(self.packed, spec.bits, self.in_features, spec.vector_size)

    @torch.no_grad()
    def follow_(self, latent: Tensor) -> None:
        """Update the codes from `latent`, a copy on the device, under present codebook and scales.

        They are written in place, because a captured forward reads them at that address.
        """
        self._followed = latent
        codes = self.indices()
        self._followed = None
        self.packed.copy_(pack(codes, self.spec.bits))
        # a sum propagates NaN and infinity
        self._nan_flag.copy_(0.0 * torch.linalg.vector_norm(latent, 1, dtype=torch.float32))


class HostedLutLinear(HostedWeight, QuantLinear):
    """A linear whose latent weight is on the host."""


class HostedLutEmbedding(HostedWeight, QuantEmbedding):
    """An embedding whose latent table is on the host."""


class HostedLutHead(HostedWeight, QuantHead):
    """A head whose latent table is on the host."""
