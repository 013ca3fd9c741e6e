"""Linear layer that trains a latent weight and computes with its nearest look-up-table value."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from qat.nn.quant_linear import QuantLinear
from qat.quant.spec import LutSpec
from qat.quant.weight import QuantizedWeight, expand_scales, latent_indices, rms, round_scales


class LutLinear(QuantLinear):
    """Codes follow a latent weight; forward uses only weights that the exported model can hold.

    The latent weight keeps the dtype that it is given, float32 or bfloat16. Backward passes the
    gradient of the quantized weight to `weight` unchanged (straight-through
    estimator, arXiv:1308.3432) and the exact gradient to `codebook` and the scales.
    """

    def __init__(
        self, weight: Tensor, quantized: QuantizedWeight, bias: Tensor | None, spec: LutSpec
    ) -> None:
        super().__init__(quantized, bias, spec)
        self.weight = nn.Parameter(weight.detach().clone())

    def source(self) -> Tensor:
        """The latent weight."""
        return self.weight.detach()

    @torch.no_grad()
    def indices(self) -> Tensor:
        """The level nearest to each latent weight under the scales as stored: `(O, I)` uint8."""
        S = expand_scales(round_scales(self._source_scales()), self.in_features)
        return latent_indices(self.weight, S, self.levels())

    @torch.no_grad()
    def latent_size(self) -> float:
        """The natural size of the latent weight: its root mean square."""
        return rms(self.weight)

    def weight_parameters(self) -> dict[str, nn.Parameter]:
        """The latent weight, the codebook and the scales, by name."""
        return {"weight": self.weight, **super().weight_parameters()}

    def pulled_back(self, dW: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
        """As for any quantized linear; the latent weight gets `dW` itself."""
        straight_through = {"weight": dW} if "weight" in wanted else {}
        return straight_through | super().pulled_back(dW, wanted)
