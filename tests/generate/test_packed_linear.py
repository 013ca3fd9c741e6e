"""A linear read packed: where it multiplies packed indices and where it forms its weight."""

import pytest
import torch
from quantized import frozen_linear

from qat.generate.step import PackedLinear, Scratch
from qat.kernels.lut_matvec import MOST_VECTORS
from qat.kernels.lut_rows import LutRows
from qat.quant.spec import LutSpec


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, MOST_VECTORS, MOST_VECTORS + 1])
@pytest.mark.parametrize(
    "size",
    [{"bits": 2}, {"bits": 8, "vector_size": 4}, {"bits": 8, "trellis_bits": 2}],
    ids=["2", "8 of 4", "trellis"],
)
def test_up_to_eight_tokens_are_multiplied_from_packed_indices(
    size: dict, tokens: int, has_bias: bool
) -> None:
    linear = frozen_linear(16, 32, LutSpec(**size, group_size=16, scale_bits=8), has_bias)
    parts = linear.source(), linear.levels(), linear.scales_as_stored()
    packed = PackedLinear(linear, LutRows.of(*parts, is_short=False), Scratch())
    formed = []
    real = packed.weight_in
    packed.weight_in = lambda dtype: formed.append(dtype) or real(dtype)
    x = torch.randn(1, tokens, 32)
    found = packed(x)
    assert found.shape == (1, tokens, 16) and bool(formed) is (tokens > MOST_VECTORS)
    torch.testing.assert_close(found, linear(x).detach(), rtol=1e-5, atol=1e-5)
