"""Linear layer with fixed, packed indices: its scales, codebook and bias may learn."""

import torch
from torch import Tensor

from qat.nn.quant_linear import QuantLinear
from qat.quant.pack import Packed, pack
from qat.quant.spec import LutSpec
from qat.quant.weight import QuantizedWeight


class FrozenLutLinear(QuantLinear):
    """The form of a checkpoint: `bits` bits per index in memory, a fraction of a latent weight."""

    def __init__(self, quantized: QuantizedWeight, bias: Tensor | None, spec: LutSpec) -> None:
        super().__init__(quantized, bias, spec)
        self.register_buffer("packed", pack(quantized.indices, spec.bits))

    @torch.no_grad()
    def index_by_(self, codebook: Tensor) -> None:
        """Rename the indices for levels that lie in another order than the ascending, stored one.

        Training may carry one level past another; a checkpoint ranks them anew, and a run that goes
        on from it needs them as they lay. The caller puts `codebook` in place.
        """
        order = codebook.argsort(stable=True).to(self.packed.device, torch.uint8)
        self.packed.copy_(pack(order[self.indices().int()], self.spec.bits))

    def source(self) -> Packed:
        """The packed indices."""
        return Packed(self.packed, self.spec.bits, self.in_features)

    def indices(self) -> Tensor:
        """The stored index of each weight: `(O, I)` uint8."""
        return self.source().indices()
