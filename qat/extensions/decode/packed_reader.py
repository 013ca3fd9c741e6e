"""Products of inputs with packed indices, without a weight in memory."""

import torch
from torch import Tensor

from qat.extensions.decode.kernels.lut_gemm import Part, is_format, lut_gemm
from qat.kernels.dispatch import use_triton
from qat.nn.quant_linear import FrozenLutLinear
from qat.quant.weight import to_stored


class PackedReader:
    """Multiplies 16-bit inputs by the packed indices of one linear (`lut_gemm`)."""

    def __init__(self) -> None:
        self._stored: tuple[tuple[int, ...], Part] | None = None

    def reads(self, linear: FrozenLutLinear, x: Tensor) -> bool:
        """Return whether there is a kernel for the linear's format and for this input."""
        spec = linear.spec
        return (
            x.dtype in (torch.bfloat16, torch.float16)
            and not linear.lora_rank
            and spec.scale == "group"
            and not spec.table_rows
            and is_format(spec.bits, spec.vector_size, spec.group_size, linear.in_features)
            and use_triton(x, __name__)
        )

    def product(self, linear: FrozenLutLinear, x: Tensor) -> Tensor:
        """Return `x @ W.T + bias` of an already quantized input: `(..., I)` to `(..., O)`."""
        return lut_gemm(x, [self._as_stored(linear)], linear.bias)

    def forget(self) -> None:
        """Drop the encoded scales."""
        self._stored = None

    def _as_stored(self, linear: FrozenLutLinear) -> Part:
        """Return the weight as a checkpoint stores it; encoded scales are cached."""
        scales = linear.get_parameter("scales")
        version = 0 if scales.is_inference() else scales._version
        now = (scales.data_ptr(), version, linear.codebook.data_ptr(), linear.packed.data_ptr())
        if self._stored is None or self._stored[0] != now:
            bits = linear.spec.scale_bits
            encoded = to_stored("scales", linear.scales_as_stored().by_group(), bits)
            self._stored = now, Part(linear.packed, encoded, linear.levels(), linear.spec.bits)
        return self._stored[1]
