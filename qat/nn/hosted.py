"""A linear whose latent weight lies in host memory; what computes is the codes it took last."""

import torch
from torch import Tensor, nn

from qat.nn.quant_linear import LutLinear
from qat.quant.spec import LutSpec
from qat.quant.weight import PackedIndices, QuantizedWeight, pack


class HostedLutLinear(LutLinear):
    """Its `latent` weight lies in pinned host memory, its codes on the device, packed.

    Forming and pulling back read the codes alone: the gradient of the latent weight is that of the
    formed one (`LutLinear`), whatever its value. So the latent weight need not be there before it
    is moved; who moves it, or the codebook or scales that say what is nearest, lets the codes
    `follow_` it after that.

    The latent weight is written into `room`, host memory of its shape, and kept in that dtype.
    The parameter `weight` has the shape and takes the gradient, but one number for all of its
    elements: zero, or NaN where a latent weight was not finite when the codes followed it last.
    """

    packed: Tensor

    def __init__(
        self,
        weight: Tensor,
        quantized: QuantizedWeight,
        bias: Tensor | None,
        spec: LutSpec,
        *,
        room: Tensor,
    ) -> None:
        super().__init__(weight, quantized, bias, spec)
        here = weight.detach().to(room.dtype)
        self.latent = room.copy_(here)
        self._followed: Tensor | None = None
        self._trouble = here.new_zeros(())
        self.weight = nn.Parameter(self._trouble.expand(here.shape))
        packed = pack(quantized.indices, spec.bits, spec.trellis_bits)
        self.register_buffer("packed", packed, persistent=False)
        self.follow_(here)

    def source(self) -> PackedIndices | Tensor:
        """The codes; while they follow a latent weight, that one."""
        if self._followed is not None:
            return self._followed
        spec = self.spec
        return PackedIndices(
            self.packed, spec.bits, self.in_features, spec.vector_size, spec.trellis_bits
        )

    @torch.no_grad()
    def follow_(self, latent: Tensor) -> None:
        """Take the codes of `latent`, a copy on the device, under codebook and scales as they are.

        They are written where they lie, for a recorded forward reads them there.
        """
        self._followed = latent
        codes = self.indices()
        self._followed = None
        self.packed.copy_(pack(codes, self.spec.bits, self.spec.trellis_bits))
        # a sum keeps NaN and infinity
        self._trouble.copy_(0.0 * torch.linalg.vector_norm(latent, 1, dtype=torch.float32))
